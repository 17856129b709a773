"""Reading a bundle: nothing in it is believed before it has been compared with the manifest."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import io
import os
import stat
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from types import TracebackType

from .layer import Index, LayerError, decode_head
from .manifest import (
    BLOCK,
    PART_LIMIT,
    Digest,
    Layer,
    Manifest,
    ManifestError,
    Part,
    member_header,
    padding,
    parse,
)
from .problem import NodeError, Problem

Decompress = Callable[[bytes, int], bytes]
"""Turns one zstd frame into its content, which must have the given length; -1 for an index."""

_INDEX_LIMIT = 512 << 20
_END = bytes(2 * BLOCK)


class BundleFile:
    """An open bundle whose frame, manifest and length have been checked."""

    def __init__(self, path: str, expected: str | None = None) -> None:
        """Open ``path`` and check all of it but the content of the parts and layers.

        Args:
            path: the bundle.
            expected: the id it must have; None accepts any.

        Raises:
            NodeError: it cannot be read, is damaged or cut short, or is another bundle.
        """
        self.path = path
        try:
            # Opening a named pipe would wait for a writer; O_NONBLOCK means nothing to a file.
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            # While it is open nobody clears it away; not every file system has locks.
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as exc:
            raise NodeError(
                Problem(
                    what="the bundle cannot be read",
                    where=path,
                    why=exc.strerror or str(exc),
                    fix="check the path, or make the bundle with `stager build`",
                )
            ) from exc
        try:
            self.manifest, self._offsets = self._read_frame()
        except (ManifestError, UnicodeDecodeError) as exc:
            os.close(self._handle)
            raise self._damaged(str(exc)) from exc
        except NodeError:
            os.close(self._handle)
            raise
        if expected is not None and self.manifest.id != expected:
            self.close()
            raise NodeError(
                Problem(
                    what="this is another bundle than the job was made for",
                    where=path,
                    why=f"its id is {self.manifest.id[:12]}, expected {expected[:12]}",
                    fix="stage the right file, or start the job again",
                )
            )

    def __enter__(self) -> BundleFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes at a place in the file; safe from several processes at a time.

        Raises:
            NodeError: the file ends before, or the disk fails.
        """
        try:
            data = os.pread(self._handle, size, offset)
            while len(data) < size:
                more = os.pread(self._handle, size - len(data), offset + len(data))
                if not more:
                    raise self._damaged("it ends too early")
                data += more
        except OSError as exc:
            raise self._damaged(f"it cannot be read: {exc.strerror or exc}") from exc
        return data

    def part(self, part: Part) -> bytes:
        """A raw member, its digest checked.

        Raises:
            NodeError: its bytes are not those the manifest promises.
        """
        data = self.read(self._offsets[part.name], part.size)
        if Digest.of(data) != part.sha256:
            raise self._damaged(f"{part.name} does not have the digest in the manifest")
        return data

    def index(self, layer: Layer, decompress: Decompress) -> Index:
        """The checked index of a layer.

        Raises:
            NodeError: its head is not what the manifest promises, or names something unsafe.
        """
        head = self.read(self._offsets[layer.member], layer.head_size)
        if Digest.of(head) != layer.head:
            raise self._damaged(f"the index of {layer.name} does not have the promised digest")
        with self.refusing(LayerError):
            index = decode_head(head, lambda data: decompress(data, -1))
        if layer.head_size + sum(frame.size for frame in index.frames) != layer.size:
            raise self._damaged(f"{layer.name} does not have the promised length")
        if (index.unpacked_size, len(index.files)) != (layer.unpacked_size, layer.files):
            raise self._damaged(f"{layer.name} does not hold as much as promised")
        return index

    def frames_start(self, layer: Layer) -> int:
        """Where the first frame behind a layer's head lies in the file."""
        return self._offsets[layer.member] + layer.head_size

    def frame(self, offset: int, size: int, sha256: str) -> bytes:
        """The compressed bytes of one frame, their digest checked.

        Raises:
            NodeError: they are not what the index promises.
        """
        data = self.read(offset, size)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise self._damaged(f"the {size} bytes at {offset} do not have the promised digest")
        return data

    @contextlib.contextmanager
    def refusing(self, *kinds: type[Exception]) -> Iterator[None]:
        """Turn these exceptions into the statement that the bundle is damaged.

        Raises:
            NodeError: one of them came.
        """
        try:
            yield
        except kinds as exc:
            raise self._damaged(str(exc)) from exc

    def _read_frame(self) -> tuple[Manifest, dict[str, int]]:
        """Check the manifest, then every header, every padding byte and the end of the tar."""
        state = os.fstat(self._handle)
        if not stat.S_ISREG(state.st_mode):
            raise ManifestError("it is not a file")
        total = state.st_size
        size = _size_field(self.read(0, BLOCK)) if total >= BLOCK else -1
        if not 0 < size <= min(PART_LIMIT, total):
            raise ManifestError("it does not begin with manifest.json")
        manifest = parse(self.read(BLOCK, size))
        offsets, position = {}, 0
        for name, length in manifest.members():
            if self.read(position, BLOCK) != member_header(name, length):
                raise ManifestError(f"the tar header of {name} is not what it must be")
            offsets[name] = position + BLOCK
            fill = padding(length)
            position += BLOCK + length + fill
            if self.read(position - fill, fill) != bytes(fill):
                raise ManifestError(f"the padding behind {name} is not empty")
        if total != position + len(_END):
            raise ManifestError(f"it has {total} bytes, not {position + len(_END)}")
        if self.read(position, len(_END)) != _END:
            raise ManifestError("the end mark of the tar is damaged")
        return manifest, offsets

    def _damaged(self, why: str) -> NodeError:
        return NodeError(
            Problem(
                what="the bundle is damaged or not a bundle",
                where=self.path,
                why=why,
                fix="copy it again, or make it anew with `stager build`",
            )
        )


