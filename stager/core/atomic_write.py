"""Writing a file so that its name always stands for all of the old or all of the new content."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from bundle.system.permissions import Opener

from .errors import StagerError

ANOTHER_OUTPUT = "name another file with --output"
_MAX_NAME = 100
_PARTIAL = ".part"


@contextlib.contextmanager
def replacing(path: Path, opener: Opener | None = None) -> Iterator[BinaryIO]:
    """Open a new file beside its place, and move it there once the block succeeds.

    Args:
        path: the place; a link there is replaced, not followed.
        opener: opens the new file; None leaves its mode to the umask.

    Raises:
        OSError: it cannot be written, or what is there is no file; nothing has changed then.
    """
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
def output_file(
    path: Path, opener: Opener | None = None, *, hint: str = ANOTHER_OUTPUT
) -> Iterator[BinaryIO]:
    """Do the same for a file that the user asked for.

    Raises:
        StagerError: it, or what the block itself writes, cannot be written.
    """
    try:
        with replacing(path, opener) as handle:
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
