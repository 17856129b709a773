"""The files of the offline root as ``clean`` sees them: their kind, their content, their users."""

from __future__ import annotations

import fcntl
import stat
from pathlib import Path

from bundle.format.layer import HEAD_PREFIX, INDEX_FORMAT, ORIGIN_LIMIT, LayerError, origin_of
from bundle.format.manifest import FORMAT

from ..core.files import opened
from ..layers.layer_file import compression
from ..pack.bundle_file import format_of


def content_of(layer: Path, key: str) -> str | None:
    """Return the digest of the wheel or tree that a layer was made from.

    None where no build would use it again: its format or compression is another version's, or it
    is not what its name says. Empty for a wheel's layer that leaves something out: it is needed by
    the bundles that name it, and not by a lock.
    """
    with opened(layer, unnoticed=True) as handle:  # to look at it is not to use it
        try:
            origin = origin_of(handle.read(HEAD_PREFIX + ORIGIN_LIMIT))
        except LayerError:
            return None
    options = origin.options
    current = (INDEX_FORMAT, compression())
    if origin.id != key or (options.get("format"), options.get("compression")) != current:
        return None
    return "" if "prune" in options else origin.content


def is_outdated(bundle: Path) -> bool:
    """Return whether a bundle has a format that only older versions of stager can read."""
    return format_of(bundle) < FORMAT


def nobody_has_open(path: Path) -> bool:
    """Return whether no job or command has a file of the store open, or a lock of it taken.

    Of what cannot be opened, a directory in its place for one, that cannot be known.
    """
    # A build takes this lock for itself; a shared one asked for here cannot keep it waiting.
    operation = fcntl.LOCK_SH if path.name == ".lock" else fcntl.LOCK_EX
    try:
        file = opened(path)
    except OSError:
        return False
    with file as handle:
        try:
            fcntl.flock(handle, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True  # a file system without locks
    return True


def files_in(folder: Path, *endings: str) -> list[Path]:
    """Return the regular files in a directory of the store; links are the user's and stay."""
    named = [path for path in _content(folder) if path.name.endswith(endings)]
    return [path for path in named if stat.S_ISREG(path.lstat().st_mode)]


def folders_in(folder: Path) -> list[Path]:
    """Return the directories in a directory of the store, but no links to any."""
    return [path for path in _content(folder) if path.is_dir() and not path.is_symlink()]


def _content(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
