"""An unpacked environment is what pip would have installed, and runs wherever it lies."""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundle.format.archive import BundleFile
from bundle.format.manifest import estimate_room
from bundle.protocol.digest import Digest
from stager.core.store import Store
from stager.core.values import Wheel
from stager.pack.bundle import Packed
from tests.support.bundles import (
    BASE_PYTHON,
    CLEAN,
    HERE,
    OWN,
    Raw,
    forge,
    left_over,
    make_bundle,
    refuses,
    run_node,
    stage,
    tree,
)
from tests.support.gated_program import gated
from tests.support.namespaces import namespace
from tests.support.needs import needs
from tests.support.processes import until
from tests.support.wheelhouse import make_wheel

PYTHON = f"python{HERE.python}"
SITE = f"lib/{PYTHON}/site-packages"
QUIET = {**CLEAN, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def run(*argv: object, env: dict[str, str] = QUIET, cwd: Path = Path("/")) -> str:
    done = subprocess.run(
        list(map(str, argv)), env=env, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ask(env: Path, code: str, **variables: str) -> str:
    return run(env / "bin" / "python", "-c", code, env={**QUIET, **variables})


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pip") / "venv"
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", folder], check=True)
    argv = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q"]
    argv += ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", *wheels]
    subprocess.run(list(map(str, argv)), check=True)
    return folder


def content(folder: Path) -> dict[str, tuple[str, object]]:
    """What wheels put there, without what each installer says about itself."""
    own = {"INSTALLER", "REQUESTED", "direct_url.json", "RECORD"}
    found = {}
    for name, what in tree(folder).items():
        path = Path(name)
        first = path.parts[0]
        venv = first in ("project", ".stager", "pyvenv.cfg", "pkgs", "lib64")
        activation = first == "bin" and path.name.startswith(("python", "activate", "Activate"))
        if venv or activation or path.name in own or "__pycache__" in path.parts:
            continue
        found[name] = what
    return found


def test_the_files_are_those_that_pip_installs(env: Path, installed: Path) -> None:
    ours, pips = content(env), content(installed)
    hooks = [f"{SITE}/_stager_{name}" for name in ("imports", "patches")]
    extra = {f"{hook}.{ending}" for hook in hooks for ending in ("pth", "py")}
    extra.add(f"{SITE}/_stager_hub_datasets.py")
    assert set(ours) - extra == set(pips)
    assert len(pips) > 30
    for name, (mode, data) in pips.items():
        assert ours[name][0] == mode, name
        if not name.startswith("bin/") or name == "bin/schemes-shell":  # first lines differ
            assert ours[name][1] == data, name
    assert (env / "project" / "inner" / "up").read_text() == "print('from the project')\n"
    assert (env / "project" / "empty").read_bytes() == b""
    assert run(env / "project" / "inner" / "tool.sh") == "tool"
    for script in ("cli-tool", "cli-tool-gui", "schemes-shell"):
        assert run(env / "bin" / script) == run(installed / "bin" / script) != ""


def test_it_is_a_virtual_environment_with_a_note_of_its_bundle(env: Path, standard: Packed) -> None:
    code = "import site, sys; print(sys.prefix, sys.base_prefix, site.ENABLE_USER_SITE)"
    assert ask(env, code).split() == [str(env), sys.base_prefix, "False"]
    assert os.readlink(env / "bin" / "python") == BASE_PYTHON
    for name in ("python3", PYTHON):
        assert os.readlink(env / "bin" / name) == "python"
    for name in ("pkgs", f"lib64/{PYTHON}/site-packages"):
        assert (env / name).resolve() == env / SITE
    assert env.name == standard.manifest.id
    assert (env / ".stager" / "manifest.json").read_bytes() == standard.manifest.to_bytes()
    heads = {path.name for path in (env / ".stager" / "layers").iterdir()}
    assert heads == {layer.id for layer in standard.manifest.layers}
    assert env.stat().st_mode & 0o777 == 0o700


def test_what_the_wheels_brought_works(env: Path) -> None:
    code = """
import json, os, sysconfig
import from_pth, schemes_pure, schemes_plat, shared_ns.one, shared_ns.two
from importlib import metadata
print(json.dumps([
    from_pth.VALUE, os.environ["PTH_PKG_RAN"], schemes_pure.WHERE,
    schemes_plat.WHERE, shared_ns.one.WHO, shared_ns.two.WHO, len(shared_ns.__path__),
    metadata.version("my-odd-name"), metadata.distribution("schemes").read_text("INSTALLER"),
    sorted(e.name for e in metadata.entry_points(group="console_scripts")),
    [str(f) for f in metadata.files("schemes") if not f.locate().exists()],
]))
"""
    assert json.loads(ask(env, code)) == [
        "reached through a .pth", "1", "purelib", "platlib", "one", "two", 1,
        "1.0", "stager\n", ["cli-tool"], [],
    ]  # fmt: skip


def test_bytecode_came_with_it_and_is_used(env: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(env, copy, symlinks=True)
    source = copy / SITE / "alpha" / "__init__.py"
    cached = source.parent / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
    assert cached.read_bytes()[4:8] == b"\1\0\0\0"  # unchecked and by hash, PEP 552
    source.write_text("VERSION = 'compiled anew'\n")
    assert ask(copy, "import alpha; print(alpha.VERSION)") == "1.0"
    cached.unlink()
    assert ask(copy, "import alpha; print(alpha.VERSION)") == "compiled anew"


@pytest.mark.parametrize("how", ["copied", "through-a-link"])
def test_it_runs_from_wherever_it_lies(env: Path, tmp_path: Path, how: str) -> None:
    place, real = tmp_path / "with a blank", env
    if how == "through-a-link":
        place.symlink_to(env)
    else:
        real = Path(shutil.copytree(env, place, symlinks=True))
    code = "import sys, alpha; print(sys.prefix); print(alpha.__file__)"
    prefix, module = ask(place, code).splitlines()
    assert prefix == str(place)
    assert module.startswith(f"{place}/")
    assert run(place / "bin" / "cli-tool") == "cli-tool ran"
    linked = tmp_path / "cli"
    linked.symlink_to(place / "bin" / "schemes-script")
    for script in (place / "bin" / "schemes-script", linked):
        assert run(script, cwd=tmp_path) == f"schemes {real}"


def test_the_second_time_it_is_there(env: Path, standard: Packed, tmp_path: Path) -> None:
    base = env.parents[2]
    before = {path: path.stat().st_ctime_ns for path in env.rglob("*") if not path.is_symlink()}
    # The bundle's layers are not looked at any more: here the last one is damaged.
    copy = Path(shutil.copy(standard.path, tmp_path / "copy.tar"))
    with BundleFile(str(copy)) as bundle:
        start = bundle.offset(bundle.manifest.layers[-1].member)
    with copy.open("r+b") as handle:
        handle.seek(start)
        handle.write(b"damage!!")
    assert stage(copy, base).path == str(env)
    after = {path: path.stat().st_ctime_ns for path in env.rglob("*") if not path.is_symlink()}
    assert after == before


def test_an_interpreter_that_moved_is_found_again(env: Path, standard: Packed, base: Path) -> None:
    place = Path(stage(standard, base).path)
    (place / "bin" / "python").unlink()
    (place / "bin" / "python").symlink_to("/opt/gone/python")
    (place / "pyvenv.cfg").write_text("home = /opt/gone\n")
    assert stage(standard, base).path == str(place)
    assert ask(place, "import sys, alpha; print(sys.prefix)") == str(place)
    assert os.readlink(place / "bin" / "python") == BASE_PYTHON
    found = {path.relative_to(place) for path in place.rglob("*")}
    assert found == {path.relative_to(env) for path in env.rglob("*")}


def test_with_an_unusual_umask_it_is_the_same(
    env: Path, standard: Packed, program: Path, base: Path
) -> None:
    argv = [sys.executable, "-I", "-S", program, "unpack", standard.path, base]
    line = 'umask 077; exec "$@"'
    place = Path(run("/bin/sh", "-c", line, "sh", *argv, env=CLEAN))
    (ours, theirs) = (
        {name: data for name, (_, data) in tree(folder).items() if name != "bin/python"}
        for folder in (place, env)
    )
    assert ours == theirs


def test_somebody_else_cannot_look_into_it(env: Path) -> None:
    needs("root")
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "ls", env], capture_output=True, check=False
    )
    assert done.returncode != 0
    assert b"Permission denied" in done.stderr


# --- interrupted ---------------------------------------------------------------------------------


def start(program: Path, bundle: Path, base: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-I", "-S", program, "unpack", bundle, base, "--python", BASE_PYTHON]
    return subprocess.Popen(
        list(map(str, argv)),
        env=CLEAN,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_of_eight_at_a_time_one_writes(standard: Packed, program: Path, base: Path) -> None:
    (base / OWN).mkdir(mode=0o700)
    for name in ("incoming", "locks", "envs"):
        (base / OWN / name).mkdir()
    code = f"""
import json, sys
sys.path.insert(0, {str(program)!r})
from bundle.environment import unpack
sys.stdin.readline()
made = unpack.unpack({str(standard.path)!r}, root={str(base / OWN)!r},
    expected={standard.manifest.id!r}, python={BASE_PYTHON!r}, processes=2, source=unpack.Source())
print(json.dumps(made._asdict()))
"""
    gate, open_gate = os.pipe()
    running = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code], stdin=gate, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    os.close(gate)
    time.sleep(0.5)  # most have started and wait at the gate
    os.write(open_gate, b"\n" * 8)
    os.close(open_gate)
    answers = [json.loads(one.communicate(timeout=300)[0]) for one in running]
    assert [one.returncode for one in running] == [0] * 8
    assert {answer["path"] for answer in answers} == {
        str(base / OWN / "envs" / standard.manifest.id)
    }
    writers = [answer for answer in answers if not answer["reused"]]
    assert [answer["written"] for answer in writers] == [standard.manifest.files]
    assert sum(answer["written"] + answer["linked"] for answer in answers if answer["reused"]) == 0
    assert left_over(base) == [f"envs/{standard.manifest.id}"]


def test_killed_at_any_moment_it_can_be_done_again(
    many: Packed, program: Path, base: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    slow = gated(program, tmp_path, tmp_path / "no gate")
    started = time.monotonic()
    whole = Path(stage(many, other).path)
    seconds = time.monotonic() - started
    expected, final = tree(whole), base / OWN / "envs" / many.manifest.id
    rng, unfinished = random.Random(3), 0
    for attempt in range(6):
        running = start(program if attempt % 3 else slow, many.path, base)
        if attempt % 3:
            time.sleep(rng.uniform(0.1, 1.0) * seconds)
        else:  # some surely when there is something to leave half done
            assert until(lambda: any("incoming/" in name for name in left_over(base)), pause=0.01)
        if rng.random() < 0.5:
            running.kill()  # its children find out for themselves
        else:
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate(timeout=300)
        found = left_over(base)
        unfinished += any(name.startswith("incoming/") for name in found)
        if f"envs/{many.manifest.id}" in found:
            assert tree(final) == expected
            shutil.rmtree(final)
    assert unfinished >= 2
    assert stage(many, base).path == str(final)
    assert tree(final) == expected
    assert left_over(base) == [f"envs/{many.manifest.id}"]


def test_what_killed_ones_left_is_swept_by_another_bundle(
    many: Packed, standard: Packed, base: Path
) -> None:
    (base / OWN / "incoming").mkdir(parents=True)
    (base / OWN).chmod(0o700)
    dead = base / OWN / "incoming" / f"{many.manifest.id}.abc"
    alive = base / OWN / "incoming" / f"{Digest.of(b'alive')}.abc"
    foreign = base / OWN / "incoming" / "something-else"
    for folder in (dead, alive, foreign):
        (folder / "env" / "lib").mkdir(parents=True)
    (base / OWN / "locks").mkdir()
    with (base / OWN / "locks" / f"{Digest.of(b'alive')}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # somebody is making this one
        stage(standard, base)
    assert left_over(base) == [
        f"envs/{standard.manifest.id}",
        f"incoming/{alive.name}",
        "incoming/something-else",
    ]


def test_one_in_use_is_not_waited_for_and_its_open_files_stay(
    standard: Packed, program: Path, base: Path
) -> None:
    """The job that uses it may last for days; what it opens from now on is sound."""
    place = Path(stage(standard, base).path)
    (place / "pyvenv.cfg").unlink()
    tool = place / "bin" / "cli-tool"
    lock = base / OWN / "locks" / f"{standard.manifest.id}.lock"
    with lock.open() as held, tool.open() as opened:
        fcntl.flock(held, fcntl.LOCK_SH)
        running = start(program, standard.path, base)
        assert running.communicate(timeout=300)[0].strip() == str(place)
        assert opened.read() == tool.read_text()
    assert (place / "pyvenv.cfg").exists()
    assert left_over(base) == [f"envs/{standard.manifest.id}"]


def test_damage_anywhere_leaves_nothing(single: Packed, base: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(single.path, tmp_path / "copy.tar"))
    offset, places = 0, []
    for _, length in single.manifest.members():
        places += [offset + 100, offset + 512 + length // 2]
        offset += 512 + length + -length % 512
    places.append(offset + 1)
    for place in places:
        with copy.open("r+b") as handle:
            handle.seek(place)
            byte = handle.read(1)
            handle.seek(place)
            handle.write(bytes([byte[0] ^ 1]))
        assert "damaged" in refuses(copy, base), place
        with copy.open("r+b") as handle:
            handle.seek(place)
            handle.write(byte)
    stage(copy, base)


# --- damage and forgery --------------------------------------------------------------------------


def file(path: str) -> list[Any]:
    return [path, 0, 0o644, Digest.of(b""), 512]


HOSTILE = {
    "parent": {"files": [file("../escaped")]},
    "setuid": {"files": [["bin/sh", 0, 0o4755, Digest.of(b""), 512]]},
    "link-then-file": {"files": [file("lib/l/escaped")], "links": [["lib/l", "x"]]},
    "manifest": {"files": [file(".stager/manifest.json")]},
}
"""Some of what test_layer.py and test_listing.py have; nothing of it may be left."""


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_layers_are_refused(single: Packed, base: Path, tmp_path: Path, what: str) -> None:
    path = forge(single.path, tmp_path / "forged.tar", index=lambda raw: raw.update(HOSTILE[what]))
    refuses(path, base)
    assert sorted(path.name for path in tmp_path.rglob("*escaped*")) == []


def test_a_lock_that_is_a_link_is_not_followed(
    standard: Packed, base: Path, tmp_path: Path
) -> None:
    (base / OWN / "locks").mkdir(parents=True)
    (base / OWN / "locks" / f"{standard.manifest.id}.lock").symlink_to(tmp_path / "victim")
    assert "cannot be written" in refuses(standard.path, base)
    assert not (tmp_path / "victim").exists()


def test_where_child_processes_cannot_be_waited_for(
    standard: Packed, program: Path, base: Path
) -> None:
    """SIGCHLD ignored by whoever started it, which passes through exec: children vanish."""
    line = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    line += "os.execv(sys.argv[1], sys.argv[1:])"
    argv = [sys.executable, "-c", line, sys.executable, "-I", "-S", program, "unpack"]
    done = subprocess.run(
        [*map(str, argv), standard.path, base], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- digests that are true, of what is wrong all the same ----------------------------------------


@pytest.fixture(scope="module")
def large(
    store: Store, tmp_path_factory: pytest.TempPathFactory, zstd_wheel: Wheel | None
) -> Packed:
    folder = tmp_path_factory.mktemp("large")
    data = b"0123456789abcdef" * (40 << 16)
    wheel = make_wheel(folder, "large", files={"large/data.bin": data, "large/small.py": "A = 1\n"})
    return make_bundle(store, [wheel], decompressor=zstd_wheel, name="large")


OTHER = Digest.of(b"something else")
SIZE, DIGEST, OFFSET = 1, 3, 4
"""Places in an entry of an index."""


@pytest.mark.parametrize(
    ("file", "place", "value", "trusted"),
    [
        ("small.py", DIGEST, lambda digest: OTHER, True),
        ("small.py", DIGEST, lambda digest: OTHER, False),
        ("data.bin", DIGEST, lambda digest: OTHER, False),
        ("small.py", SIZE, lambda size: size - 1, False),
        ("small.py", SIZE, lambda size: size + 1, False),
        ("small.py", OFFSET, lambda offset: offset + 1, False),
        ("data.bin", SIZE, lambda size: size - 1, False),
    ],
)
def test_an_index_that_does_not_tell_the_truth_is_refused(
    large: Packed,
    program: Path,
    base: Path,
    tmp_path: Path,
    file: str,
    place: int,
    value: Callable[[Any], Any],
    trusted: bool,
) -> None:
    """Unless it is that of who asks: to read every file again would cost a second."""

    def change(raw: Raw) -> None:
        entry = next(item for item in raw["files"] if item[0].endswith(file))
        entry[place] = value(entry[place])

    path = forge(large.path, tmp_path / "forged.tar", index=change)
    if trusted:
        done = run_node(program, "unpack", path, base, "--python", BASE_PYTHON, "--trusted")
        assert done.returncode == 0, done.stderr
        return
    said = refuses(path, base)
    assert "does not have the digest in the index of its layer" in said
    assert "the bundle is damaged" in said


@pytest.mark.parametrize("extra", [-200_000, 0])
def test_what_is_said_to_be_needed_is_enough(
    single: Packed, program: Path, base: Path, extra: int
) -> None:
    """The decompressor, the heads and the listing are among it."""
    needed = estimate_room(single.manifest.layers, single.manifest)[0]
    argv = [sys.executable, "-I", "-S", str(program), "unpack", str(single.path), str(base)]
    code = f"""
import subprocess
done = subprocess.run({argv!r}, env={CLEAN!r}, capture_output=True, text=True)
print(json.dumps([done.returncode, done.stderr]))
"""
    size = needed + extra + 4096 * 8  # the node root's own directories and lock
    answer = namespace("-m", f"mount -t tmpfs -o size={size} none {base}", code)
    assert isinstance(answer, list)
    code_, said = answer
    assert code_ == (1 if extra < 0 else 0), said
    assert extra >= 0 or re.search(r"needs [\d.]+ MB, [\d.]+ MB are free", said)


def test_a_deep_tree_in_a_node_root_jams_nothing(
    single: Packed, base: Path, nested: Callable[[Path, int], None]
) -> None:
    """Left by an unpack that was killed, of this bundle and of another, and in the place of it."""
    stage(single, base)
    root = base / OWN
    shutil.rmtree(root / "envs" / single.manifest.id)
    nested(root / "envs" / single.manifest.id, 1200)
    for bundle_id in (single.manifest.id, Digest.of(b"other")):
        nested(root / "incoming" / f"{bundle_id}.nested", 1200)
    stage(single, base)
    assert left_over(base) == [f"envs/{single.manifest.id}"]
