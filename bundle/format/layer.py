"""The index of one layer, and the checks it must pass before a byte of the layer is used.

A layer is a sequence of zstd frames: the head, which holds the index, and the pieces of one plain
tar, independent of one another. Its headers are for people: unpacking reads the index alone.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from ..protocol.dataclass import dataclass
from ..protocol.digest import Digest, canonical_json
from .manifest import BLOCK, Layer

# --- Limits of paths on nodes: checked where layers are made, and where they are unpacked --------

PATH_LIMIT = 3584  # bytes in an environment; of Linux' 4,095 the rest is for the node root
NAME_LIMIT = 255  # bytes of one name, on every file system that nodes have
DEPTH_LIMIT = 256  # names in a path; tools that walk trees by recursion end a bit further down
_SHOWN = 300  # characters of a path that a message shows


def explain_excess(path: str) -> str:
    """Return the respect in which a path is too long for some node; empty if it fits."""
    names = path.encode("utf-8", "replace").split(b"/")
    longest, depth, size = max(map(len, names)), len(names), sum(map(len, names)) + len(names) - 1
    if longest > NAME_LIMIT:
        return f"a name of {longest} bytes, more than {NAME_LIMIT}"
    if depth > DEPTH_LIMIT:
        return f"a path of {depth} levels, more than {DEPTH_LIMIT}"
    return f"a path of {size} bytes, more than {PATH_LIMIT}" if size > PATH_LIMIT else ""


def abridge_path(path: str) -> str:
    """Return a path as a message shows it, without the middle of a long one."""
    return path if len(path) <= _SHOWN else f"{path[:60]}...{path[-60:]}"


FRAME_LIMIT = 64 << 20  # the most a frame may hold, packed or not: bounds a hostile bundle's claim
LINK_LIMIT = 40  # links in a row that Linux follows before it reports a loop (path_resolution(7))

_MODES = (0o644, 0o755)
_UNSAFE = re.compile(r"(?:^|/)\.{0,2}(?:/|$)")  # a part of a path that is empty, ``.`` or ``..``


class LayerError(ValueError):
    """The bytes of a layer are invalid."""


class Entry(NamedTuple):
    """One file of a layer."""

    path: str  # its path in the environment, with forward slashes
    size: int
    mode: int  # 0644 or 0755
    sha256: str
    offset: int  # the index of its first byte in the uncompressed tar


class Link(NamedTuple):
    """One symbolic link of a layer."""

    path: str
    target: str


class Frame(NamedTuple):
    """One independently compressed piece of the tar."""

    size: int  # compressed length in bytes
    unpacked_size: int  # length in bytes of the piece of tar inside
    sha256: str


class Index(NamedTuple):
    """The content of a layer."""

    files: tuple[Entry, ...]  # sorted by path
    links: tuple[Link, ...]  # sorted by path
    frames: tuple[Frame, ...]  # in the order in which they are stored, right behind the head

    @property
    def unpacked_size(self) -> int:
        """Sum of the files' lengths in bytes."""
        return sum(entry.size for entry in self.files)


def check_path(path: object) -> str:
    """Return ``path`` if it stays inside the environment, whatever it is joined to."""
    if not isinstance(path, str) or not path.isprintable() or _UNSAFE.search(path):
        raise LayerError(f"unsafe path in an archive: {path!r}")
    why = explain_excess(path)
    if why:
        raise LayerError(f"no node can hold {why}: {abridge_path(path)}")
    return path


def check_link(link: Link) -> None:
    """Refuse a symbolic link that is absolute or climbs out of the environment."""
    check_path(link.path)
    target: object = link.target  # of any type until it is checked
    is_text = isinstance(target, str) and target.isprintable() and target[:1] not in ("", "/")
    if not isinstance(target, str) or not is_text or explain_excess(target):
        raise LayerError(f"unsafe link in an archive: {link.path!r} -> {target!r}")
    depth = link.path.count("/")
    for part in target.split("/"):
        if part == "..":
            depth -= 1
        elif part not in ("", "."):
            depth += 1
        # The first path component (``project``) is a wall too: a link may not climb over it.
        if depth < 1:
            raise LayerError(f"link leads outside: {link.path!r} -> {target!r}")


