"""Files of the offline root as ``clean`` sees them: what they are, who uses them, their size."""

from __future__ import annotations

import fcntl
import stat
from pathlib import Path

from bundle.format.layer import HEAD_PREFIX, INDEX_FORMAT, LayerError, origin_of
from bundle.format.layer_origin import ORIGIN_LIMIT
from bundle.format.manifest import FORMAT

from ..core.regular_files import opened
from ..layers.layer_file import compression
from ..pack.existing import format_of


def content_of(layer: Path, key: str) -> str | None:
    """Return the digest of the wheel or tree that a layer was made from.

    None where no build would use it again: its format or compression is another version's, or it
    is not what its name says. Empty for a wheel's layer that leaves something out: it is needed by
    the bundles that name it, and not by a lock.
    """
    with opened(layer) as handle:
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
    """Tell whether a bundle is of a format that only older versions of stager can read."""
    return format_of(bundle) < FORMAT


def nobody_has_open(path: Path) -> bool:
    """Whether no job and no command has a file of the store open, or a lock of it taken."""
    # A build asks for this one alone; shared, the question cannot keep it waiting.
    operation = fcntl.LOCK_SH if path.name == ".lock" else fcntl.LOCK_EX
    with opened(path) as handle:
        try:
            fcntl.flock(handle, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True  # a file system without locks
    return True


def files_in(folder: Path, *endings: str) -> list[Path]:
    """Regular files in a directory of the store; links are somebody's own and stay."""
    try:
        found = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    named = [path for path in found if path.name.endswith(endings)]
    return [path for path in named if stat.S_ISREG(path.lstat().st_mode)]


def folders_in(folder: Path) -> list[Path]:
    """Return the directories in a directory of the store; links to some are none."""
    try:
        return [
            path for path in sorted(folder.iterdir()) if not path.is_symlink() and path.is_dir()
        ]
    except FileNotFoundError:
        return []
