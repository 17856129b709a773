"""Existing bundles: opening them, extracting the node program, finding a project's newest one."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from bundle.format.archive import BundleFile
from bundle.format.manifest import (
    BLOCK,
    FORMAT,
    PART_LIMIT,
    FormatError,
    Manifest,
    ManifestError,
    parse,
)
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest
from bundle.protocol.problem import NodeError

from ..core.errors import BundleError, StagerError
from ..core.files import BUNDLE_SUFFIX, open_regular, read_text
from ..core.store import Store, digest_file, to_stamp

_SHOWN = "`stager verify --bundle FILE` (or `stager inspect FILE`) shows the id of a bundle"
LABEL_NAME = "carried.json"  # the first member of a file that ``stager export`` has written
LOCK_SUFFIX = ".pylock.toml"  # see :func:`find_imported_lock`
FOR_BUILDS_SUFFIX = ".for-builds"  # see :func:`is_for_builds`
_NAMED = re.compile(rf"-([0-9a-f]{{12}}){re.escape(BUNDLE_SUFFIX)}")


@dataclass(frozen=True, kw_only=True)
class ChosenBundle:
    """A bundle to use."""

    path: Path
    id: str = ""  # the id it must have, or the first digits of it; empty if only its name gives one


def is_made_here(store: Store, path: Path, key: str) -> bool:
    """Return whether a build of this store has made the bundle of this id."""
    with suppress(OSError, UnicodeDecodeError):
        sealed = read_text(_find_seal(store.root, path))
        return sealed.partition("\n")[0].split()[-1:] == [key]
    return False


class Newest(NamedTuple):
    """The bundle that the last build of a project made."""

    settings: Path  # the project's settings file
    path: Path
    id: Digest
    inputs: Digest  # digest of everything it was made from


@contextmanager
def open_bundle(path: Path, asked: str = "") -> Iterator[BundleFile]:
    """Open a bundle, its id compared with ``asked`` and its name; damage is a BundleError."""
    try:
        with BundleFile(str(path)) as bundle:
            _refuse_another(path, bundle.manifest.id, asked)
            yield bundle
    except NodeError as exc:
        _refuse_carried(path)
        problem = exc.problem
        raise BundleError(
            f"{problem.where}: {problem.what}: {problem.why}", hint=problem.fix
        ) from exc


def _refuse_carried(path: Path) -> None:
    mark = LABEL_NAME.encode() + b"\0"
    with suppress(OSError), open_regular(path) as handle:
        if handle.read(len(mark)) == mark:
            raise BundleError(
                f"{path}, which `stager export` wrote, carries a bundle, and is none itself",
                hint=f"take the bundle out of it, and use that: stager import {path}",
            )


def _refuse_another(path: Path, actual: Digest, asked: str) -> None:
    named = _NAMED.search(path.name)
    if not actual.startswith(asked):
        raise BundleError(
            f"{path} is not the bundle that was asked for: its id is {actual}, expected {asked}",
            hint=f"{_SHOWN}; name the right file with --bundle, or copy it again",
        )
    if named and not actual.startswith(named[1]):
        raise BundleError(
            f"{path} does not hold the bundle that it is named after: its id is {actual}",
            hint="another file was copied over it: build it again, or name it after its id",
        )


def find_by_id(store: Store, asked: str) -> ChosenBundle:
    """Find the bundle of an id, or of 12 or more of its first digits, in the store."""
    paths = sorted((store.root / "bundles").glob(f"*-{asked[:12]}{BUNDLE_SUFFIX}"))
    if len(paths) != 1:
        raise BundleError(
            f"{'more than one' if paths else 'no'} bundle in {store.root} has the id {asked}",
            hint=f"name the file with --bundle, for example one that was copied here; {_SHOWN}",
            context=list(map(str, paths)),
        )
    return ChosenBundle(path=paths[0], id=asked)


def read_manifest(path: Path, asked: str = "") -> Manifest:
    """Return the manifest of a bundle."""
    with open_bundle(path, asked) as bundle:
        return bundle.manifest


def layer_paths(bundle: BundleFile, kind: str) -> Iterator[str]:
    """Yield the files and links of the layers of a kind, by their paths in the environment."""
    from ..layers.layer_file import decompress_index

    for layer in bundle.manifest.layers:
        if layer.kind == kind:
            index = bundle.index(layer, bundle.head(layer), decompress_index)
            yield from (file.path for file in index.files)
            yield from (link.path for link in index.links)


def read_stated_manifest(path: Path) -> Manifest:
    """Return the manifest that a file begins with; ManifestError for none, OSError."""
    with open_regular(path) as handle:
        header = handle.read(BLOCK)
        try:
            size = int(header[124:135], 8)
        except ValueError:
            raise ManifestError("it does not begin with a manifest") from None
        return parse(handle.read(min(max(0, size), PART_LIMIT)))


def read_format(path: Path) -> int:
    """Return the version of a bundle's layout, this program's own if it is none; OSError."""
    try:
        return read_stated_manifest(path).format
    except FormatError as exc:
        return exc.found if isinstance(exc.found, int) else FORMAT
    except ManifestError:
        return FORMAT


def node_program(path: Path, store: Store, asked: str = "") -> Path:
    """Return the far side's program from a bundle, as a file that Python can run."""
    with open_bundle(path, asked) as bundle:
        part = bundle.manifest.node
        final = store.programs / f"{part.sha256}.pyz"
        if not final.is_file() or digest_file(final) != part.sha256:
            data = bundle.read_part(part)
            with store.publish(final) as partial:
                partial.write_bytes(data)
    return final


