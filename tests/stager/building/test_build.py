"""The whole build, in this process: what goes into a bundle, and what a second build does again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from bundle.format.manifest import Part
from stager.building.current_bundle import current_bundle, list_project_sources, offline_root
from stager.config.load import load
from stager.core import store
from stager.core.errors import ConfigError, WheelError
from stager.core.files import BUNDLE_SUFFIX
from stager.core.store import Store, digest_file
from stager.core.values import Digest, Target
from stager.layers import source
from stager.pack.members import copy_to, refuse_in_project
from tests.support.building import Project, Recorder, contents
from tests.support.golden import check_golden
from tests.support.signing import ALICE, allow
from tests.support.trees import write
from tests.support.wheelhouse import without_compression

EVERYTHING = ("alpha", "cli-tool", "My.Odd_Name", "ns-one", "ns-two", "pth-pkg", "schemes")


def shipped(project, built, kind):
    """The files of the layers of one kind, without bytecode."""
    layers = [layer for layer in built.made.layers if layer.kind == kind]
    paths = {path for layer in layers for path in contents(project.store.layer(layer.id))}
    return {path for path in paths if "__pycache__" not in path}


def test_every_kind_of_package_works_where_it_is_unpacked(project):
    project.settings(*EVERYTHING).build()
    code = (
        "import os, importlib.metadata as m\n"
        "import alpha, beta, my_odd_name, schemes_pure, schemes_plat, from_pth\n"
        "import shared_ns.one, shared_ns.two\n"
        "print(beta.VERSION, shared_ns.one.WHO, shared_ns.two.WHO, from_pth.VALUE)\n"
        "print(os.environ['PTH_PKG_RAN'], m.version('my-odd-name'), __import__('sys').prefix)\n"
    )
    done = project.expect("exec", "-q", "--", "python", "-c", code)
    first, second = done.stdout.splitlines()
    assert first == "2.0 one two reached through a .pth"
    ran, version, prefix = second.split()
    assert (ran, version) == ("1", "1.0")
    for name, said in (("cli-tool", "cli-tool ran\n"), ("schemes-script", f"schemes {prefix}\n")):
        done = project.stager("exec", "-q", "--", name)
        assert (done.returncode, done.stdout) == (0, said)


def test_the_ids_of_two_bundles_and_of_their_layers(project, wheelhouse):
    """A golden file, of bundles without our own code in them: the node program and the trainer.

    They are for a Python that nobody has, so they hold no bytecode and no decompressor.
    """
    if zstandard.ZSTD_VERSION != (1, 5, 7):
        pytest.skip("each id depends on the version of zstd, and these are of 1.5.7")
    without_compression(wheelhouse)
    target = 'python = "3.99"\nplatform = "manylinux_2_28_x86_64"\n'
    (project.root / "data").mkdir()
    (project.root / "data" / "table.csv").write_text("1,2\n" * 9)
    more = f'{target}prune = ["cli-tool:*_tool.py"]\n[assets]\npaths = ["data"]\n'
    lines = []
    for built in (
        project.settings("alpha", more=target).build(),
        project.settings(*EVERYTHING, more=f'{more}env = {{ TABLE = "data" }}').build(),
    ):
        manifest = built.packed.manifest
        layers = tuple(layer for layer in manifest.layers if layer.kind != "trainer")
        node = Part("node.pyz", Digest.of(b""), 0)
        lines.append(f"bundle {replace(manifest, layers=layers, node=node).id}")
        lines += [f"{one.kind} {one.name} {one.version} {one.id} {one.head}" for one in layers]
    check_golden("ids.txt", "\n".join(lines) + "\n")


def test_a_changed_wheel_is_one_layer(project):
    more = "[project]\npath = false"  # the settings are a part of the project, and change too
    project.settings("alpha", "beta==1.1", more=more).build()
    changed = project.settings("alpha", "beta==2.0", more=more).build()
    assert (changed.made.built, changed.made.reused) == (1, 2)
    back = project.settings("alpha", "beta==1.1", more=more).build()
    assert back.made.built == 0
    assert back.packed.reused


def test_the_project_layer_honours_gitignore_exclude_and_outputs(project):
    """So what a run writes does not make the bundle stale."""
    write(project.root, "lib/a.py", "lib/.gitignore", "runs/1.log", "big.pt", "out/m", "keep.pt")
    (project.root / ".gitignore").write_text("runs/\n")
    more = '[project]\nexclude = ["*.pt", "!keep.pt"]\noutputs = ["out/"]'
    built = project.settings("alpha", more=more).build()
    there = [".gitignore", "keep.pt", "lib/.gitignore", "lib/a.py", "stager.toml", "train.py"]
    assert shipped(project, built, "project") == {f"project/{path}" for path in there}
    write(project.root, "out/model.pt", "runs/2.log")
    assert current_bundle(load(project.root), Recorder()).path == built.packed.path


def test_another_signer_makes_no_other_bundle(project, alice):
    signers = "[trust]\nallowed-signers = 'allowed_signers'\n"
    project.settings("alpha", more=signers)
    allow(project.root, f"{ALICE} {alice.public}")
    built = project.build()
    assert shipped(project, built, "project") == {"project/stager.toml", "project/train.py"}

    allow(project.root, f"{ALICE} {alice.public}", f"bob@example.org {alice.public}")
    recorder = Recorder()
    assert current_bundle(load(project.root), recorder).path == built.packed.path
    assert recorder.notes == []


def test_a_lock_that_was_made_anew_makes_the_bundle_stale(project):
    """It is no part of the bundle, and decides what is in it."""
    first = project.build().packed.path
    config = load(project.root)
    assert current_bundle(config, Recorder()).path == first
    lock = project.root / "pylock.toml"
    lock.write_text(lock.read_text() + "# by hand\n")
    told = Recorder()
    assert current_bundle(config, told).path == first
    assert told.phases[0] == "lock"


@pytest.mark.parametrize(
    "more", ['imports = ["beta"]', 'build-env = { MAX_JOBS = "2" }', '[project]\nname = "other"']
)
def test_settings_that_decide_a_bundle_make_it_again(project, more):
    project.build()
    project.settings("alpha", more=more)
    recorder = Recorder()
    current_bundle(load(project.root), recorder)
    assert any("building it again" in note for note in recorder.notes)


def test_the_offline_root_is_not_shipped_even_in_the_project(project, monkeypatch):
    inside = project.root / "store [1]"
    project.store.root.rename(inside)
    monkeypatch.setenv("OFFLINE_ROOT", str(inside))
    here = Project(root=project.root, store=Store(inside))
    built = here.build()
    assert not any("store" in path for path in shipped(here, built, "project"))
    again = here.build()
    assert (again.made.built, again.packed.path) == (0, built.packed.path)


def test_assets_are_layers_of_their_own(project, tmp_path):
    write(project.root, "data/a.csv", "data/b.csv")
    outside = tmp_path / "model"
    write(outside, "weights.bin")
    more = f'[assets]\npaths = ["data/a.csv", "data/*.csv", "{outside}", "./data/a.csv"]'
    built = project.settings("alpha", more=more).build()
    assert shipped(project, built, "asset") == {
        *(f"assets/{name}" for name in ("data/a.csv", "data/b.csv", "model/weights.bin"))
    }
    assert not any("data" in path for path in shipped(project, built, "project"))
    (outside / "weights.bin").write_bytes(b"other")
    assert project.build().made.built == 1


def test_without_the_decompressor_the_message_says_what_to_put_where(project):
    project.build().packed.path.unlink()  # which has the decompressor, too
    (wheel,) = project.store.wheels.glob("zstandard-*")
    name = wheel.name
    wheel.unlink()
    for offline in (True, False):
        with pytest.raises(WheelError, match="decompressor") as caught:
            project.build(offline=offline)
        assert name in caught.value.hint
        assert str(project.store.wheels) in caught.value.hint


def test_the_offline_root_is_the_variables_then_the_settings_then_the_default(
    project, monkeypatch, tmp_path
):
    project.settings("alpha", more='offline-root = "here"')
    assert offline_root(load(project.root)) == project.store.root
    monkeypatch.delenv("OFFLINE_ROOT")
    assert offline_root(load(project.root)) == project.root / "here"
    project.settings("alpha", more='python = "3.12"')
    assert offline_root(load(project.root)) == Path.home() / "offline_repo_py312"
    project.settings("alpha")
    own = Target.from_host().python.replace(".", "")
    assert offline_root(load(project.root)) == Path.home() / f"offline_repo_py{own}"
    monkeypatch.setenv("OFFLINE_ROOT", "~/x")
    assert offline_root(load(project.root)) == Path.home() / "x"


def test_a_changed_project_is_built_again_on_the_way(project):
    first = project.build().packed.path
    (project.root / "train.py").write_text("print('changed')\n")
    (project.root / "out").mkdir()
    for number in range(9):
        (project.root / f"out/{number}").touch()
        (project.root / f"{number}.txt").touch()
    recorder = Recorder()
    second = current_bundle(load(project.root), recorder).path
    assert second != first
    assert (second.exists(), first.exists()) == (True, False), "the one that it replaces is left"
    assert recorder.notes[0] == (
        "the project has changed since its bundle was made (0.txt, 1.txt, 2.txt and 16 more): "
        "building it again"
    )
    assert recorder.notes[-1] == f"{second.name} replaces {first.name}, which is removed"
    assert current_bundle(load(project.root), Recorder()).path == second
    # What only a run can have written is named with a remedy.
    (project.root / "more").mkdir()
    (project.root / "more/model.pt").touch()
    recorder = Recorder()
    current_bundle(load(project.root), recorder)
    assert recorder.notes[0] == (
        "the project has changed since its bundle was made (more/model.pt; if a run wrote "
        "that, name it in project.outputs, or it is sent to the nodes): building it again"
    )


def test_an_edit_neither_reads_nor_writes_an_asset(project, monkeypatch):
    """What a store grows by in ten edits is less than one asset, which is whole in each bundle."""
    asset = project.root / "data.bin"
    asset.write_bytes(os.urandom(6 << 20))
    monkeypatch.setattr(store, "SETTLED_NS", -(10**12))  # it need not grow old first
    first = project.settings("alpha", more='[assets]\npaths = ["data.bin"]').build().packed
    current_bundle(load(project.root), Recorder())
    before = sum(path.stat().st_size for path in files_below(project.store.root))
    read: list[Path] = []

    def noting(path):
        read.append(path)
        return digest_file(path)

    monkeypatch.setattr(store, "digest_file", noting)
    for number in range(10):
        (project.root / "train.py").write_text(f"# {number}\n")
        bundle = current_bundle(load(project.root), Recorder()).path
    assert asset not in read
    assert bundle.stat().st_size < 2 << 20
    assert sum(path.stat().st_size for path in files_below(project.store.root)) - before < 1 << 17
    copy = copy_to(bundle, project.root.parent / "carried.pkgs.tar")
    assert copy.stat().st_size > 6 << 20
    assert not first.path.exists()


def files_below(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


# --- A file that a command writes is kept out of the project, which would ship it the next time


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A project, which is the current directory, and a link that leads to it."""
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    (folder / "away").symlink_to(tmp_path)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("output", ["x.tar", "sub/x.tar", "sub/../x.tar", "../link/x.tar"])
def test_a_place_in_the_project(place, output):
    for known_as in (place, place.parent / "link"):
        with pytest.raises(ConfigError, match="is in the project"):
            refuse_in_project(Path(output), known_as)


