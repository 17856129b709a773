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
from tests.support.nesting import nest
from tests.support.wheelhouse import make_wheel


@pytest.fixture(scope="module")
def large(
    store: Store, tmp_path_factory: pytest.TempPathFactory, zstd_wheel: Wheel | None
) -> Packed:
    """A bundle with a file that lies in three frames."""
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