def remember(store: Store, newest: Newest) -> None:
    """Record the newest bundle of a project."""
    note: dict[str, str | None] = {"project": str(newest.settings), "bundle": newest.path.name}
    note |= {"id": newest.id, "inputs": newest.inputs}
    with store.publish(_note(store, newest.settings)) as partial:
        partial.write_text(json.dumps(note) + "\n", encoding="utf-8")


def find_imported_lock(bundle: Path) -> Path:
    """Return the path of the lock that an imported bundle has beside it; others have none there."""
    return bundle.with_name(bundle.name.removesuffix(BUNDLE_SUFFIX) + LOCK_SUFFIX)


def allow_for_builds(store: Store, bundle: Path, key: str) -> None:
    """Record that builds may take packages out of an imported bundle: its user says so."""
    with store.publish(_find_builds_note(store, bundle)) as partial:
        partial.write_text(f"{key}\n", encoding="utf-8")


def is_for_builds(store: Store, bundle: Path, key: str) -> bool:
    """Return whether builds may take packages out: it was built here, or its user has said so."""
    if is_made_here(store, bundle, key) and not find_imported_lock(bundle).exists():
        return True
    with suppress(OSError, UnicodeDecodeError):
        return read_text(_find_builds_note(store, bundle)).strip() == key
    return False


def _find_builds_note(store: Store, bundle: Path) -> Path:
    return store.root / "imports" / f"{bundle.name}{FOR_BUILDS_SUFFIX}"


def remember_import(store: Store, name: str, bundle: Path) -> None:
    """Record the bundle of a project that was imported last, so that it is kept."""
    with store.publish(store.imports / f"{name}.txt") as partial:
        partial.write_text(bundle.name + "\n", encoding="utf-8")


def list_imported(store: Store) -> list[tuple[str, str]]:
    """Return the projects whose bundle was imported, each with the first digits of its id."""
    bundles = []
    for note in sorted((store.root / "imports").glob("*.txt")):  # no folder is made by a look
        with suppress(OSError, UnicodeDecodeError):
            name = read_text(note).strip()
            named = _NAMED.search(name)
            if named and (store.root / "bundles" / name).is_file():
                bundles.append((note.stem, named[1]))
    return bundles


def read_note(path: Path) -> Newest | None:
    """Read the record of a project's newest bundle; None if it makes no sense; OSError."""
    bundles = path.parents[1] / "bundles"
    with suppress(ValueError):
        match json.loads(read_text(path)):
            case {"project": str(project), "bundle": str(name), "id": str(key), "inputs": inputs}:
                return Newest(Path(project), bundles / name, Digest(key), Digest(inputs))
    return None


def find_newest(store: Store, project: Path) -> Newest | None:
    """Return the bundle that the last build of a project made, if it is still there."""
    with suppress(OSError):
        newest = read_note(_note(store, project))
        if newest is not None and newest.path.exists():
            return newest
    return None


def is_named(store: Store, path: Path) -> bool:
    """Return whether a bundle is the newest of some project; equal projects share a bundle."""
    for file in store.projects.glob("*.json"):
        with suppress(OSError):
            newest = read_note(file)
            if newest is not None and newest.path.name == path.name:
                return True
    return False


def clear_away(path: Path) -> bool:
    """Remove a bundle that another one replaces, unless it is open; return whether it is gone."""
    try:
        with open_regular(path) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:
        return False
    with suppress(OSError):
        _find_seal(path.parents[1], path).unlink()
    return True


def _find_seal(root: Path, bundle: Path) -> Path:
    return root / "seals" / f"{bundle.name}.txt"


