"""Removing from the offline root what no project needs any more, and never what is in use.

A project counts as long as its folder is there. Its newest bundle stays, with the layers and the
node program of every bundle that stays; so do the layers and wheels that its locks name, found by
their digests. Whatever was read or written within a day stays too: it may belong to a lock or a
bundle that is still being made. Bundles and layers that this version cannot use, as their format is
an older one, are needed by nobody. What goes can be made again: layers from wheels, at the cost of
time; wheels only with a network, so they go on request alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from bundle.format.manifest import Manifest
from bundle.protocol.digest import Digest

from ..core.deletion import size_of
from ..core.digest_cache import DigestCache
from ..core.errors import BundleError, StagerError
from ..core.regular_files import text_of
from ..core.store import Store
from ..pack import existing
from ..pack.decompressor import PINNED
from .files import content_of, files_in, folders_in, is_outdated, nobody_has_open

UNUSED_SECONDS = 86400.0
"""What was read or written more recently than this stays."""
LOCKS = "pylock*.toml"
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
_BUNDLE = ".pkgs.tar"
_LAYER = ".tar.zst"
_DISTRIBUTIONS = (".whl", ".tar.gz", ".zip")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is to go."""

    keep_newest: bool = True
    """Whether each project's newest bundle stays; one that is in use does in any case."""
    wheels: bool = False
    """Whether wheels go that no lock names."""
    projects: tuple[Path, ...] = ()
    """Folders whose locks count although nothing may have been built there."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing that can go."""

    kind: str
    """``bundle``, ``layer``, ``wheel``, ``program``, ``seal``, ``note`` or ``partial``."""
    path: Path
    """Where it lies."""
    size: int
    """Bytes that become free."""
    why: str
    """Why nobody needs it."""

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {**asdict(self), "path": str(self.path)}


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What became of a plan."""

    removed: tuple[Item, ...]
    """What is gone."""
    left: tuple[tuple[Item, str], ...]
    """What could not be removed, and why."""

    @property
    def freed(self) -> int:
        """Bytes that became free."""
        return sum(item.size for item in self.removed)


def nodes_keep(newest: Digest | None, named: Iterable[Digest], *, everything: bool) -> list[Digest]:
    """The bundles whose environments stay on the nodes.

    Args:
        newest: the project's newest bundle, if it has one.
        named: further bundles that the user wants to keep.
        everything: whether every environment goes (``--all``), but for those in use and ``named``.
    """
    first = [newest] if newest and not everything else []
    return list(dict.fromkeys([*first, *named]))


def plan(store: Store, rules: Rules, now: float) -> tuple[Item, ...]:
    """What can go from the offline root. Nothing is changed, and nothing made where it is missing.

    Args:
        store: the offline root.
        rules: what is to go.
        now: seconds since the epoch.

    Raises:
        StagerError: a lock that decides on wheels, or a directory, cannot be read.
    """
    try:
        return tuple(_Planning(store, rules, now).all())
    except OSError as exc:
        raise StagerError(
            f"{exc.filename or store.root}: {exc.strerror or exc}",
            hint="make it readable; without it nobody knows what is needed, so nothing is removed",
        ) from exc


def apply(
    store: Store, rules: Rules, now: float, waiting: Callable[[], None] = lambda: None
) -> Swept:
    """Remove what can go; decided anew once no build is under way.

    Args:
        store: the offline root.
        rules: what is to go.
        now: seconds since the epoch.
        waiting: called once if a build holds the store.

    Raises:
        StagerError: see :func:`plan`; or the store cannot be written.
    """
    removed: list[Item] = []
    left: list[tuple[Item, str]] = []
    if not store.root.is_dir():
        return Swept(removed=(), left=())
    partial = _partial(store.root)
    with store.lock(waiting):  # which sweeps the partial files
        for item in [*partial, *plan(store, rules, now)]:
            why = _remove(item)
            if why:
                left.append((item, why))
            else:
                removed.append(item)
    return Swept(removed=tuple(removed), left=tuple(left))


class _Planning:
    """One look at the store: what is needed, and then what is not."""

    def __init__(self, store: Store, rules: Rules, now: float) -> None:
        self.root = store.root
        self.rules = rules
        self.now = now
        self.notes = {path: _project(path) for path in files_in(self.root / "projects", ".json")}
        self.alive = {
            path: told for path, told in self.notes.items() if told and _is_there(told[0])
        }

    def all(self) -> Iterator[Item]:
        """Everything that can go: bundles first, for what they need goes with them."""
        yield from self._old_notes()
        there = files_in(self.root / "bundles", _BUNDLE)
        gone = {path: why for path in there if (why := self._why_bundle(path))}
        yield from (self._item("bundle", path, why) for path, why in gone.items())
        staying = [path for path in there if path not in gone]
        manifests = [found for path in staying if (found := _manifest(path))]
        for path in files_in(self.root / "seals", f"{_BUNDLE}.txt"):
            if path.name.removesuffix(".txt") not in {one.name for one in staying}:
                yield self._item("seal", path, "its bundle is gone")
        locked = self._locked()
        yield from self._layers(manifests, locked)
        programs = {one.node.sha256 for one in manifests}
        for path in self._unused("programs", ".pyz"):
            if path.stem.partition(".")[0] not in programs:
                yield self._item("program", path, "no bundle holds it, and it has not been used")
        if self.rules.wheels:
            yield from self._wheels(locked)
        yield from _partial(self.root)

    def _old_notes(self) -> Iterator[Item]:
        for path, told in self.notes.items():
            if told is None:
                yield self._item("note", path, "it cannot be understood")
            elif path not in self.alive:
                yield self._item("note", path, f"{told[0].parent} is gone")

    def _why_bundle(self, path: Path) -> str:
        """Why a bundle can go; empty where it stays."""
        if not nobody_has_open(path):
            return ""
        if is_outdated(path):
            return "it was made by an older version of stager, and cannot be used"
        if self.rules.keep_newest and any(told[1] == path.name for told in self._told()):
            return ""
        return "it is no project's newest" if self.rules.keep_newest else "it is not in use"

    def _told(self) -> list[tuple[Path, str]]:
        return [told for told in self.alive.values() if told]

    def _locked(self) -> set[str]:
        """Every digest that a lock names, of this project, another one, or the tool itself."""
        pinned = resources.files("stager.pack") / PINNED
        found = set(_DIGEST.findall(pinned.read_text(encoding="utf-8")))
        for folder in {*(told[0].parent for told in self._told()), *self.rules.projects}:
            try:
                for path in filter(lambda one: one.match(LOCKS), folder.iterdir()):
                    found |= set(_DIGEST.findall(path.read_text("utf-8", "replace")))
            except FileNotFoundError:
                continue
            except OSError:
                if self.rules.wheels:  # a layer can be made again, a wheel perhaps not
                    raise
        return found

    def _layers(self, manifests: Sequence[Manifest], locked: Collection[str]) -> Iterator[Item]:
        needed = {layer.id for one in manifests for layer in one.layers}
        for path in self._unused("layers", _LAYER):
            key = path.name.removesuffix(_LAYER)
            if key in needed:
                continue
            content = content_of(path, key)
            if content is None:
                yield self._item("layer", path, "this version of stager cannot use it")
            elif content not in locked:
                yield self._item("layer", path, "no bundle or lock needs it")

    def _wheels(self, locked: Collection[str]) -> Iterator[Item]:
        """Wheels and sdists, and those built here, which lie below their source's digest."""
        digest_cache = DigestCache(Store(self.root))
        found = [(path, "") for path in files_in(self.root / "wheels", *_DISTRIBUTIONS)]
        for folder in folders_in(self.root / "wheels-built"):
            found += [(path, folder.name) for path in files_in(folder, ".whl")]
        for path, source in found:
            # When it came, not when it was read: to know its digest it may have to be read here.
            arrived = path.lstat().st_mtime
            if arrived > self.now - UNUSED_SECONDS or source in locked:
                continue
            if digest_cache.digest(path) not in locked:
                yield self._item("wheel", path, "no lock names it")

    def _unused(self, folder: str, ending: str) -> list[Path]:
        """Files not used within a day, as far as the file system tells."""
        found = [(path, path.lstat()) for path in files_in(self.root / folder, ending)]
        limit = self.now - UNUSED_SECONDS
        return [path for path, status in found if max(status.st_mtime, status.st_atime) <= limit]

    def _item(self, kind: str, path: Path, why: str) -> Item:
        return Item(kind=kind, path=path, size=size_of(path), why=why)


