"""Running from a shared file system: the published figures that the rates were taken from."""

from __future__ import annotations

import pytest

from bundle.driver.forecast import Nodes
from stager.forecast import LUSTRE, NFS, REFERENCE, SharedFiles, from_shared

FILES, SIZE = int(REFERENCE["files"]), int(REFERENCE["bytes"])
IMPORT = 5.5
"""Seconds of the reference import with all files at hand; published times have them in."""


def test_frontiers_eight_nodes() -> None:
    """57 s from Lustre and 244 s from NFS; eight ranks a node are a guess."""
    eight = Nodes(8, ranks=8)
    assert from_shared(FILES, SIZE, eight, LUSTRE) + IMPORT == pytest.approx(57, rel=0.05)
    assert from_shared(FILES, SIZE, eight, NFS) + IMPORT == pytest.approx(244, rel=0.05)


def test_an_import_of_torch_on_2048_nodes() -> None:
    """120 s with 12 ranks each; it makes 17,800 of the reference's 71,270 path calls."""
    share = 17_800 / REFERENCE["calls"]
    files, size = int(FILES * share), int(SIZE * share)
    waiting = from_shared(files, size, Nodes(2048, ranks=12), LUSTRE)
    assert waiting + 1.7 == pytest.approx(120, rel=0.1)


def test_by_hand() -> None:
    slow = SharedFiles("slow", call=1e-3, calls=10_000, node=100e6, all=1e9)
    alone = REFERENCE["calls"] * 1e-3 + REFERENCE["read"] / 100e6
    assert from_shared(FILES, SIZE, Nodes(1), slow) == pytest.approx(alone)
    asked = REFERENCE["calls"] + 3 * REFERENCE["opens"]
    many = 100 * asked / 10_000 + 100 * REFERENCE["read"] / 1e9
    assert from_shared(FILES, SIZE, Nodes(100, ranks=4), slow) == pytest.approx(many)


@pytest.mark.parametrize("shared", [LUSTRE, NFS])
def test_more_takes_longer(shared: SharedFiles) -> None:
    waits = [from_shared(FILES, SIZE, Nodes(count), shared) for count in (1, 8, 512, 4096, 10_000)]
    assert waits == sorted(waits)
    assert waits[-1] > 10 * waits[0]
    assert from_shared(2 * FILES, SIZE, Nodes(64), shared) > waits[0]
    assert from_shared(0, 0, Nodes(64), shared) == 0