def _note(store: Store, project: Path) -> Path:
    return store.projects / f"{Digest.of(str(project.resolve()).encode())[:32]}.json"


# --- The note that a bundle is as it was written here: a line for it, and for each external file -


def is_sealed(store: Store, path: Path, manifest: Manifest) -> bool:
    """Return whether a bundle, and what it refers to, has not changed since it was written."""
    with suppress(OSError, UnicodeDecodeError):
        size = path.stat().st_size
        thin = size == manifest.thin_size
        # In this store: who owns another folder decides what lies beside its bundles.
        sealed = read_text(_find_seal(store.root, path)).splitlines()
        lines = _lines(store, path, manifest, thin=thin)
        return (thin or size == manifest.size) and lines == sealed
    return False


def seal(store: Store, path: Path, manifest: Manifest, *, thin: bool = False) -> None:
    """Note that a bundle is as it was written; all of it, and all it refers to, was checked."""
    text = "\n".join(_lines(store, path, manifest, thin=thin))
    with store.publish(store.seals / _find_seal(store.root, path).name) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def list_checked_files(store: Store, manifest: Manifest) -> set[str]:
    """Return the files of a thin bundle that have not changed since some bundle was sealed."""
    known: set[str] = set()
    for path in store.seals.glob("*.txt"):
        with suppress(OSError, UnicodeDecodeError):
            known.update(read_text(path).splitlines()[1:])
    files = zip(manifest.external_members, _list_stored_lines(store, manifest), strict=True)
    return {member.file for member, line in files if line in known}


def _lines(store: Store, path: Path, manifest: Manifest, *, thin: bool) -> list[str]:
    own = _line(path, manifest.id)
    return [own, *(_list_stored_lines(store, manifest) if thin else ())]


def _list_stored_lines(store: Store, manifest: Manifest) -> list[str]:
    return [
        _line(store.layers / member.file, member.digest) for member in manifest.external_members
    ]


def _line(path: Path, key: Digest) -> str:
    try:
        return " ".join(map(str, [*to_stamp(path.stat()), key]))
    except OSError:  # also a link to itself, which whoever reads the file refuses
        return "missing"


# --- Marks of bundles that a batch script names, which stay until the script is of no use any more

# No rebuild and no ``clean`` removes such a bundle. A mark is an empty file beside it:
# ``NAME.pkgs.tar.script`` for a printed script, and for a failed rank that may be run again;
# ``NAME.pkgs.tar.job-4711`` for a job, until its end has been seen.

DAYS = 30  # for which a mark counts: no more is known of a lost job
_SECONDS = DAYS * 86400.0
_OF_SCRIPT = ".script"
_OF_JOB = ".job-"


def mark(store: Store, bundle: Path, job_id: str = "") -> bool:
    """Mark a bundle for a script (no job id: one that was printed); return whether it stays."""
    if bundle.parent != store.root / "bundles":
        return True
    with suppress(StagerError, OSError), store.publish(_mark(bundle, job_id)) as partial:
        partial.touch()
        return True
    return False


def unmark(bundle: Path, job_id: str) -> None:
    """Remove the mark of a job that is over."""
    with suppress(OSError):
        _mark(bundle, job_id).unlink()


def is_marked(bundle: Path, now: float, *, by_jobs: bool = False) -> bool:
    """Return whether a batch script names a bundle; ``by_jobs`` ignores printed scripts."""
    for path in list_marks(bundle.parent, bundle.name, by_jobs=by_jobs):
        with suppress(OSError):  # it was removed just now
            if now - path.stat().st_mtime < _SECONDS:
                return True
    return False


def list_marked(store: Store, now: float, *, by_jobs: bool = False) -> list[Path]:
    """Return the bundles that batch scripts name; see :func:`is_marked`."""
    bundles = sorted((store.root / "bundles").glob(f"*{BUNDLE_SUFFIX}"))
    return [path for path in bundles if is_marked(path, now, by_jobs=by_jobs)]


def list_marks(
    folder: Path, bundle: str = f"*{BUNDLE_SUFFIX}", *, by_jobs: bool = False
) -> Iterator[Path]:
    """Yield the marks in a directory with bundles, by default those of all."""
    for ending in (f"{_OF_JOB}*",) if by_jobs else (_OF_SCRIPT, f"{_OF_JOB}*"):
        yield from folder.glob(f"{bundle}{ending}")


def _mark(bundle: Path, job_id: str) -> Path:
    return bundle.with_name(bundle.name + (f"{_OF_JOB}{job_id}" if job_id else _OF_SCRIPT))
