"""Writing one layer: files are added in any order, the result depends on their content alone."""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import tarfile
import tempfile
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import zstandard

from bundle.format.layer import (
    Entry,
    Frame,
    Index,
    LayerError,
    Link,
    Origin,
    check_link,
    check_path,
    encode_head,
)
from bundle.format.manifest import BLOCK, count_padding, member_header

from ..core.errors import WheelError
from .tree import list_folders
from .wheel_members import DENSE

# --- One zstd frame of a layer: compressed, or stored as it is; and its content ------------------

# Weights of a model hardly shrink, at a hundredth of the speed of a copy: a sample decides. What is
# stored is a zstd frame all the same (RFC 8878, section 3.1.1), of raw blocks.

SAMPLES = 8  # pieces of a frame's content that are tried
SAMPLE = 64 << 10  # bytes of each of them
PAYS = 0.9  # the share of its size that a sample must at most keep when it is compressed
_MAGIC = 0xFD2FB528
_BLOCK = 128 << 10  # the most that a block holds
_FULL_SIZE = 0xE0  # one segment, eight bytes of content size, no dictionary, no checksum


def _does_compression_pay(piece: bytes | bytearray) -> bool:
    if len(piece) <= SAMPLES * SAMPLE:
        return True  # it takes no time either way
    step = (len(piece) - SAMPLE) // (SAMPLES - 1)
    sample = b"".join(piece[i * step : i * step + SAMPLE] for i in range(SAMPLES))
    packed = zstandard.ZstdCompressor(level=1).compress(sample)
    return len(packed) <= PAYS * len(sample)


def store_uncompressed(piece: bytes | bytearray) -> bytes:
    """Return a frame that holds the content as it is."""
    parts: list[bytes | bytearray] = [struct.pack("<IBQ", _MAGIC, _FULL_SIZE, len(piece))]
    starts = range(0, len(piece), _BLOCK) or range(1)
    for start in starts:
        block = piece[start : start + _BLOCK]
        last = start + _BLOCK >= len(piece)
        parts.append((len(block) << 3 | last).to_bytes(3, "little"))  # block type 0: raw
        parts.append(block)
    return b"".join(parts)


def decompress_frame(frame: bytes, size: int) -> bytes:
    """Return the content of a frame; LayerError if it has not the length that it claims."""
    content = bytearray()
    try:
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            while len(content) <= size and (piece := reader.read(size + 1 - len(content))):
                content += piece
    except zstandard.ZstdError as exc:
        raise LayerError(f"a frame cannot be decompressed: {exc}") from exc
    if len(content) != size:
        raise LayerError("a frame does not hold as much as its index says")
    return bytes(content)


FRAME_TARGET = 16 << 20  # bytes of the tar; a large wheel must keep each process of a node busy
LEVEL = 7  # zstd level of most files; see benchmarks/NOTES.md for size against time
HUGE = 64 << 20  # bytes from which a file is huge: few files of PyTorch take most of the time
HUGE_LEVEL = 3  # a third of the time of ``LEVEL``, three to eight per cent more bytes
DENSE_LEVEL = 2  # a higher one takes three times as long for one per cent
WINDOW_LOG = 24  # matches are found in all of a frame; a level's own windows are smaller
HEAD_LEVEL = 9
_SHORT_NAME = 100  # bytes that a tar header has for a name; longer ones take a member of their own
SPOOL_MEMORY = 64 << 20  # bytes of a layer that are kept in memory
COPY = 1 << 20


def describe_compression(*, sampled: bool = False) -> str:
    """Return the settings that decide the compressed bytes: part of every layer's id."""
    version = ".".join(map(str, zstandard.ZSTD_VERSION))
    levels = f"level{LEVEL}-huge{HUGE}level{HUGE_LEVEL}-dense{DENSE}level{DENSE_LEVEL}"
    settings = f"zstd-{version}-{levels}-window{WINDOW_LOG}-frame{FRAME_TARGET}"
    return f"{settings}-sampled{PAYS}" if sampled else settings


def decompress_index(data: bytes, size: int = -1) -> bytes:
    """Return the content of a layer's index, whose digest was checked; or LayerError."""
    try:
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as exc:
        raise LayerError(f"the layer's index cannot be decompressed: {exc}") from exc


class Unread(NamedTuple):
    """The content of a file that is read when the layer is written."""

    size: int
    sha256: bytes
    chunks: Callable[[int], Iterator[bytes | bytearray]]  # pieces; an error at the end
    dense: bool = False  # true if compressing it well does not pay


_Chunk = tuple["bytes | bytearray", int]  # some bytes of the tar, and the level that suits them


