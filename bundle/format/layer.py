"""The index of one layer, and the checks it must pass before a byte of the layer is used.

A layer is a sequence of zstd frames. The first is the head (:mod:`bundle.format.layer_head`), which
holds the index. Each later frame decompresses, independently of the others, to the next piece of
one plain tar. The index lists every file with its size, mode, digest and place in the tar, and
every frame with its lengths and the digest of its compressed bytes. Tar headers are for people:
unpacking reads the index alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..protocol.digest import Digest
from .manifest import BLOCK
from .path_limits import abridged, any_excess, excess

FRAME_LIMIT = 64 << 20
"""The most a frame may hold, packed or not: bounds the memory a hostile bundle can claim."""
LINK_LIMIT = 40
"""Links in a row that Linux follows before it reports a loop (path_resolution(7))."""

_MODES = (0o644, 0o755)
_UNSAFE = re.compile(r"(?:^|/)\.{0,2}(?:/|$)")
"""A part of a path that is empty, ``.`` or ``..``."""


class LayerError(ValueError):
    """The bytes of a layer are invalid."""


class Entry(NamedTuple):
    """One file of a layer."""

    path: str
    """Its path in the environment, with forward slashes."""
    size: int
    """Length in bytes."""
    mode: int
    """0644 or 0755."""
    sha256: str
    """Digest of its bytes."""
    offset: int
    """The index of its first byte in the uncompressed tar."""


class Link(NamedTuple):
    """One symbolic link of a layer."""

    path: str
    """Its path in the environment."""
    target: str
    """Its target, relative to its own directory."""


class Frame(NamedTuple):
    """One independently compressed piece of the tar."""

    size: int
    """Compressed length in bytes."""
    unpacked_size: int
    """Length in bytes of the piece of tar inside."""
    sha256: str
    """Digest of the compressed bytes."""


@dataclass(frozen=True)
class Index:
    """The content of a layer."""

    files: tuple[Entry, ...]
    """Sorted by path."""
    links: tuple[Link, ...]
    """Sorted by path."""
    frames: tuple[Frame, ...]
    """In the order in which they are stored, right behind the head."""

    @property
    def unpacked_size(self) -> int:
        """Sum of the files' lengths in bytes."""
        return sum(entry.size for entry in self.files)


def check_path(path: object) -> str:
    """Return ``path`` if it stays inside the environment, whatever it is joined to.

    Raises:
        LayerError: it is absolute or empty, has ``..``, ``.``, a doubled slash or a control
            character, or is too long or deep for a node.
    """
    if not isinstance(path, str) or not path.isprintable() or _UNSAFE.search(path):
        raise LayerError(f"unsafe path in an archive: {path!r}")
    why = excess(path)
    if why:
        raise LayerError(f"no node can hold {why}: {abridged(path)}")
    return path


def check_link(link: Link) -> None:
    """Refuse a symbolic link that is absolute or climbs out of the environment.

    Raises:
        LayerError: the link leads outside, or its own path is unsafe.
    """
    check_path(link.path)
    if not _is_relative_target(link.target):
        raise LayerError(f"unsafe link in an archive: {link.path!r} -> {link.target!r}")
    depth = link.path.count("/")
    for part in link.target.split("/"):
        if part == "..":
            depth -= 1
        elif part not in ("", "."):
            depth += 1
        # The first path component (``project``) is a wall too: a link may not climb over it.
        if depth < 1:
            raise LayerError(f"link leads outside: {link.path!r} -> {link.target!r}")


def _is_relative_target(target: object) -> bool:
    if not isinstance(target, str) or not target.isprintable():
        return False
    return target != "" and not target.startswith("/") and not excess(target)


def check_links(links: Mapping[str, str]) -> None:
    """Refuse links that lead outside through one another, followed the way the kernel does.

    :func:`check_link` judges each link by its text alone; where ``a/b/up`` leads to ``a``, however,
    ``a/b/up/..`` is not ``a/b``.

    Raises:
        LayerError: a link leads outside, or in circles.
    """
    for path, target in links.items():
        try:
            _follow(path, links)
        except LayerError as exc:
            raise LayerError(f"{exc}: {path!r} -> {target!r}") from None


def _follow(path: str, links: Mapping[str, str]) -> None:
    directory = path.split("/")[:-1]
    remaining = links[path].split("/")[::-1]
    followed = 1
    while remaining:
        part = remaining.pop()
        if part == "..":
            if len(directory) <= 1:
                raise LayerError("link leads outside")
            directory.pop()
            continue
        if part in ("", "."):
            continue
        directory.append(part)
        target = links.get("/".join(directory))
        if target is None:
            continue
        followed += 1
        if followed > LINK_LIMIT:
            raise LayerError("link leads in circles")
        directory.pop()
        remaining += target.split("/")[::-1]


def parents(paths: Iterable[str]) -> set[str]:
    """Return all directories that these paths lie in, except the empty one."""
    directories: set[str] = set()
    for folder in {path.rpartition("/")[0] for path in paths}:
        parent = folder
        while parent and parent not in directories:
            directories.add(parent)
            parent = parent.rpartition("/")[0]
    return directories


def _check_paths(paths: Sequence[str]) -> None:
    """Do as :func:`check_path` for each path, 20 times as fast if all are safe."""
    joined = "/" + "/\n/".join(paths) + "/"
    unsafe = any(part in joined for part in ("//", "/./", "/../"))
    if unsafe or any_excess(joined) or not "".join(paths).isprintable():
        for path in paths:
            check_path(path)


def check_index(index: Index) -> None:
    """Refuse an index of which a byte could be written outside the environment.

    Raises:
        LayerError: a path, a mode, a size or a link is unsafe.
        ValueError, TypeError: a field is of another type.
    """
    _check_frames(index)
    _check_files(index)
    for link in index.links:
        check_link(link)
    _check_unique_paths(index)
    check_links(dict(index.links))


def _check_frames(index: Index) -> None:
    for frame in index.frames:
        Digest(frame.sha256)
        for size in (frame.size, frame.unpacked_size):
            if type(size) is not int or not 0 < size <= FRAME_LIMIT:
                raise LayerError("a frame has an impossible size")


def _check_files(index: Index) -> None:
    """Refuse files with impossible fields, or whose contents overlap."""
    _check_paths([entry.path for entry in index.files])
    # A file has its tar header before it, and the tar ends with two empty blocks.
    end_of_files = sum(frame.unpacked_size for frame in index.frames) - 2 * BLOCK
    end_of_previous = 0
    for entry in index.files:
        _check_types(entry)
        end = entry.offset + entry.size
        if entry.offset < end_of_previous + BLOCK or end > end_of_files:
            raise LayerError(f"{entry.path} lies outside its layer, or over another file")
        end_of_previous = end


def _check_types(entry: Entry) -> None:
    if type(entry.mode) is not int or entry.mode not in _MODES:
        raise LayerError(f"unexpected mode {entry.mode!r} of {entry.path}")
    if not (type(entry.size) is type(entry.offset) is int) or entry.size < 0:
        raise LayerError(f"{entry.path} has an impossible size or place")
    if not isinstance(entry.sha256, str):
        raise LayerError(f"{entry.path} has no digest")


def _check_unique_paths(index: Index) -> None:
    paths = [*(entry.path for entry in index.files), *(link.path for link in index.links)]
    unique = set(paths)
    if len(unique) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise LayerError(f"{twice} is listed twice")
    # No file may also be a directory of another: a link there would redirect what follows.
    for path in parents(unique) & unique:
        raise LayerError(f"{path} is both a file and a directory")