@pytest.mark.parametrize(
    "output", ["../x.tar", "sub/../../x.tar", "away/x.tar", f"x{BUNDLE_SUFFIX}"]
)
def test_a_place_outside_or_a_name_that_no_project_ships(place, output):
    for known_as in (place, place.parent / "link"):
        refuse_in_project(Path(output), known_as)


# --- The last look at a project: it holds while nothing has changed, and not a moment longer


SETTINGS = "[environment]\nrequirements = []\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A project whose look is remembered, though it is small and new."""
    monkeypatch.setattr(source, "_FEWEST", 1)
    monkeypatch.setattr(source, "SETTLED_NS", -(1 << 62))
    folder = tmp_path / "project"
    write(folder, "a/b/one.py", "a/data.txt")
    (folder / "link").symlink_to("a/data.txt")
    (folder / "stager.toml").write_text(SETTINGS)
    return folder


def look(root, *, remembered=True):
    store = Store(root.parent / "store")
    store.make_folder(store.projects)
    return list_project_sources(load(root), store, root / "pylock.toml", remembered=remembered)[0]


def in_place(root):
    file = root / "a" / "b" / "one.py"
    status, text = file.stat(), file.read_text()
    file.write_text(text.swapcase())
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def other_link(root):
    (root / "link").unlink()
    (root / "link").symlink_to("a/b/one.py")