def check_links(links: Mapping[str, str]) -> None:
    """Refuse links that lead outside through one another, followed the way the kernel does."""
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
        elif part not in ("", "."):
            directory.append(part)
            target = links.get("/".join(directory))
            if target is not None:
                followed += 1
                if followed > LINK_LIMIT:
                    raise LayerError("link leads in circles")
                directory.pop()
                remaining += target.split("/")[::-1]


def list_parents(paths: Iterable[str]) -> set[str]:
    """Return all directories that these paths lie in, except the empty one."""
    directories: set[str] = set()
    for folder in {path.rpartition("/")[0] for path in paths}:
        parent = folder
        while parent and parent not in directories:
            directories.add(parent)
            parent = parent.rpartition("/")[0]
    return directories


def _check_paths(paths: Sequence[str]) -> None:
    """Do as :func:`check_path` for each path, 20 times as fast if all are short and safe."""
    joined = "/" + "/\n/".join(paths) + "/"
    is_unsafe = any(part in joined for part in ("//", "/./", "/../"))
    # A path no longer than a name may be keeps all limits.
    is_long = max(map(len, joined.encode("utf-8", "replace").split(b"\n"))) > NAME_LIMIT
    if is_unsafe or is_long or not "".join(paths).isprintable():
        for path in paths:
            check_path(path)


def check_index(index: Index) -> None:
    """Refuse an index of which a byte could be written outside, by ValueError or TypeError."""
    for frame in index.frames:
        Digest(frame.sha256)
        for size in (frame.size, frame.unpacked_size):
            if type(size) is not int or not 0 < size <= FRAME_LIMIT:
                raise LayerError("a frame has an impossible size")
    _check_files(index)
    for link in index.links:
        check_link(link)
    _check_unique_paths(index)
    check_links(dict(index.links))


def _check_files(index: Index) -> None:
    _check_paths([entry.path for entry in index.files])
    # A file has its tar header before it, and the tar ends with two empty blocks.
    end_of_files = sum(frame.unpacked_size for frame in index.frames) - 2 * BLOCK
    end_of_previous = 0
    for entry in index.files:
        if type(entry.mode) is not int or entry.mode not in _MODES:
            raise LayerError(f"unexpected mode {entry.mode!r} of {entry.path}")
        if not (type(entry.size) is type(entry.offset) is int) or entry.size < 0:
            raise LayerError(f"{entry.path} has an impossible size or place")
        if not isinstance(entry.sha256, str):
            raise LayerError(f"{entry.path} has no digest")
        if not end_of_previous + BLOCK <= entry.offset <= end_of_files - entry.size:
            raise LayerError(f"{entry.path} lies outside its layer, or over another file")
        end_of_previous = entry.offset + entry.size


def _check_unique_paths(index: Index) -> None:
    unique: set[str] = set()
    for path in (*(entry.path for entry in index.files), *(link.path for link in index.links)):
        if path in unique:
            raise LayerError(f"{path} is listed twice")
        unique.add(path)
    # No file may also be a directory of another: a link there would redirect what follows.
    for path in list_parents(unique) & unique:
        raise LayerError(f"{path} is both a file and a directory")


# --- The origin of a layer: the value whose digest is the layer's id -----------------------------

ORIGIN_LIMIT = 1 << 16  # the most bytes that an origin may have


@dataclass(frozen=True)
class Origin:
    """The source and the options of a layer; known before the layer is made."""

    kind: str  # ``wheel``, ``project``, ``trainer`` or ``asset``
    name: str  # the distribution's normalized name; empty for the other kinds, where it is a label
    version: str  # the distribution's version; empty for the other kinds
    content: Digest  # digest of the wheel, or of the tree
    options: Mapping[str, object]  # all that shape the layer's bytes, the format's version too

    @property
    def id(self) -> Digest:
        """The id of the layer: the digest of all the fields above."""
        return Digest.of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the bytes of the origin in the layer's head."""
        return canonical_json(asdict(self))

    def describes(self, layer: Layer) -> bool:
        """Return True if a layer's description fits its origin."""
        if (self.id, self.kind) != (layer.id, layer.kind):
            return False
        return self.kind != "wheel" or (self.name, self.version) == (layer.name, layer.version)


