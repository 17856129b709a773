"""Names are bound to content: what lies under the name of something else is never used for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.format.archive import BundleFile
from bundle.format.manifest import FORMAT, count_padding, member_header
from bundle.protocol.digest import Digest, canonical_json
from bundle.protocol.problem import NodeError
from bundle.system.files import examine_directory
from stager.building.current_bundle import newest_bundle
from stager.cleanup import Rules, plan
from stager.cli import main
from stager.config.load import load
from stager.core.errors import BundleError
from stager.core.store import Store
from stager.layers.layer_build import make_layers
from stager.layers.source import layer_id
from stager.pack.bundle_file import find_by_id, node_program, read_format, read_manifest
from stager.pack.members import copy_to
from tests.support.building import HOST, Project, digests, source_of
from tests.support.wheelhouse import make_wheel

SCRIPT = ["script", "--no-embed", "--launcher", "srun"]


@pytest.fixture
def two(project: Project) -> tuple[Path, Path]:
    """Two bundles of one project, as it was and as it is."""
    first = project.build().packed.path
    (project.root / "train.py").write_text("print('second')\n")
    return first, project.build().packed.path


def test_a_script_is_small_where_the_bundle_is_on_a_shared_file_system(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project.build()
    monkeypatch.chdir(project.root)
    argv = ["script", "--launcher", "srun", "train.py"]
    assert main(argv) == 0
    assert "END_OF_PROGRAM" in capsys.readouterr().out
    # No shared file system can be had here.
    shared = replace(examine_directory(str(project.root)), shared=True)
    monkeypatch.setattr("stager.jobs.batch.examine_directory", lambda _: shared)
    assert main(argv) == 0
    assert len(capsys.readouterr().out) < 20_000
    assert main([*argv[:1], "--embed", *argv[1:]]) == 0
    assert "END_OF_PROGRAM" in capsys.readouterr().out


# --- bundles -------------------------------------------------------------------------------------


def test_a_bundle_copied_over_anothers_name_does_not_run(
    project: Project, two: tuple[Path, Path]
) -> None:
    first, second = two
    whole = read_manifest(second)
    shutil.copyfile(first, second)
    with pytest.raises(
        BundleError, match="does not hold the bundle that it is named after"
    ) as caught:
        read_manifest(second)
    assert str(second) in caught.value.message
    with pytest.raises(BundleError):
        node_program(second, project.store)
    done = project.stager("exec", "--", "python", "train.py")
    assert done.returncode == 1, done.stdout
    assert whole.id in done.stderr.replace("\n", "")
    again = project.build().packed  # its stamp is not that of the file any more
    assert (again.path, again.reused) == (second, False)
    assert read_manifest(second) == whole
    assert project.stager("exec", "--", "python", "train.py").stdout == "second\n"


def test_a_layer_that_is_gone_or_cut_short_is_made_again(project: Project) -> None:
    packed = project.build().packed
    layers = [project.store.layer(layer.id) for layer in packed.manifest.layers]
    before = digests(project.store.layers)
    layers[0].unlink()
    os.truncate(layers[-1], 100)
    done = project.stager("exec", "--", "python", "-c", "print('runs')")
    assert done.stdout == "runs\n", done.stderr
    assert f"its layer {layers[0]}: No such file or directory: building it again" in done.stderr
    assert digests(project.store.layers) == before


def test_the_note_of_a_project_holds_the_whole_id(project: Project) -> None:
    packed = project.build().packed
    (note,) = project.store.projects.iterdir()
    raw = json.loads(note.read_text())
    assert raw["id"] == packed.manifest.id
    note.write_text(json.dumps({**raw, "id": "0" * 64}))
    chosen = newest_bundle(load(project.root))
    with pytest.raises(BundleError, match="is not the bundle that was asked for"):
        read_manifest(chosen.path, chosen.id)


def test_an_id_names_a_bundle_and_is_compared(project: Project, two: tuple[Path, Path]) -> None:
    first, second = two
    old, new = read_manifest(first).id, read_manifest(second).id
    assert find_by_id(project.store, old[:12]).path == first
    anywhere = project.root / "copy.tar"
    copy_to(first, anywhere)
    cases: list[tuple[list[str], str]] = [
        (["--id", old], "alpha 1.0\n"),
        (["--id", old[:12].upper()], "alpha 1.0\n"),
        (["--id", f"sha256:{old}"], "alpha 1.0\n"),
        (["--bundle", str(anywhere), "--id", old], "alpha 1.0\n"),
    ]
    for options, expected in cases:
        run = ["python", "-c", "import alpha; print('alpha', alpha.VERSION)"]
        done = project.stager("exec", *options, "--", *run)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
    for options, code in (
        (["--bundle", str(anywhere), "--id", new], 1),
        (["--bundle", str(first), "--id", new[:20]], 1),
        (["--id", "0" * 64], 1),
        (["--id", "abc"], 2),
        (["--id", "x" * 64], 2),
    ):
        done = project.stager("exec", *options, "--", "true")
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert "stager verify" in done.stderr, "how to see the id"
    assert read_manifest(anywhere).id in project.stager("inspect", str(anywhere)).stdout
    argv = ["verify", "--bundle", str(anywhere), "--allocation", "local", "--nodes", "1"]
    logs = ["--log-dir", str(project.root / "logs")]
    refused = project.expect(*argv, "--id", new, *logs, code=1)
    assert old in refused.stderr.replace("\n", "")
    done = project.expect(*argv, "--id", old[:16], "--json", *logs)
    assert json.loads(done.stdout)["id"] == old
    assert old in done.stderr
    done = project.stager(*SCRIPT, "--id", old, "--json", "--", "train.py")
    text = json.loads(done.stdout)["script"]
    assert f"bundle_id={old}\n" in text


def test_the_script_notices_another_bundle_in_the_place_of_its_own(
    project: Project, two: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = two
    place = project.root / "shared.tar"
    copy_to(first, place)
    argv = [*SCRIPT, "--bundle", str(place), "--log-dir", str(tmp_path / "logs")]
    script = tmp_path / "job.sh"
    printed = project.expect(*argv, "--", "train.py")
    script.write_text(printed.stdout)
    copy_to(second, place)
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert f"{place} is another bundle than the one this script was made for" in done.stderr
    place.unlink()
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert "cannot be read from this node" in done.stderr


def other_format(bundle: Path, target: Path, version: object) -> Path:
    """A bundle as another version of stager would have made it; only its manifest matters."""
    with BundleFile(str(bundle)) as opened:
        raw: dict[str, Any] = json.loads(opened.manifest.to_bytes())
    data = canonical_json({**raw, "format": version})
    target.write_bytes(
        member_header("manifest.json", len(data)) + data + bytes(count_padding(len(data)) + 1024)
    )
    return target


@pytest.mark.parametrize("version", [FORMAT - 1, FORMAT + 1, "x"])
def test_a_bundle_of_another_format_is_said_to_be_one(
    version: object, project: Project, tmp_path: Path
) -> None:
    other = other_format(project.build().packed.path, tmp_path / "other.tar", version)
    with pytest.raises(BundleError, match="made by another version of stager") as caught:
        read_manifest(other)
    assert f"reads format {FORMAT}" in caught.value.message
    assert "stager build" in caught.value.hint
    with pytest.raises(NodeError, match="another version"):
        BundleFile(str(other))
    assert read_format(other) == (FORMAT if version == "x" else version)


def test_clean_takes_bundles_of_older_formats_though_a_project_names_them(project: Project) -> None:
    made = project.build().packed.path
    other_format(made, made.with_name("older.tar"), FORMAT - 1).replace(made)
    newer = other_format_of_newer(project, made)
    rules = Rules(projects=(project.root,))
    found = {(item.kind, item.path.name): item.why for item in plan(project.store, rules, 0.0)}
    assert "older version" in found["bundle", made.name]
    assert "older version" not in found.get(("bundle", newer.name), "")


def other_format_of_newer(project: Project, made: Path) -> Path:
    """A bundle of a version of stager that is still to come, which no project here names."""
    newer = made.with_name("newer-0123456789ab.pkgs.tar")
    with made.open("rb") as handle:
        data = handle.read()
    newer.write_bytes(
        data.replace(f'"format":{FORMAT - 1}'.encode(), f'"format":{FORMAT + 1}'.encode())
    )
    return newer


# --- layers --------------------------------------------------------------------------------------


def test_a_layer_under_anothers_id_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    old, new = (
        source_of(make_wheel(tmp_path / version, "alpha", version)) for version in ("1.0", "1.1")
    )
    with store.lock():
        make_layers([old, new], store=store, target=HOST, jobs=2)
        right = digests(store.layers)
        shutil.copyfile(store.layer(layer_id(old, HOST)), store.layer(layer_id(new, HOST)))
        made = make_layers([new], store=store, target=HOST, jobs=1)
    assert made.built == 1
    assert digests(store.layers) == right


def test_clean_takes_layers_that_no_build_would_use(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    wheel = make_wheel(tmp_path / "wheels", "alpha")
    source = source_of(wheel)
    with store.lock():
        make_layers([source], store=store, target=HOST, jobs=1)
    good = store.layer(layer_id(source, HOST))
    lock = tmp_path / "project" / "pylock.toml"
    lock.parent.mkdir()
    lock.write_text(f'sha256 = "{source.digest}"')
    older, renamed = (store.layer(Digest.of(name)) for name in (b"older", b"renamed"))
    older.write_bytes(b"\x50*M\x18" + bytes(1000))
    shutil.copyfile(good, renamed)
    found = plan(store, Rules(projects=(lock.parent,)), time.time() + 3 * 86400)
    assert {item.path for item in found} == {older, renamed}
    assert {item.why for item in found} == {"this version of stager cannot use it"}


# --- wheels --------------------------------------------------------------------------------------


def test_a_wheel_rewritten_with_its_size_and_time_kept_is_noticed(project: Project) -> None:
    project.build()
    (wheel,) = project.store.wheels.glob("alpha-*.whl")
    before = wheel.stat()
    right = wheel.read_bytes()
    with wheel.open("r+b") as handle:
        handle.seek(100)
        handle.write(b"x")
    os.utime(wheel, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert wheel.stat().st_size == before.st_size
    assert wheel.stat().st_mtime_ns == before.st_mtime_ns
    project.build()
    assert wheel.read_bytes() == right, "it is fetched again"
