"""The scratch directories of a benchmark: on a disk and in memory, both gone at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import BenchError

MEMORY = Path("/dev/shm")  # noqa: S108 - tmpfs is what is measured
GIB = 1 << 30
_PREFIX = "stager-bench-"


@dataclass(frozen=True, kw_only=True)
class Room:
    """The most that a benchmark takes."""

    disk: int
    """Bytes under the scratch directory."""
    memory: int
    """Bytes in tmpfs, which are bytes of memory."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The two directories."""

    disk: Path
    """On a disk."""
    memory: Path
    """On tmpfs."""

    def fresh(self, name: str, *, memory: bool = False) -> Path:
        """An empty directory of that name, whatever was there."""
        path = (self.memory if memory else self.disk) / name
        remove(path)
        path.mkdir(parents=True)
        return path


def remove(path: Path) -> None:
    """Take a directory or a file away, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def settle() -> None:
    """Wait until what was written is on the disk, so that it does not slow down what is next."""
    os.sync()


def read_once(paths: Sequence[Path]) -> None:
    """Read files, so that they are in the page cache whatever came before."""
    for path in paths:
        with path.open("rb", buffering=0) as handle:
            while handle.read(1 << 22):
                pass


@contextmanager
def scratch(base: Path, room: Room, say: Callable[[str], None]) -> Iterator[Place]:
    """Make the two directories, and remove them whatever happens.

    Raises:
        BenchError: there is too little room, or nothing can be written.
    """
    _require(base, room.disk, "choose another place with --scratch")
    _require(MEMORY, room.memory, "free some memory, or leave rows out with --only")
    _require_memory(room.memory)
    for parent in (base, MEMORY):
        _sweep(parent)
    try:
        prefix = f"{_PREFIX}{os.getpid()}-"
        disk = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        memory = Path(tempfile.mkdtemp(prefix=prefix, dir=MEMORY))
    except OSError as exc:
        raise BenchError(
            "no scratch directory can be made",
            where=str(exc.filename),
            why=exc.strerror or "",
            fix="choose another place with --scratch",
        ) from exc
    say(f"scratch: {disk} (up to {room.disk / GIB:.0f} GiB), {memory}")
    try:
        yield Place(disk=disk, memory=memory)
    finally:
        for path in (disk, memory):
            shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove what runs left that were killed outright."""
    for path in parent.glob(f"{_PREFIX}*"):
        owner = path.name[len(_PREFIX) :].partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(path, ignore_errors=True)


def _require(path: Path, needed: int, fix: str) -> None:
    if not path.is_dir():
        raise BenchError("there is no such directory", where=str(path), fix=fix)
    free = shutil.disk_usage(path).free
    if free < needed:
        raise BenchError(
            "there is not enough room",
            where=str(path),
            why=f"{free / GIB:.1f} GiB are free, {needed / GIB:.1f} GiB are needed",
            fix=fix,
        )


def available_memory() -> int:
    """Bytes of memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    return int(facts["MemAvailable"].split()[0]) * 1024


def _require_memory(needed: int) -> None:
    free = available_memory()
    if free < needed:
        raise BenchError(
            "there is not enough memory for the part on tmpfs",
            where=str(MEMORY),
            why=f"{free / GIB:.1f} GiB are available, {needed / GIB:.1f} GiB are needed",
            fix="end what else uses memory, or leave rows out with --only",
        )
