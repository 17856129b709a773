"""What can happen to bytes, and to a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random


def change_bytes(data: bytearray, rng: Random, start: int = 0, end: int = 0) -> str:
    """Change something between two places, of which the second is the end for 0; say what."""
    end = end or len(data)
    at, size = rng.randrange(start, end), rng.choice((1, 8, 512, 5000, 70_000))
    noise = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
    kind = rng.choice(("flip", "overwrite", "cut", "insert", "remove", "append"))
    if kind == "flip":
        for _ in range(rng.choice((1, 1, 3, 30))):
            data[rng.randrange(start, end)] ^= rng.randint(1, 255)
    elif kind == "overwrite":
        data[at : at + size] = noise[: len(data) - at]
    elif kind == "cut":
        del data[rng.choice((start, at, end - 1)) :]
    elif kind == "insert":
        at = rng.choice((0, at, at))
        data[at:at] = noise
    elif kind == "remove":
        del data[at : rng.choice((at + size, end))]
    else:
        data += noise
    return f"{kind} at {at}, {size} bytes"


def _cut(path: Path, rng: Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size) if path.stat().st_size else 0)


def _extend(path: Path, rng: Random) -> None:
    with path.open("ab") as handle:
        handle.write(rng.randbytes(rng.choice((1, 512, 5000))))


def _flip(path: Path, rng: Random, *, unseen: bool = False) -> None:
    """Change bytes in place; size and inode stay, and the modification time if it is unseen."""
    status, data = path.stat(), bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 50)) if data else 0):
        data[rng.randrange(len(data))] ^= rng.randint(1, 255)
    with path.open("r+b") as handle:
        handle.write(data)
    if unseen:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _instead(put: Callable[[Path, Random], object]) -> Callable[[Path, Random], None]:
    def strike(path: Path, rng: Random) -> None:
        path.unlink()
        put(path, rng)

    return strike


def _rewrite(path: Path, rng: Random) -> None:
    data = rng.randbytes(path.stat().st_size)
    path.unlink()
    path.write_bytes(data)


def _folder(path: Path, rng: Random) -> None:
    path.mkdir()
    if rng.random() < 0.5:
        (path / "x").write_text("x")


DAMAGES: dict[str, Callable[[Path, Random], object]] = {
    "deleted": lambda path, rng: path.unlink(),
    "emptied": lambda path, rng: path.write_bytes(b""),
    "cut": _cut,
    "extended": _extend,
    "changed": _flip,
    "changed, its time put back": lambda path, rng: _flip(path, rng, unseen=True),
    "rewritten": _rewrite,
    "replaced by a directory": _instead(_folder),
    "replaced by a pipe": _instead(lambda path, rng: os.mkfifo(path)),
    "replaced by a link to nowhere": _instead(lambda path, rng: path.symlink_to("/no/place")),
    "replaced by a link to itself": _instead(lambda path, rng: path.symlink_to(path.name)),
    "replaced by a device": _instead(
        lambda path, rng: path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/full")))
    ),
}


def swap(one: Path, two: Path) -> None:
    aside = one.with_name(one.name + ".aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def copy_over(one: Path, two: Path, *, keep_time: bool) -> None:
    status = two.stat()
    shutil.copyfile(one, two)
    if keep_time:
        os.utime(two, ns=(status.st_atime_ns, status.st_mtime_ns))