def decompressor(bundle: BundleFile, scratch: str) -> Decompress:
    """A zstd decompressor: this Python's own, or the one that travels in the bundle.

    Args:
        bundle: where the zstandard wheel is taken from.
        scratch: a private directory to lay the compiled module in; it must stay while it is used.

    Raises:
        NodeError: the wheel is damaged, or does not load here.
    """
    part = bundle.manifest.decompressor
    if part is None:
        return _own_zstd()
    data = bundle.part(part)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            wheel.extractall(scratch, [n for n in wheel.namelist() if n.startswith("zstandard/")])
        sys.path.insert(0, scratch)
        try:
            zstandard = importlib.import_module("zstandard")
        finally:
            sys.path.remove(scratch)
    except (OSError, ImportError, RuntimeError, zipfile.BadZipFile, zlib.error) as exc:
        raise NodeError(
            Problem(
                what="the bundle's zstd decompressor does not load",
                where=scratch,
                why=f"{part.name} under Python %d.%d: {exc}" % sys.version_info[:2],
                fix="use a node root that allows execution, or build for this machine's platform",
            )
        ) from exc
    engine = zstandard.ZstdDecompressor()

    def decompress(data: bytes, size: int) -> bytes:
        try:
            _refuse_bomb(zstandard.frame_content_size(data), size)
            content: bytes = engine.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as exc:
            raise LayerError(f"a frame cannot be decompressed: {exc}") from exc
        return content

    return decompress


def _own_zstd() -> Decompress:
    """zstd of the standard library, from Python 3.14 on (PEP 784)."""
    try:
        zstd = importlib.import_module("compression.zstd")
    except ImportError as exc:
        raise NodeError(
            Problem(
                what="this Python has no zstd and the bundle brings none",
                where=sys.executable,
                why=f"Python {sys.version_info[0]}.{sys.version_info[1]}",
                fix="run the node program with the Python that the bundle was made for",
            )
        ) from exc

    def decompress(data: bytes, size: int) -> bytes:
        try:
            _refuse_bomb(zstd.get_frame_info(data).decompressed_size, size)
            # One frame alone: ``zstd.decompress`` would go on with whatever follows it.
            engine = zstd.ZstdDecompressor()
            content: bytes = engine.decompress(data)
        except zstd.ZstdError as exc:
            raise LayerError(f"a frame cannot be decompressed: {exc}") from exc
        if not engine.eof or engine.unused_data:
            raise LayerError("a frame is cut short, or something follows it")
        return content

    return decompress


def _refuse_bomb(claimed: int | None, size: int) -> None:
    """Stop before memory is taken for a frame that claims another length than it should have."""
    fits = claimed == size if size >= 0 else claimed is not None and 0 <= claimed <= _INDEX_LIMIT
    if not fits:
        raise LayerError(f"a frame claims to hold {claimed} bytes")


def _size_field(header: bytes) -> int:
    try:
        return int(header[124:135], 8)
    except ValueError:
        return -1
