"""The note that a bundle is as it was written here, so that it is not read again.

Its first line is of the bundle's file; a thin bundle has one more for each file that it refers to.
"""

from __future__ import annotations

from pathlib import Path

from bundle.format.manifest import Manifest
from bundle.protocol.digest import Digest

from ..core.files import text_of
from ..core.store import Store, stamp


def is_sealed(store: Store, path: Path, manifest: Manifest) -> bool:
    """Return whether a bundle, and what it refers to, has not changed since it was written.

    Reading all of it again would take longer than the rest of a build in which nothing changed.
    """
    try:
        size = path.stat().st_size
        thin = size == manifest.thin_size
        lines = _lines(store, path, manifest, thin=thin)
        return (thin or size == manifest.size) and lines == text_of(_seal(store, path)).splitlines()
    except (OSError, UnicodeDecodeError):
        return False


def seal(store: Store, path: Path, manifest: Manifest, *, thin: bool = False) -> None:
    """Note that a bundle is as it was written; all of it, and all it refers to, was checked.

    Raises:
        StagerError: the note cannot be written.
    """
    with store.publishing(_seal(store, path)) as partial:
        text = "\n".join(_lines(store, path, manifest, thin=thin))
        partial.write_text(text + "\n", encoding="utf-8")


def checked_files(store: Store, manifest: Manifest) -> set[str]:
    """Return the files of a thin bundle that have not changed since some bundle was sealed."""
    known: set[str] = set()
    for path in store.seals.glob("*.txt"):
        try:
            known.update(text_of(path).splitlines()[1:])
        except (OSError, UnicodeDecodeError):
            continue
    files = zip(manifest.stored, _stored_lines(store, manifest), strict=True)
    return {member.file for member, line in files if line in known}


def _lines(store: Store, path: Path, manifest: Manifest, *, thin: bool) -> list[str]:
    own = _line(path, manifest.id)
    return [own, *(_stored_lines(store, manifest) if thin else ())]


def _stored_lines(store: Store, manifest: Manifest) -> list[str]:
    return [_line(store.layers / member.file, member.digest) for member in manifest.stored]


def _line(path: Path, key: Digest) -> str:
    try:
        return " ".join(map(str, [*stamp(path.stat()), key]))
    except FileNotFoundError:
        return "missing"


def _seal(store: Store, path: Path) -> Path:
    return store.seals / f"{path.name}.txt"