def parse(data: bytes) -> Origin:
    """Read an origin; ValueError if these bytes are none."""
    try:
        raw = json.loads(data)
        origin = Origin(**{**raw, "content": Digest(raw["content"])})
    except (KeyError, TypeError, RecursionError) as exc:
        raise ValueError(f"a field is missing, or of another type: {exc}") from exc
    if not isinstance(origin.options, dict) or origin.to_bytes() != data:
        raise ValueError("it is not in its canonical form")
    return origin


# --- The head of a layer, from which one learns what is in it before a byte of it is used --------

# It is a *skippable* zstd frame (RFC 8878, section 3.1.2), so ``zstd -d < layer | tar -t`` works.
# Its content is a few numbers, the layer's origin as canonical JSON, and then the compressed index.

INDEX_FORMAT = 2
_SKIPPABLE = 0x184D2A50
_FRAME_HEADER = 8
_HEAD = struct.Struct("<IIQQQI")
HEAD_PREFIX = _HEAD.size  # bytes that :func:`head_summary` needs


class HeadSummary(NamedTuple):
    """The lengths in the first bytes of a layer, which are not compressed."""

    head_size: int  # length in bytes of the head
    size: int  # length in bytes of the whole layer
    unpacked_size: int  # sum in bytes of the files inside
    files: int
    origin_size: int  # length in bytes of the origin, which follows these numbers


def encode_head(index: Index, origin: Origin, compress: Callable[[bytes], bytes]) -> bytes:
    """Return the skippable frame that opens a layer."""
    origin_data = origin.to_bytes()
    lists = {"files": index.files, "links": index.links, "frames": index.frames}
    body = compress(canonical_json({"format": INDEX_FORMAT, **lists}))
    head_size = _HEAD.size + len(origin_data) + len(body)
    total = head_size + sum(frame.size for frame in index.frames)
    counts = (index.unpacked_size, len(index.files), len(origin_data))
    return _HEAD.pack(_SKIPPABLE, head_size - _FRAME_HEADER, total, *counts) + origin_data + body


def head_summary(prefix: bytes) -> HeadSummary:
    """Read the lengths from the first ``HEAD_PREFIX`` bytes of a layer."""
    if len(prefix) < HEAD_PREFIX:
        raise LayerError("the layer is cut short")
    magic, frame_size, total, unpacked_size, files, origin_size = _HEAD.unpack_from(prefix)
    if magic != _SKIPPABLE:
        raise LayerError("the layer does not begin with an index")
    head_size = _FRAME_HEADER + frame_size
    if origin_size > min(ORIGIN_LIMIT, head_size - HEAD_PREFIX):
        raise LayerError("the layer does not say what it was made from")
    return HeadSummary(head_size, total, unpacked_size, files, origin_size)


def read_origin(head: bytes) -> Origin:
    """Return the origin in a layer's head."""
    data = head[HEAD_PREFIX : HEAD_PREFIX + head_summary(head).origin_size]
    try:
        return parse(data)
    except ValueError as exc:
        raise LayerError(f"the layer does not say what it was made from: {exc}") from exc


def get_packed_index(head: bytes) -> bytes:
    """Return the compressed index in a layer's head."""
    return head[HEAD_PREFIX + head_summary(head).origin_size :]


def decode_head(
    head: bytes, decompress: Callable[[bytes], bytes], *, checked: bool = False
) -> Index:
    """Read a head whose digest was checked; ``checked`` if these bytes were read before, too."""
    summary = head_summary(head)
    if summary.head_size != len(head):
        raise LayerError("the layer's index is cut short")
    try:
        raw = json.loads(decompress(get_packed_index(head)))
        if (version := raw["format"]) != INDEX_FORMAT:
            raise LayerError(f"the layer has index format {version!r}, not {INDEX_FORMAT}")
        files, links, frames = lists = [raw[key] for key in ("files", "links", "frames")]
        if not all(isinstance(each, list) for each in lists):
            raise TypeError("files, links and frames are lists")
        index = Index(  # whose fields may still have values of any type
            files=tuple(map(Entry._make, files)),
            links=tuple(map(Link._make, links)),
            frames=tuple(map(Frame._make, frames)),
        )
        if not checked:
            check_index(index)
    except LayerError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise LayerError(f"the layer's index cannot be read: {exc}") from exc
    if (index.unpacked_size, len(index.files)) != (summary.unpacked_size, summary.files):
        raise LayerError("the layer's index does not agree with its summary")
    return index
