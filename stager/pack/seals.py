"""The note that a bundle is the file that was written here, so that it is not read again."""

from __future__ import annotations

from pathlib import Path

from bundle.format.manifest import BLOCK, Manifest, padding
from bundle.protocol.digest import Digest

from ..core.regular_files import text_of
from ..core.store import Store, stamp


def size_of(manifest: Manifest) -> int:
    """Return the length in bytes of a bundle."""
    return sum(BLOCK + size + padding(size) for _, size in manifest.members()) + 2 * BLOCK


def is_sealed(store: Store, path: Path, size: int, key: Digest) -> bool:
    """Return whether a bundle is the file that was written, not changed since.

    Reading all of it again would take longer than the rest of a build in which nothing changed.
    """
    try:
        written = text_of(_seal(store, path))
        return path.stat().st_size == size and written == _stamp(path, key)
    except (OSError, UnicodeDecodeError):
        return False


def seal(store: Store, path: Path, key: Digest) -> None:
    """Note that a bundle is as it was written, all of it checked.

    Raises:
        StagerError: the note cannot be written.
    """
    with store.publishing(_seal(store, path)) as partial:
        partial.write_text(_stamp(path, key), encoding="utf-8")


def _seal(store: Store, path: Path) -> Path:
    return store.seals / f"{path.name}.txt"


def _stamp(path: Path, key: Digest) -> str:
    return " ".join(map(str, [*stamp(path.stat()), key])) + "\n"
