"""Files that are read while they are still being sent."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from bundle.environment import unpack
from bundle.format.archive import END, Arrival, BundleFile
from bundle.node.node_root import make_secure_root
from bundle.protocol.problem import NodeError
from stager.pack.bundle import Packed
from tests.support.bundles import BASE_PYTHON, left_over


def later(seconds: float, then: object) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(seconds), then()))  # type: ignore[operator]
    thread.start()
    return thread


def test_what_is_there_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    handle = Arrival().open(str(path), os.O_RDONLY)
    Arrival().wait(handle, 4, str(path))
    Arrival.over().wait(handle, 5, str(path))  # there is no more to come
    os.close(handle)


def test_whoever_waits_long_looks_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    arrival, pauses = Arrival(), []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if sum(pauses) > 1.0:
            path.write_bytes(b"1234")

    monkeypatch.setattr("bundle.format.archive.time.sleep", sleep)
    handle = arrival.open(str(path), os.O_RDONLY)
    arrival.wait(handle, 4, str(path))
    os.close(handle)
    assert pauses[0] < 0.01
    assert len(pauses) < 50


def test_a_file_that_never_comes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Arrival.over().open(str(tmp_path / "file"), os.O_RDONLY)
    arrival = Arrival()
    ending = later(0.1, lambda: arrival.end(whole=False))
    with pytest.raises(NodeError, match="could not be sent"):
        arrival.open(str(tmp_path / "file"), os.O_RDONLY)
    ending.join()


def test_the_end_is_seen_in_processes_that_were_forked_before() -> None:
    arrival = Arrival()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        while arrival.may_grow(""):
            arrival.pause()
        os.write(write, b"seen")
        os._exit(0)
    arrival.end(whole=True)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"seen"


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


def unpacked(packed: Packed, path: Path, root: str, arrival: Arrival) -> unpack.Environment:
    return unpack.unpack(
        str(path),
        root=root,
        expected=packed.manifest.id,
        python=BASE_PYTHON,
        processes=2,
        source=unpack.Source(arrival=arrival),
    )


@pytest.mark.parametrize("pieces", [3, 40])
def test_a_bundle_is_unpacked_as_it_comes(
    standard: Packed, tmp_path: Path, base: Path, pieces: int
) -> None:
    root, sender = make_secure_root(str(base)), Sender(standard.path, tmp_path / "coming.tar")
    sending = later(0.05, lambda: sender.send(standard.size // pieces))
    made = unpacked(standard, sender.target, root, sender.arrival)
    sending.join()
    assert (made.reused, made.written) == (False, standard.manifest.files)
    assert left_over(base) == [f"envs/{standard.manifest.id}"]


def test_files_are_written_before_the_last_byte_has_come(
    standard: Packed, tmp_path: Path, base: Path
) -> None:
    root, sender = make_secure_root(str(base)), Sender(standard.path, tmp_path / "coming.tar")
    with BundleFile(str(standard.path)) as bundle:
        short = bundle.offset(standard.manifest.layers[-1].member)
    whole, sender.data = sender.data, sender.data[:short]
    sender.target.write_bytes(sender.data)

    def finish() -> None:
        deadline = time.monotonic() + 120
        seen.append(0)
        while not seen[-1] and time.monotonic() < deadline:
            seen.append(
                sum(path.suffix == ".py" for path in Path(root).rglob("incoming/*/env/**/*"))
            )
            time.sleep(0.01)
        with sender.target.open("ab") as out:
            out.write(whole[short:])
        sender.arrival.end(whole=True)

    seen: list[int] = []
    finishing = later(0, finish)
    unpacked(standard, sender.target, root, sender.arrival)
    finishing.join()
    assert seen[-1] > 0


@pytest.mark.parametrize("part", [0.0, 0.02, 0.5, 0.999])
def test_a_sending_that_fails_leaves_nothing(
    standard: Packed, tmp_path: Path, base: Path, part: float
) -> None:
    root, sender = make_secure_root(str(base)), Sender(standard.path, tmp_path / "coming.tar")
    sender.data = sender.data[: int(len(sender.data) * part)]
    sending = later(0, lambda: sender.send(1 << 20, whole=False))
    with pytest.raises(NodeError, match="could not be sent"):
        unpacked(standard, sender.target, root, sender.arrival)
    sending.join()
    assert left_over(base) == []


def test_damage_on_the_way_is_found_when_all_has_come(
    standard: Packed, tmp_path: Path, base: Path
) -> None:
    root, sender = make_secure_root(str(base)), Sender(standard.path, tmp_path / "coming.tar")
    for place in (len(sender.data) - 1, len(sender.data) // 2):
        damaged = bytearray(sender.data)
        damaged[place] ^= 1
        broken = Sender(standard.path, tmp_path / f"coming.{place}.tar")
        broken.data = bytes(damaged)
        sending = later(0, lambda broken=broken: broken.send(1 << 20))
        with pytest.raises(NodeError, match="damaged"):
            unpacked(standard, broken.target, root, broken.arrival)
        sending.join()
    assert left_over(base) == []


def test_a_sender_that_makes_the_file_long_at_once(
    single: Packed, tmp_path: Path, base: Path
) -> None:
    """Zeros where nothing has come yet are not taken for damage as long as more may come."""
    root, path, arrival = make_secure_root(str(base)), tmp_path / "coming.tar", Arrival()
    data = single.path.read_bytes()
    with BundleFile(str(single.path)) as bundle:
        start = bundle.offset(single.manifest.layers[0].member)
    path.write_bytes(data[:start] + bytes(len(data) - start))

    def send() -> None:
        shutil.copyfileobj(single.path.open("rb"), path.open("r+b"))
        arrival.end(whole=True)

    sending = later(0.3, send)
    assert unpacked(single, path, root, arrival).written == single.manifest.files
    sending.join()


@pytest.mark.parametrize("renamed", [False, True])
def test_another_file_that_was_there_gives_way(
    single: Packed, tmp_path: Path, base: Path, renamed: bool
) -> None:
    """Whether the sender writes over it, or removes it first."""
    root, path, arrival = make_secure_root(str(base)), tmp_path / "coming.tar", Arrival()
    path.write_bytes(b"x" * (20 << 20))

    def send() -> None:
        if renamed:
            path.unlink()
        path.write_bytes(single.path.read_bytes())
        arrival.end(whole=True)

    sending = later(0.3, send)
    assert unpacked(single, path, root, arrival).written == single.manifest.files
    sending.join()


def test_the_end_mark_may_come_late(single: Packed, tmp_path: Path, base: Path) -> None:
    """A file that is shorter than it will be is not damaged as long as more may come."""
    root, path, arrival = make_secure_root(str(base)), tmp_path / "coming.tar", Arrival()
    data = single.path.read_bytes()
    path.write_bytes(data[: -len(END)])

    def send() -> None:
        path.write_bytes(data)
        arrival.end(whole=True)

    sending = later(1.0, send)
    assert unpacked(single, path, root, arrival).written == single.manifest.files
    sending.join()