CHANGES: dict[str, Callable[[Path], object]] = {
    "content, with the old size and time": in_place,
    "a new file far down": lambda root: (root / "a" / "b" / "two.py").write_text(""),
    "an empty file": lambda root: (root / "a" / "data.txt").write_text(""),
    "another name": lambda root: (root / "a" / "b").rename(root / "a" / "c"),
    "another mode": lambda root: (root / "a" / "b" / "one.py").chmod(0o755),
    "another target": other_link,
    "an ignored file": lambda root: (root / ".gitignore").write_text("*.txt\n/link\n"),
    "a setting": lambda root: (root / "stager.toml").write_text(
        SETTINGS + '[project]\nexclude = ["/a/b"]\n'
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_is_seen(root, change):
    first = look(root)
    again = look(root)
    assert first.tree is not None
    assert again.tree is None, "nothing was read"
    assert again.digest == first.digest
    time.sleep(0.02)  # more than a tick of the file system's clock
    change(root)
    seen = look(root)
    assert seen.digest == look(root, remembered=False).digest != first.digest


def test_what_has_just_changed_is_looked_at_again(root, monkeypatch):
    """A second change in the same tick of the file system's clock would leave the same times."""
    monkeypatch.setattr(source, "SETTLED_NS", 3600 * 10**9)
    look(root)
    assert look(root).tree is not None
