"""Bundles that exist: opening one, taking the node program out, and a project's newest one."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bundle.archive import BundleFile
from bundle.manifest import Digest, Manifest
from bundle.problem import NodeError

from ..errors import BundleError
from ..store import Store, sha256_of

if TYPE_CHECKING:
    from ..layering.pruning import Pruned


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The bundle that the last build of a project made."""

    path: Path
    """The file."""
    inputs: Digest
    """Digest of everything it was made from."""


@contextmanager
def opened(path: Path) -> Iterator[BundleFile]:
    """A bundle, its frame and manifest checked.

    Raises:
        BundleError: it cannot be read, is damaged or cut short, or is no bundle; also when a part
            that is read inside the block turns out to be damaged.
    """
    try:
        with BundleFile(str(path)) as bundle:
            yield bundle
    except NodeError as exc:
        problem = exc.problem
        raise BundleError(
            f"{problem.where}: {problem.what}: {problem.why}", hint=problem.fix
        ) from exc


def manifest_of(path: Path) -> Manifest:
    """What is in a bundle.

    Raises:
        BundleError: see :func:`opened`.
    """
    with opened(path) as bundle:
        return bundle.manifest


def pruned(path: Path) -> Pruned:
    """What was left out of the wheels in a bundle.

    Raises:
        BundleError: see :func:`opened`.
    """
    from ..layering.pruning import noted

    with opened(path) as bundle:
        return noted(bundle)


def node_program(path: Path, store: Store) -> Path:
    """The far side's program out of a bundle, as a file that Python can run.

    Raises:
        BundleError: see :func:`opened`.
    """
    with opened(path) as bundle:
        part = bundle.manifest.node
        final = store.programs / f"{part.sha256}.pyz"
        if not final.exists() or sha256_of(final) != part.sha256:
            data = bundle.part(part)
            with store.publishing(final) as partial:
                partial.write_bytes(data)
    return final


def remember(store: Store, project: Path, newest: Newest) -> None:
    """Note which bundle is the newest one of a project.

    Args:
        store: where the note is kept.
        project: the project's settings file.
        newest: the bundle.
    """
    note = {"project": str(project), "bundle": newest.path.name, "inputs": newest.inputs}
    with store.publishing(_note(store, project)) as partial:
        partial.write_text(json.dumps(note) + "\n", encoding="utf-8")


def newest(store: Store, project: Path) -> Newest | None:
    """The bundle that the last build of a project made, if it is still there."""
    try:
        raw = json.loads(_note(store, project).read_text(encoding="utf-8"))
        found = Newest(path=store.bundles / raw["bundle"], inputs=Digest(raw["inputs"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.path.exists() else None


def is_named(store: Store, path: Path) -> bool:
    """Whether a bundle is the newest one of some project: two with the same content share it."""
    for note in store.projects.glob("*.json"):
        with suppress(OSError, ValueError, KeyError):
            if json.loads(note.read_text(encoding="utf-8"))["bundle"] == path.name:
                return True
    return False


def clear_away(path: Path) -> bool:
    """Remove a bundle that another one replaces, unless somebody has it open.

    Returns:
        Whether it is gone.
    """
    try:
        with path.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:
        return False
    return True


def _note(store: Store, project: Path) -> Path:
    return store.projects / f"{Digest.of(str(project.resolve()).encode())[:32]}.json"