class _File(NamedTuple):
    size: int
    mode: int
    sha256: str
    content: int | Unread  # its place in the spool, or what reads it

    @property
    def level(self) -> int:
        if not isinstance(self.content, int) and self.content.dense:
            return DENSE_LEVEL
        return HUGE_LEVEL if self.size >= HUGE else LEVEL


class LayerWriter:
    """Collects the files of one layer in a spool, then writes them sorted and compressed."""

    def __init__(self, scratch: Path, threads: int = 1, *, sampled: bool = False) -> None:
        """Spool to ``scratch`` (``/tmp`` may be small); the bytes do not depend on ``threads``."""
        self._threads = threads
        self._sampled = sampled
        self._spool: IO[bytes] = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed in __exit__
            max_size=SPOOL_MEMORY, dir=str(scratch)
        )
        self._files: dict[str, _File] = {}
        self._links: dict[str, str] = {}

    def __enter__(self) -> LayerWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._spool.close()

    def add(
        self, path: str, content: BinaryIO | Unread, *, executable: bool = False
    ) -> tuple[int, bytes]:
        """Add one file; return its length and its raw sha256. A stream is read to its end."""
        try:
            check_path(path)
        except LayerError as exc:
            raise WheelError(str(exc)) from exc
        place: int | Unread
        if isinstance(content, Unread):
            size, sha256, place = content.size, content.sha256, content
        else:
            size, sha256, place = self._spool_content(content)
        known = self._files.get(path)
        if known is not None and known.sha256 != sha256.hex():
            raise WheelError(f"{path} occurs twice, with different content")
        self._files[path] = _File(size, 0o755 if executable else 0o644, sha256.hex(), place)
        return size, sha256

    def _spool_content(self, stream: BinaryIO) -> tuple[int, bytes, int]:
        offset = self._spool.seek(0, 2)
        state, size = hashlib.sha256(), 0
        while chunk := stream.read(COPY):
            self._spool.write(chunk)
            state.update(chunk)
            size += len(chunk)
        return size, state.digest(), offset

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link; it may not lead out of the layer's own top directory."""
        try:
            check_link(Link(path, target))
        except LayerError as exc:
            raise WheelError(str(exc)) from exc
        self._links[path] = target

    def write(self, target: Path, origin: Origin) -> None:
        """Write the layer: first the frames, to a temporary file, as the head has their digests."""
        self._refuse_clashes(f"{origin.kind} {origin.name} {origin.version}".rstrip())
        frames: list[Frame] = []
        entries: list[Entry] = []
        with tempfile.TemporaryFile(dir=target.parent) as body:
            for packed, made in self._compress(_pieces(self._tar(entries))):
                frames.append(made)
                body.write(packed)
            links = tuple(Link(path, goal) for path, goal in sorted(self._links.items()))
            index = Index(files=tuple(entries), links=links, frames=tuple(frames))
            compress = zstandard.ZstdCompressor(level=HEAD_LEVEL).compress
            head = encode_head(index, origin, compress)
            body.seek(0)
            with target.open("wb") as out:
                out.write(head)
                shutil.copyfileobj(body, out, COPY)

    def _refuse_clashes(self, what: str) -> None:
        paths = self._files.keys() | self._links.keys()
        clashes = [path for path in sorted(list_folders(paths)) if path in paths]
        clashes += sorted(self._files.keys() & self._links.keys())
        if clashes:
            raise WheelError(
                f"{what}: the same path is a file and also a directory or a link",
                hint="no disk can hold both: pin another version of it",
                context=clashes,
            )

    def _tar(self, entries: list[Entry]) -> Iterator[_Chunk]:
        position = 0
        names = sorted([*self._files, *self._links])
        for name in names:
            header = _tar_header(name, self._files.get(name), self._links.get(name))
            position += len(header)
            yield header, LEVEL
            if name in self._links:
                continue
            file = self._files[name]
            entries.append(Entry(name, file.size, file.mode, file.sha256, position))
            for chunk in self._content(file):
                yield chunk, file.level
            yield bytes(count_padding(file.size)), LEVEL
            position += file.size + count_padding(file.size)
        yield bytes(2 * BLOCK), LEVEL

    def _content(self, file: _File) -> Iterator[bytes | bytearray]:
        """Yield a file in pieces of ``COPY`` bytes, wherever it comes from: frames end at them."""
        if not isinstance(file.content, int):
            yield from file.content.chunks(COPY)
            return
        self._spool.seek(file.content)
        left = file.size
        while left:
            chunk = self._spool.read(min(left, COPY))
            left -= len(chunk)
            yield chunk

    def _compress(self, pieces: Iterator[tuple[bytearray, int]]) -> Iterator[tuple[bytes, Frame]]:
        def compress(piece: bytearray, level: int) -> tuple[bytes, Frame]:
            if self._sampled and not _does_compression_pay(piece):
                packed = store_uncompressed(piece)
            else:
                parameters = zstandard.ZstdCompressionParameters.from_level(
                    level, window_log=WINDOW_LOG, write_checksum=False
                )
                compressor = zstandard.ZstdCompressor(compression_params=parameters)
                packed = compressor.compress(piece)
            return packed, Frame(len(packed), len(piece), hashlib.sha256(packed).hexdigest())

        with ThreadPoolExecutor(self._threads) as pool:
            waiting: deque[Future[tuple[bytes, Frame]]] = deque()
            for piece, level in pieces:
                waiting.append(pool.submit(compress, piece, level))
                if len(waiting) > self._threads:
                    yield waiting.popleft().result()
            for left in waiting:
                yield left.result()