def _project(note: Path) -> tuple[Path, str] | None:
    """The settings file and the newest bundle's name; None where the note makes no sense."""
    try:
        raw = json.loads(text_of(note))
        return Path(raw["project"]), str(raw["bundle"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_there(settings: Path) -> bool:
    """Whether a project's folder is there; where nobody can tell, it is."""
    try:
        settings.parent.lstat()
    except OSError as exc:
        return not isinstance(exc, FileNotFoundError | NotADirectoryError)
    return True


def _manifest(path: Path) -> Manifest | None:
    """What is in a bundle; None where it is damaged, and so of no use."""
    try:
        return existing.manifest_of(path)
    except BundleError:
        return None


def _partial(root: Path) -> list[Item]:
    """What killed builds left; nothing while one is under way, for it may be that one's."""
    busy = any(not nobody_has_open(root / n) for n in (".lock", ".tmp.lock") if (root / n).exists())
    if busy or not (root / "tmp").is_dir():
        return []
    return [
        Item(kind="partial", path=path, size=size_of(path), why="a build that was killed left it")
        for path in sorted((root / "tmp").iterdir())
    ]


def _remove(item: Item) -> str:
    """Remove something; says why where it is still there."""
    if item.kind == "partial":
        return "it is in use" if item.path.exists() else ""
    if item.kind == "bundle":
        return "" if existing.clear_away(item.path) else "it is in use, or cannot be removed"
    try:
        item.path.unlink(missing_ok=True)
        note = item.path.with_name(f"{item.path.name}.sha256")
        if item.kind == "wheel" and item.path.parents[1].name == "wheels-built":
            note.unlink(missing_ok=True)
            item.path.parent.rmdir()
    except OSError as exc:
        if item.path.exists():
            return exc.strerror or str(exc)
    return ""
