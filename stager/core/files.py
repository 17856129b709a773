"""Files that are read, which must be regular, and files that are replaced as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from bundle.system.permissions import Opener

from .errors import ConfigError, StagerError

# Endings of the names of files that stager writes; no project ships a file with one of them.
BUNDLE_SUFFIX = ".pkgs.tar"
CARRIED_SUFFIX = ".carry.tar"  # a bundle, or part of one, that is carried over an air gap
IMAGE_SUFFIX = ".env.sqsh"  # an environment to mount
SBOM_SUFFIX = ".cdx.json"  # a bundle's inventory as CycloneDX


_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def open_regular(path: Path, *, unnoticed: bool = False) -> BufferedReader:
    """Open a regular file; ``unnoticed`` leaves its access time, where the file is one's own."""
    try:
        handle = os.open(path, _READING | (os.O_NOATIME if unnoticed else 0))
    except PermissionError:  # it is somebody else's: open(2)
        handle = os.open(path, _READING)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_bytes(path: Path) -> bytes:
    """Read a regular file; OSError as from :func:`open_regular`."""
    with open_regular(path) as handle:
        return handle.read()


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8; UnicodeDecodeError if it is none, else as ``read_bytes``."""
    return read_bytes(path).decode("utf-8")


def expand_home(path: Path | str) -> Path:
    """Return a path with the home directory in place of a leading ``~`` or ``~USER``."""
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise ConfigError(
            f"{path}: there is no home directory that this path could start at",
            hint="set HOME, or write the whole path",
        ) from exc


ANOTHER_OUTPUT = "name another file with --output"
_MAX_NAME = 100
_PARTIAL = ".part"


@contextlib.contextmanager
def replace_file(path: Path, opener: Opener | None = None) -> Iterator[BinaryIO]:
    """Open a new file beside its place; move it there, over a link too, if the block succeeds."""
    _refuse_special(path)
    partial = path.with_name(f".{path.name[:_MAX_NAME]}.{secrets.token_hex(4)}{_PARTIAL}")
    try:
        with open(partial, "xb", opener=opener) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


@contextlib.contextmanager
def write_output(
    path: Path, opener: Opener | None = None, *, hint: str = ANOTHER_OUTPUT
) -> Iterator[BinaryIO]:
    """Do the same for a file that the user asked for."""
    try:
        with replace_file(path, opener) as handle:
            yield handle
    except OSError as exc:
        named = str(exc.filename or "")
        place = path if named.endswith(_PARTIAL) else named or path
        raise StagerError(f"{place} cannot be written: {exc.strerror or exc}", hint=hint) from exc


def _refuse_special(path: Path) -> None:
    """Refuse a device, a pipe or a socket: root could replace ``/dev/null`` by a file."""
    try:
        of_a_process = path.is_symlink() and str(path.readlink()).startswith("/proc/")
        mode = path.stat().st_mode
    except OSError:  # nothing is there, or a link to nothing; the rest shows when it is written
        return
    if of_a_process or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a link as /dev/stdout
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
