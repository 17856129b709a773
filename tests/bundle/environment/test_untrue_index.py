"""Bundles whose digests are true and that are wrong all the same are refused with a message."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bundle.format.layer import DEPTH_LIMIT, NAME_LIMIT, PATH_LIMIT, LayerError, check_path
from bundle.format.manifest import estimate_room
from bundle.protocol.digest import Digest
from stager.core.store import Store
from stager.core.values import Wheel
from stager.pack.bundle import Packed
from tests.support.bundles import (
    BASE_PYTHON,
    CLEAN,
    OWN,
    Raw,
    forge,
    left_over,
    make_bundle,
    refuses,
    run_node,
    stage,
)
from tests.support.namespaces import namespace
from tests.support.wheelhouse import make_wheel
from tests.torture.world import nest


@pytest.fixture(scope="module")
def large(
    store: Store, tmp_path_factory: pytest.TempPathFactory, zstd_wheel: Wheel | None
) -> Packed:
    """A bundle with a file that lies in three frames."""
    folder = tmp_path_factory.mktemp("large")
    data = b"0123456789abcdef" * (40 << 16)
    wheel = make_wheel(folder, "large", files={"large/data.bin": data, "large/small.py": "A = 1\n"})
    return make_bundle(store, [wheel], decompressor=zstd_wheel, name="large")


def entry(raw: Raw, ending: str) -> list[Any]:
    found: list[Any] = next(item for item in raw["files"] if item[0].endswith(ending))
    return found


def other_digest(ending: str) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        entry(raw, ending)[3] = Digest.of(b"something else")

    return change


def shorter(raw: Raw) -> None:
    entry(raw, "small.py")[1] -= 1


def longer(raw: Raw) -> None:
    entry(raw, "small.py")[1] += 1


def moved(raw: Raw) -> None:
    entry(raw, "small.py")[4] += 1


def shorter_long(raw: Raw) -> None:
    entry(raw, "data.bin")[1] -= 1


INDEXES = {
    "digest": other_digest("small.py"),
    "digest-of-many-frames": other_digest("data.bin"),
    "shorter": shorter,
    "longer": longer,
    "moved": moved,
    "shorter-of-many-frames": shorter_long,
}


@pytest.mark.parametrize("what", INDEXES)
def test_an_index_that_does_not_tell_the_truth_is_refused(
    large: Packed, base: Path, tmp_path: Path, what: str
) -> None:
    path = forge(large.path, tmp_path / "forged.tar", index=INDEXES[what])
    said = refuses(path, base)
    assert "does not have the digest in the index of its layer" in said
    assert "the bundle is damaged" in said


@pytest.mark.parametrize("trusted", [False, True])
def test_a_bundle_of_who_asks_is_not_compared(
    large: Packed, program: Path, base: Path, tmp_path: Path, trusted: bool
) -> None:
    """Whoever made it knows what the index says; reading every file again would cost a second."""
    forged = forge(large.path, tmp_path / "forged.tar", index=other_digest("small.py"))
    words = ["--trusted"] if trusted else []
    done = run_node(program, "unpack", forged, base, "--python", BASE_PYTHON, *words)
    assert done.returncode == (0 if trusted else 1), done.stderr


# --- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "lib/" + "x" * (NAME_LIMIT + 1),
        "lib/" + "é" * (NAME_LIMIT // 2 + 1),
        "lib/" + "/".join(["d"] * DEPTH_LIMIT),
        "/".join(["y" * 200] * (PATH_LIMIT // 200 + 1)),
    ],
    ids=["name", "letters", "levels", "path"],
)
def test_a_path_that_no_node_can_hold_is_refused_in_the_index(
    single: Packed, base: Path, tmp_path: Path, path: str
) -> None:
    with pytest.raises(LayerError, match="no node can hold"):
        check_path(path)
    files = {"files": [[path, 0, 0o644, Digest.of(b""), 512]]}
    forged = forge(single.path, tmp_path / "forged.tar", index=lambda raw: raw.update(files))
    assert "no node can hold" in refuses(forged, base)


def test_the_longest_that_is_taken() -> None:
    for path in ("lib/" + "x" * NAME_LIMIT, "/".join(["d"] * DEPTH_LIMIT)):
        assert check_path(path) == path


# --- manifests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["9" * 5000, "2." + "1" * 5000, "2.x", "two"])
def test_a_version_that_is_none_is_refused(
    single: Packed, base: Path, tmp_path: Path, version: str
) -> None:
    def change(raw: Raw) -> None:
        raw["requires"]["libc_version"] = version

    path = forge(single.path, tmp_path / "forged.tar", manifest=change)
    said = refuses(path, base)
    assert "requires.libc_version" in said
    assert len(said) < 1000


# --- room ----------------------------------------------------------------------------------------


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


# --- trees ---------------------------------------------------------------------------------------


@pytest.fixture
def nested(tmp_path: Path) -> Iterator[Callable[[Path, int], None]]:
    """Makes directories in one another, which are removed whatever becomes of the test."""
    yield nest
    # Where a test has failed, pytest's own removal would recurse.
    for path in tmp_path.iterdir():
        subprocess.run(["rm", "-rf", path], check=False)


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
