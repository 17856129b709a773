"""What can happen to a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random


def _delete(path: Path, rng: Random) -> None:
    path.unlink()


def _empty(path: Path, rng: Random) -> None:
    path.write_bytes(b"")


def _cut(path: Path, rng: Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size) if path.stat().st_size else 0)


def _extend(path: Path, rng: Random) -> None:
    with path.open("ab") as handle:
        handle.write(rng.randbytes(rng.choice((1, 512, 5000))))


def _flip(path: Path, rng: Random) -> None:
    """Change bytes in place; size and inode stay."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 50))):
        if data:
            data[rng.randrange(len(data))] ^= rng.randint(1, 255)
    with path.open("r+b") as handle:
        handle.write(data)


def _flip_unseen(path: Path, rng: Random) -> None:
    """Change bytes in place; size, inode and modification time stay."""
    status = path.stat()
    _flip(path, rng)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _rewritten(path: Path, rng: Random) -> None:
    """Write another content of the same size to another inode."""
    data = rng.randbytes(path.stat().st_size)
    path.unlink()
    path.write_bytes(data)


def _directory(path: Path, rng: Random) -> None:
    path.unlink()
    path.mkdir()
    if rng.random() < 0.5:
        (path / "x").write_text("x")


def _pipe(path: Path, rng: Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _link_nowhere(path: Path, rng: Random) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/place")


def _link_circle(path: Path, rng: Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _device(path: Path, rng: Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/full")))


DAMAGES: dict[str, Callable[[Path, Random], None]] = {
    "deleted": _delete,
    "emptied": _empty,
    "cut": _cut,
    "extended": _extend,
    "changed": _flip,
    "changed, its time put back": _flip_unseen,
    "rewritten": _rewritten,
    "replaced by a directory": _directory,
    "replaced by a pipe": _pipe,
    "replaced by a link to nowhere": _link_nowhere,
    "replaced by a link to itself": _link_circle,
    "replaced by a device": _device,
}
"""By what people are told of it."""


def swap(one: Path, two: Path) -> None:
    """Exchange two files' names."""
    aside = one.with_name(one.name + ".aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def copy_over(one: Path, two: Path, *, keep_time: bool) -> None:
    """Put the content of one file under the name of another."""
    status = two.stat()
    shutil.copyfile(one, two)
    if keep_time:
        os.utime(two, ns=(status.st_atime_ns, status.st_mtime_ns))
