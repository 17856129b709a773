"""The zstd decompressor that travels in a bundle, or this Python's own."""

from __future__ import annotations

import importlib
import io
import os
import sys
import zipfile
from collections.abc import Callable

from ..protocol.problem import NodeError, Problem
from .elf import mapped
from .layer import LayerError

Decompress = Callable[[bytes, int], bytes]
"""Turns one zstd frame into its content, which must have the given length; -1 for an index."""

_INDEX_LIMIT = 512 << 20


def load_decompressor(name: str, data: bytes | None, scratch: str) -> Decompress:
    """A zstd decompressor: the one that travels in a bundle, or this Python's own.

    Args:
        name: the zstandard wheel's name.
        data: the wheel, its digest checked; None for this Python's own.
        scratch: a private directory to lay the compiled module in; it must stay while it is used.

    Raises:
        NodeError: it does not load here.
    """
    if data is None:
        return _own_zstd()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            _lay_out(wheel, scratch)
        sys.path.insert(0, scratch)
        try:
            zstandard = importlib.import_module("zstandard")
        finally:
            sys.path.remove(scratch)
        engine = zstandard.ZstdDecompressor()
        known, claimed = zstandard.ZstdError, zstandard.frame_content_size
        isinstance(None, known)  # it has to be a class
    except (Exception, SystemExit) as exc:  # whatever is in that wheel runs here
        raise NodeError(_unfit(name, scratch, "does not load", exc)) from exc

    def decompress(data: bytes, size: int) -> bytes:
        try:
            _refuse_bomb(claimed(data), size)
            content: bytes = engine.decompress(data, allow_extra_data=False)
        except LayerError:
            raise
        except (Exception, SystemExit) as exc:
            if isinstance(exc, known):
                raise LayerError(f"a frame cannot be decompressed: {exc}") from exc
            raise NodeError(_unfit(name, scratch, "does not work", exc)) from exc
        if not isinstance(content, bytes):
            why = TypeError(f"it made a {type(content).__name__} of a frame")
            raise NodeError(_unfit(name, scratch, "does not work", why))
        return content

    return decompress


def _unfit(name: str, where: str, how: str, exc: BaseException) -> Problem:
    """Say that the wheel cannot be used; its own text is shortened, as it may be anything."""
    said = ascii(str(exc))[1:-1][:200] or type(exc).__name__
    version = "%d.%d" % sys.version_info[:2]
    return Problem(
        what=f"the bundle's zstd decompressor {how}",
        where=where,
        why=f"{name} under Python {version}: {said}",
        fix="use a node root that allows execution, or build for this machine's platform",
    )


def _lay_out(wheel: zipfile.ZipFile, scratch: str) -> None:
    """Write what importing the package takes, a twentieth of what is in its wheel.

    CPython never loads the cffi backend, and most of the other one is debug information.
    """
    names = [name for name in wheel.namelist() if name.startswith("zstandard/")]
    wheel.extractall(scratch, [name for name in names if name.endswith(".py")])
    for name in names:
        if name.endswith(".so") and "/_cffi" not in name:
            target = os.path.join(scratch, "zstandard", os.path.basename(name))
            with wheel.open(name) as library, open(target, "wb") as file:
                file.write(mapped(library))


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