def _tar_header(name: str, file: _File | None, target: str | None) -> bytes:
    if file is not None and len(name.encode()) <= _SHORT_NAME:
        return member_header(name, file.size, file.mode)  # ten times as quick
    info = tarfile.TarInfo(name)
    if file is None:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, target or "", 0o777
    else:
        info.size, info.mode = file.size, file.mode
    return info.tobuf(tarfile.GNU_FORMAT, encoding="utf-8", errors="strict")


def _pieces(stream: Iterator[_Chunk]) -> Iterator[tuple[bytearray, int]]:
    pending, shares = bytearray(), Counter[int]()
    for chunk, level in stream:
        pending += chunk
        shares[level] += len(chunk)
        if len(pending) >= FRAME_TARGET:
            yield pending, max(shares, key=shares.__getitem__)
            pending, shares = bytearray(), Counter()
    if pending:
        yield pending, max(shares, key=shares.__getitem__)


# --- The tar in a layer of the store, of which parts are read without the rest -------------------

_KEPT = 3  # frames that are kept: a library's first, its tables, and its strings are read in turn


class LayerTar:
    """Random access to what the frames of a layer hold, by decompressing the few that are asked."""

    def __init__(self, index: Index, start: int, read: Callable[[int, Frame], bytes]) -> None:
        """``read`` returns the bytes of a frame at its place; the first is at ``start``."""
        self.index, self._read = index, read
        self._places = list(accumulate((frame.size for frame in index.frames), initial=start))
        self._starts = list(accumulate((f.unpacked_size for f in index.frames), initial=0))
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def file(self, entry: Entry, at: int, size: int) -> bytes:
        """Return bytes from a place in a file, fewer at its end; LayerError or OSError."""
        position = entry.offset + at
        end = min(position + size, entry.offset + entry.size)
        data = b""
        while position < end:
            number = bisect_right(self._starts, position) - 1
            start = position - self._starts[number]
            piece = self._frame(number)[start : start + end - position]
            if not piece:
                raise LayerError("a frame is shorter than the index says")
            data += piece
            position += len(piece)
        return data

    def _frame(self, number: int) -> bytes:
        if number not in self._kept:
            if number >= len(self.index.frames):
                raise LayerError("a file lies behind the last frame")
            packed = self._read(self._places[number], self.index.frames[number])
            self._kept[number] = decompress_index(packed)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]


# --- The modules that a layer provides, which a build imports to check itself --------------------

_MODULE = re.compile(r"lib/python3\.\d+/site-packages/(?P<path>.+)")
_EXTENSION = re.compile(r"(\.cpython-[\w-]+|\.abi3)?\.so$|\.py$")
_NOT_FOR_USERS = {"test", "tests", "doc", "docs", "example", "examples", "benchmarks"}


def list_top_modules(name: str, index: Index) -> tuple[str, ...]:
    """Return a distribution's modules: the one of its name, else each public one."""
    matches = filter(None, (_MODULE.fullmatch(entry.path) for entry in index.files))
    modules = {_top_module(match["path"]) for match in matches} - {""}
    public = filter(str.isidentifier, modules - _NOT_FOR_USERS)
    namesakes = {module for module in modules if module.lower().replace("_", "-") == name}
    return tuple(sorted(namesakes or (name for name in public if name[0] != "_")))


def _top_module(path: str) -> str:
    first, _, rest = path.partition("/")
    if rest == "__init__.py":
        return first
    return _EXTENSION.sub("", first) if not rest and _EXTENSION.search(first) else ""
