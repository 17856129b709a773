"""The zstd decompressor that travels in a bundle, or this Python's own."""

from __future__ import annotations

import importlib
import io
import os
import sys
import zipfile
from collections.abc import Callable

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.own_program import loads_modules_for, short_version
from .elf import mapped
from .foreign_zstd import ForeignZstd, ZstdError, is_library, python_of
from .layer import LayerError

Decompress = Callable[[bytes, int], bytes]
"""Turns one zstd frame into its content, which must have the given length; -1 for an index."""

_INDEX_LIMIT = 512 << 20


def load_decompressor(name: str, data: bytes | None, scratch: str) -> Decompress:
    """Return a zstd decompressor: the one that travels in a bundle, or this Python's own.

    Args:
        name: the zstandard wheel's name.
        data: the wheel, its digest checked; None for this Python's own.
        scratch: a private directory for the compiled module; it must exist while that is used.

    Raises:
        NodeError: it does not load here.
    """
    if data is None:
        return _standard_library_zstd()
    version = python_of(name)
    if version and not loads_modules_for(version):
        return _foreign_zstd(name, data, scratch)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            _extract(wheel, scratch)
        sys.path.insert(0, scratch)
        try:
            zstandard = importlib.import_module("zstandard")
        finally:
            sys.path.remove(scratch)
        decompressor = zstandard.ZstdDecompressor()
        frame_error, claimed_size = zstandard.ZstdError, zstandard.frame_content_size
        isinstance(None, frame_error)  # it has to be a class
    except (Exception, SystemExit) as exc:  # the code of that wheel runs here
        raise NodeError(_unusable(name, scratch, "does not load", exc)) from exc

    def decompress(data: bytes, size: int) -> bytes:
        try:
            _refuse_bomb(claimed_size(data), size)
            content: bytes = decompressor.decompress(data, allow_extra_data=False)
        except LayerError:
            raise
        except (Exception, SystemExit) as exc:
            if isinstance(exc, frame_error):
                raise LayerError(f"a frame cannot be decompressed: {exc}") from exc
            raise NodeError(_unusable(name, scratch, "does not work", exc)) from exc
        if not isinstance(content, bytes):
            why = TypeError(f"it made a {type(content).__name__} of a frame")
            raise NodeError(_unusable(name, scratch, "does not work", why))
        return content

    return decompress


def _foreign_zstd(name: str, data: bytes, scratch: str) -> Decompress:
    """Return the decompressor of a wheel for another Python, which the bundle has."""
    path = os.path.join(scratch, "zstd.so")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            (member,) = filter(is_library, wheel.namelist())
            with wheel.open(member) as library, open(path, "wb") as file:
                file.write(mapped(library))
        zstd = ForeignZstd(path)
    except Exception as exc:  # whatever the wheel holds
        raise NodeError(_unusable(name, scratch, "does not load", exc)) from exc

    def decompress(data: bytes, size: int) -> bytes:
        try:
            claimed = zstd.claimed_size(data)
            _refuse_bomb(claimed, size)
            return zstd.decompress(data, claimed or 0)
        except ZstdError as exc:
            raise LayerError(f"a frame cannot be decompressed: {exc}") from exc

    return decompress


def _unusable(name: str, where: str, how: str, exc: BaseException) -> Problem:
    reason = ascii(str(exc))[1:-1][:200] or type(exc).__name__
    values = {"how": how, "name": name, "version": short_version(), "why": reason}
    return Problem(ProblemCode.DECOMPRESSOR_UNUSABLE, where, values)


def _extract(wheel: zipfile.ZipFile, scratch: str) -> None:
    """Write the 5 % that an import needs: no cffi backend, and no debug information."""
    names = [name for name in wheel.namelist() if name.startswith("zstandard/")]
    wheel.extractall(scratch, [name for name in names if name.endswith(".py")])
    for name in names:
        if not name.endswith(".so") or "/_cffi" in name:
            continue
        target = os.path.join(scratch, "zstandard", os.path.basename(name))
        with wheel.open(name) as library, open(target, "wb") as file:
            file.write(mapped(library))


def _standard_library_zstd() -> Decompress:
    """Return the decompressor of Python 3.14 and later (PEP 784)."""
    try:
        zstd = importlib.import_module("compression.zstd")
    except ImportError as exc:
        values = {"version": short_version()}
        raise NodeError(Problem(ProblemCode.NO_ZSTD, sys.executable, values)) from exc

    def decompress(data: bytes, size: int) -> bytes:
        try:
            _refuse_bomb(zstd.get_frame_info(data).decompressed_size, size)
            # One frame alone: ``zstd.decompress`` would go on with whatever follows it.
            decompressor = zstd.ZstdDecompressor()
            content: bytes = decompressor.decompress(data)
        except zstd.ZstdError as exc:
            raise LayerError(f"a frame cannot be decompressed: {exc}") from exc
        if not decompressor.eof or decompressor.unused_data:
            raise LayerError("a frame is cut short, or something follows it")
        return content

    return decompress


def _refuse_bomb(claimed: int | None, size: int) -> None:
    """Refuse a frame of unexpected length before any memory is allocated."""
    if not _is_expected(claimed, size):
        raise LayerError(f"a frame claims to hold {claimed} bytes")


def _is_expected(claimed: int | None, size: int) -> bool:
    """Return True if a frame claims to have the given length, or that of any index for -1."""
    if size >= 0:
        return claimed == size
    return claimed is not None and 0 <= claimed <= _INDEX_LIMIT
