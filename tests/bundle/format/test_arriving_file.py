"""Files that are read while they are still being sent."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bundle.environment import unpack
from bundle.format.archive import END, Arrival, BundleFile
from bundle.protocol.problem import NodeError
from stager.pack.bundle import Packed
from tests.support.bundles import left_over, stage
from tests.support.processes import until


def later(seconds: float, then: object) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(seconds), then()))  # type: ignore[operator]
    thread.start()
    return thread


def test_a_file_that_never_comes(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="No such file"):
        BundleFile(str(tmp_path / "file"), arrival=Arrival(is_over=True))
    arrival = Arrival()
    ending = later(0.1, lambda: arrival.end(whole=False))
    with pytest.raises(NodeError, match="could not be sent"):
        BundleFile(str(tmp_path / "file"), arrival=arrival)
    ending.join()


class Sender:
    """Writes a copy of a bundle in pieces, as ``sbcast`` does."""

    def __init__(self, source: Path, target: Path) -> None:
        self.data, self.target = source.read_bytes(), target
        self.arrival = Arrival()

    def send(self, piece: int, whole: bool = True) -> None:
        with self.target.open("wb") as out:
            for start in range(0, len(self.data), piece):
                out.write(self.data[start : start + piece])
                out.flush()
                time.sleep(0.01)
        self.arrival.end(whole=whole)


def unpacked(packed: Packed, path: Path, base: Path, arrival: Arrival) -> unpack.Environment:
    return stage(packed, base, unpack.Source(arrival=arrival), path)


def test_files_are_written_before_the_last_byte_has_come(
    standard: Packed, tmp_path: Path, base: Path
) -> None:
    sender = Sender(standard.path, tmp_path / "coming.tar")
    with BundleFile(str(standard.path)) as bundle:
        short = bundle.offset(standard.manifest.layers[-1].member)
    whole = sender.data
    seen: list[bool] = []

    def send() -> None:
        with sender.target.open("wb") as out:
            for start in range(0, short, short // 20):
                out.write(whole[start : min(start + short // 20, short)])
                out.flush()
                time.sleep(0.01)
            seen.append(until(lambda: any(base.rglob("incoming/*/env/**/*.py")), 120, pause=0.01))
            out.write(whole[short:])
        sender.arrival.end(whole=True)

    sending = later(0.05, send)
    made = unpacked(standard, sender.target, base, sender.arrival)
    sending.join()
    assert seen == [True]
    assert (made.reused, made.written) == (False, standard.manifest.files)
    assert left_over(base) == [f"envs/{standard.manifest.id}"]


@pytest.mark.parametrize("part", [0.0, 0.02, 0.999])
def test_a_sending_that_fails_leaves_nothing(
    standard: Packed, tmp_path: Path, base: Path, part: float
) -> None:
    sender = Sender(standard.path, tmp_path / "coming.tar")
    sender.data = sender.data[: int(len(sender.data) * part)]
    sending = later(0, lambda: sender.send(1 << 20, whole=False))
    with pytest.raises(NodeError, match="could not be sent"):
        unpacked(standard, sender.target, base, sender.arrival)
    sending.join()
    assert left_over(base) == []


def test_damage_on_the_way_is_found_when_all_has_come(
    standard: Packed, tmp_path: Path, base: Path
) -> None:
    sender = Sender(standard.path, tmp_path / "coming.tar")
    for place in (len(sender.data) - 1, len(sender.data) // 2):
        damaged = bytearray(sender.data)
        damaged[place] ^= 1
        broken = Sender(standard.path, tmp_path / f"coming.{place}.tar")
        broken.data = bytes(damaged)
        sending = later(0, lambda broken=broken: broken.send(1 << 20))
        with pytest.raises(NodeError, match="damaged"):
            unpacked(standard, broken.target, base, broken.arrival)
        sending.join()
    assert left_over(base) == []


def in_place(path: Path, whole: bytes) -> None:
    with path.open("r+b") as file:
        file.write(whole)


def afresh(path: Path, whole: bytes) -> None:
    path.unlink()
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("early", "send"),
    [
        pytest.param(lambda whole, start: whole[:start] + bytes(len(whole) - start), in_place,
                     id="long at once"),
        pytest.param(lambda whole, start: b"x" * (20 << 20), Path.write_bytes, id="another before"),
        pytest.param(lambda whole, start: b"x" * (20 << 20), afresh, id="another, removed"),
        pytest.param(lambda whole, start: whole[: -len(END)], in_place, id="end mark late"),
    ],
)  # fmt: skip
def test_what_is_not_there_yet_is_no_damage(
    single: Packed, tmp_path: Path, base: Path, early: Any, send: Any
) -> None:
    """As long as more may come: zeros, another file in its place, a file that is too short."""
    path, arrival, whole = tmp_path / "coming.tar", Arrival(), single.path.read_bytes()
    with BundleFile(str(single.path)) as bundle:
        start = bundle.offset(single.manifest.layers[0].member)
    path.write_bytes(early(whole, start))
    sending = later(0.3, lambda: (send(path, whole), arrival.end(whole=True)))
    assert unpacked(single, path, base, arrival).written == single.manifest.files
    sending.join()
