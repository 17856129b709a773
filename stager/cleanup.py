"""Removal from the offline root of what no project needs, and never of what is in use."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field, replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from bundle.driver.code_store import (
    compute_software_digest,
    list_stored_code,
    remove_stored_code,
)
from bundle.format.layer import HEAD_PREFIX, INDEX_FORMAT, ORIGIN_LIMIT, LayerError, read_origin
from bundle.format.manifest import FORMAT, Manifest, ManifestError
from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest
from bundle.protocol.messages import CleanAnswer, NodeCleanup, UnpackAnswer
from bundle.system.hostlist import fold_hosts

from .config.job_settings import JobOptions
from .core.errors import StagerError
from .core.files import BUNDLE_SUFFIX, open_regular, read_bytes
from .core.store import DigestCache, Store, measure_tree, remove
from .hub.client import is_the_users
from .jobs.outcome import Outcome
from .layers.layer_file import describe_compression
from .logs.job_record import parse_event
from .pack import bundle_file
from .pack.bundle_file import Newest, is_marked, list_marks
from .pack.decompressor import PINNED
from .slurm.request import PartitionNode
from .trust import SUFFIX

# --- The files of the offline root as ``clean`` sees them: their kind, their content, their users


@dataclass(frozen=True, kw_only=True)
class CleanedItem:
    """Something that was removed, or would be."""

    place: str  # the node, or ``offline root``
    path: Path
    bytes: int
    kind: str
    """``environment``; in the offline root ``bundle``, ``layer``, ``wheel``, ``hub``, ``program``,
    ``code``, ``seal``, ``lock``, ``signature``, ``note`` or ``partial``."""
    why: str


def _item(kind: str, path: Path, why: str) -> CleanedItem:
    size = measure_tree(path)
    return CleanedItem(place="offline root", path=path, bytes=size, kind=kind, why=why)


def _read_layer_content(layer: Path) -> str | None:
    """Return the digest of what a layer was made from; None where no build would use it again.

    Empty for a wheel's layer that leaves something out, and for the decompressor: no lock names it.
    """
    if layer.suffix == ".whl":
        return ""
    with open_regular(layer, unnoticed=True) as handle:  # to look at it is not to use it
        try:
            origin = read_origin(handle.read(HEAD_PREFIX + ORIGIN_LIMIT))
        except LayerError:
            return None
    current = {"format": INDEX_FORMAT, "compression": describe_compression()}
    if f"{origin.id}{_LAYER}" != layer.name or not current.items() <= origin.options.items():
        return None
    return "" if "prune" in origin.options else origin.content


def _is_unused(path: Path) -> bool:
    # A build takes this lock for itself; a shared one asked for here cannot keep it waiting.
    operation = fcntl.LOCK_SH if path.name == ".lock" else fcntl.LOCK_EX
    is_open = False
    try:
        with open_regular(path) as file:
            is_open = True
            fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a directory in its place, or a file system without locks
        return is_open
    return True


def _list_files(folder: Path, *endings: str) -> list[Path]:
    """Return the regular files in a directory of the store; links are the user's and stay."""
    named = [path for path in _list_content(folder) if path.name.endswith(endings)]
    return [path for path in named if stat.S_ISREG(path.lstat().st_mode)]


def _list_content(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def _remove_hub_file(path: Path) -> bool:
    remove(path.parent / ".locks" / path.name)
    return remove(path)


def _get_last_use(path: Path) -> float:
    """Return when a file, or one of a tree, was read or written, as far as that is recorded."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return max(status.st_mtime, status.st_atime)
    return max((status.st_mtime, *map(_get_last_use, path.iterdir())))


# --- Removal from the offline root of what no project needs any more, and never of what is in use

# A project counts as long as its folder is there. Its newest bundle stays, and one that a batch
# script names, in any case that of a job that waits or runs. In a store that several users share, a
# bundle is removed by its owner, by the owner of the store, or by root. With a bundle stay its
# layers and node program, and the layers and wheels that its locks name, found by their digests.
# Whatever was read or written within a day stays: it may belong to a lock or a bundle that is being
# made. Bundles and layers of an older format are needed by nobody. Wheels can be made again only
# with a network, so they are removed on request alone. Files of a hub that are in no bundle yet
# (a build removes all of them once it has their layers) stay, as a whole repository, as long as a
# lock names a commit of it.

_HUB_FILES = ("models--", "datasets--", "spaces--", "own-")  # the last are a build's for its layers
UNUSED_SECONDS = 86400.0  # files read or written more recently than this stay
LOCKS = "pylock*.toml"
_DIGEST = re.compile(r"\b(?:[0-9a-f]{64}|[0-9a-f]{40})\b")  # a file's sha256, or a commit
_LAYER = ".tar.zst"
_DISTRIBUTIONS = (".whl", ".tar.gz", ".zip")


class Rules(NamedTuple):
    """Rules of a removal."""

    keep_newest: bool = True  # each project's newest bundle; one that is in use stays in any case
    wheels: bool = False
    projects: tuple[Path, ...] = ()  # whose locks count although nothing may have been built there


class StoreCleanup(NamedTuple):
    """What an applied plan removed, and what it could not."""

    removed: list[CleanedItem]
    left: list[tuple[CleanedItem, str]]  # what could not be removed, and why


def list_kept_environments(store: Store, used: Digest, *, everything: bool) -> list[Digest]:
    """Return the bundles whose environments stay on the nodes: each project's newest."""
    if everything:
        return []
    try:
        notes = [*map(bundle_file.read_note, _list_files(store.root / "projects", ".json"))]
    except OSError as exc:
        raise _make_unreadable_error(store, exc) from exc
    others = [note.id for note in notes if note and note.id and _is_there(note.settings)]
    return list(dict.fromkeys([used, *others]))


def plan(store: Store, rules: Rules, now: float) -> list[CleanedItem]:
    """Return what can be removed from the offline root; change nothing."""
    try:
        return list(_Plan(store, rules, now).items())
    except OSError as exc:
        raise _make_unreadable_error(store, exc) from exc


def _make_unreadable_error(store: Store, exc: OSError) -> StagerError:
    return StagerError(
        f"{exc.filename or store.root}: {exc.strerror or exc}",
        hint="make it readable; without it stager cannot tell what is needed, so nothing is "
        "removed",
    )


def apply(
    store: Store, rules: Rules, now: float, waiting: Callable[[], None] = lambda: None
) -> StoreCleanup:
    """Remove what can be removed, as a new plan says once no build is under way."""
    done = StoreCleanup([], [])
    if not store.root.is_dir():
        return done
    partial = _list_partial_files(store.root)
    with store.lock(waiting):  # which removes the partial files
        for item in [*partial, *plan(store, rules, now)]:
            if item.kind == "layer" and any(other.kind == "bundle" for other, _ in done.left):
                # One that was opened just now.
                done.left.append((item, "a bundle that stays may need it"))
            elif _REMOVALS.get(item.kind, _remove_file)(item.path):
                done.removed.append(item)
            else:
                done.left.append((item, "it is in use, or not all of it can be removed"))
    return done


class _Plan:
    def __init__(self, store: Store, rules: Rules, now: float) -> None:
        self.store, self.rules = store, rules
        owner = store.root.stat().st_uid if store.root.is_dir() else 0
        self.may_remove_all = os.geteuid() in (0, owner)
        """False in a store that another user shares: others' bundles stay."""
        self.now, self.limit = now, now - UNUSED_SECONDS
        self.is_lock_unread = False
        self.useless_notes: list[tuple[Path, str]] = []
        self.alive: list[Newest] = []
        for path in self._files("projects", ".json"):
            note = bundle_file.read_note(path)
            if note is None:
                self.useless_notes.append((path, "it cannot be read"))
            elif _is_there(note.settings):
                self.alive.append(note)
            else:
                self.useless_notes.append((path, f"{note.settings.parent} is gone"))
        notes = self._files("imports", ".txt")
        imported = {read_bytes(path).decode(errors="replace").strip() for path in notes}
        self.newest = imported | {note.path.name for note in self.alive}
        """The file names of the bundles that stay: each project's newest, built or imported."""

    def items(self) -> Iterator[CleanedItem]:
        """Yield everything that can be removed: bundles first, as others need no more then."""
        for path, why in self.useless_notes:
            yield _item("note", path, why)
        staying: list[Path] = []
        for path in self._files("bundles", BUNDLE_SUFFIX):
            why = self._explain_removal(path)
            if why:
                yield _item("bundle", path, why)
            else:
                staying.append(path)
        yield from self._find_orphans({path.name for path in staying})
        manifests, newer = _read_manifests(staying)
        locked = self._collect_locked_digests()
        if not newer:
            yield from self._list_layers(manifests, locked)
            yield from self._list_programs(manifests)
            yield from self._list_compiled_code(manifests)
        if self.rules.wheels:
            yield from self._list_wheels(locked)
        if not self.is_lock_unread:
            yield from self._list_hub_files(locked)
        yield from _list_partial_files(self.store.root)

    def _explain_removal(self, path: Path) -> str:
        is_others = not self.may_remove_all and path.lstat().st_uid != os.geteuid()
        is_needed = is_marked(path, self.now, by_jobs=not self.rules.keep_newest)
        if is_others or is_needed or not _is_unused(path):
            return ""
        if bundle_file.read_format(path) < FORMAT:
            return "it was made by an older version of stager, and cannot be used"
        if not self.rules.keep_newest:
            return "it is not in use"
        return "" if path.name in self.newest else "it is not a project's newest bundle"

    def _find_orphans(self, bundles: Collection[str]) -> Iterator[CleanedItem]:
        beside = [
            ("seal", self._files("seals", f"{BUNDLE_SUFFIX}.txt")),
            ("lock", self._files("bundles", bundle_file.LOCK_SUFFIX)),
            ("signature", self._files("bundles", BUNDLE_SUFFIX + SUFFIX)),
            ("note", self._files("imports", BUNDLE_SUFFIX + bundle_file.FOR_BUILDS_SUFFIX)),
            ("note", list_marks(self.store.root / "bundles")),
        ]
        for kind, paths in beside:
            for path in paths:
                stem = path.name.removesuffix(bundle_file.LOCK_SUFFIX).rsplit(BUNDLE_SUFFIX, 1)[0]
                if f"{stem}{BUNDLE_SUFFIX}" not in bundles:
                    yield _item(kind, path, "its bundle is gone")

    def _collect_locked_digests(self) -> set[str]:
        texts = [(resources.files("stager.pack") / PINNED).read_text(encoding="utf-8")]
        for folder in {*(note.settings.parent for note in self.alive), *self.rules.projects}:
            try:
                locks = [path for path in folder.iterdir() if path.match(LOCKS)]
                texts += [path.read_text("utf-8", "replace") for path in locks]
            except FileNotFoundError:
                continue
            except OSError:
                if self.rules.wheels:  # a layer can be made again, a wheel perhaps not
                    raise
                self.is_lock_unread = True
        return set(_DIGEST.findall("\n".join(texts)))

    def _list_layers(
        self, manifests: Sequence[Manifest], locked: Collection[str]
    ) -> Iterator[CleanedItem]:
        needed = {member.file for manifest in manifests for member in manifest.external_members}
        for path in filter(self._is_old, self._files("layers", _LAYER, ".whl")):
            content = "" if path.name in needed else _read_layer_content(path)
            if content is None:
                yield _item("layer", path, "this version of stager cannot use it")
            elif content not in locked and path.name not in needed:
                yield _item("layer", path, "no bundle or lock needs it")

    def _list_programs(self, manifests: Sequence[Manifest]) -> Iterator[CleanedItem]:
        needed = {manifest.node.sha256 for manifest in manifests}
        for path in filter(self._is_old, self._files("programs", ".pyz")):
            if path.stem.partition(".")[0] not in needed:
                yield _item("program", path, "no bundle holds it, and it has not been used")

    def _list_compiled_code(self, manifests: Sequence[Manifest]) -> Iterator[CleanedItem]:
        used = {compute_software_digest(manifest) for manifest in manifests}
        for code in list_stored_code(str(self.store.compiled_code)):
            why = f"no bundle has its version of torch (job {code.job_id})"
            if code.software not in used and self._is_old(Path(code.path)):
                yield _item("code", Path(code.path), why)

    def _list_hub_files(self, commits: Collection[str]) -> Iterator[CleanedItem]:
        hub = self.store.hub
        if hub.is_symlink() or is_the_users(hub, os.environ):
            return
        for path in _list_content(hub):
            is_ours = path.name.startswith(_HUB_FILES) and not path.is_symlink()
            snapshots = _list_content(path / "snapshots")
            is_named = any(snapshot.name in commits for snapshot in snapshots)
            if is_ours and not is_named and self._is_old(path):
                yield _item("hub", path, "no lock names it" if snapshots else "a build left it")

    def _list_wheels(self, locked: Collection[str]) -> Iterator[CleanedItem]:
        cache = DigestCache(self.store)
        wheels = self._files("wheels", *_DISTRIBUTIONS)
        for folder in _list_content(self.store.root / "wheels-built"):
            is_own = folder.is_dir() and not folder.is_symlink()
            if is_own and folder.name.partition(".")[0] not in locked:  # the digest of the sdist
                wheels += _list_files(folder, ".whl")
        for path in wheels:
            # One that came within a day stays, and is not read: that may count as a use.
            has_come_long_ago = path.lstat().st_mtime <= self.limit
            if has_come_long_ago and cache.digest(path) not in locked:
                yield _item("wheel", path, "no lock names it")

    def _files(self, folder: str, *endings: str) -> list[Path]:
        return _list_files(self.store.root / folder, *endings)

    def _is_old(self, path: Path) -> bool:
        return _get_last_use(path) <= self.limit


def _is_there(settings: Path) -> bool:
    """Return whether a project's folder exists; one that cannot be looked at does."""
    try:
        settings.parent.lstat()
    except OSError as exc:
        return not isinstance(exc, (FileNotFoundError, NotADirectoryError))
    return True


def _read_manifests(bundles: Iterable[Path]) -> tuple[list[Manifest], bool]:
    """Return the manifests of bundles, also where a layer is missing: a job may use the others.

    And whether a bundle is of a newer version of stager, so that what it needs is not known.
    """
    found, newer = [], False
    for path in bundles:
        with suppress(ManifestError):
            newer = newer or bundle_file.read_format(path) > FORMAT
            found.append(bundle_file.read_stated_manifest(path))
    return found, newer


def _list_partial_files(root: Path) -> list[CleanedItem]:
    """Return what killed builds left; nothing during a build, for it may be that one's."""
    locks = [root / name for name in (".lock", ".tmp.lock") if (root / name).exists()]
    if not all(map(_is_unused, locks)):
        return []
    left = _list_content(root / "tmp")
    return [_item("partial", path, "a build that was killed left it") for path in left]


def _remove_code(path: Path) -> bool:
    with suppress(OSError):
        remove_stored_code(str(path))
        path.parent.rmdir()
    return not path.exists()


def _remove_file(path: Path) -> bool:
    with suppress(OSError):
        path.unlink(missing_ok=True)
        if path.parents[1].name == "wheels-built":
            path.with_name(f"{path.name}.sha256").unlink(missing_ok=True)
            path.parent.rmdir()
    return not path.exists()


_REMOVALS: dict[str, Callable[[Path], bool]] = {
    "partial": lambda path: not path.exists(),  # the store's lock removes these
    "bundle": bundle_file.clear_away,
    "code": _remove_code,
    "hub": _remove_hub_file,
}
"""Of a kind what removes an item, and says if it is gone."""


# --- The result of ``stager clean`` --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CleanResult:
    """The result of ``stager clean``."""

    ok: bool  # true unless a node could not be cleaned
    dry_run: bool
    nodes_skipped: str | None  # the reason why the nodes cannot be cleaned from here
    items: tuple[CleanedItem, ...]
    bytes: int
    outcome: Outcome | None = field(default=None, metadata={"json": None})
    """The job that cleaned the nodes."""


def make_clean_result(
    items: Sequence[CleanedItem], outcome: Outcome | None, skipped: str | None, *, dry_run: bool
) -> CleanResult:
    """Return the result of a removal."""
    return CleanResult(
        ok=outcome is None or (outcome.ok and not outcome.is_interrupted),
        dry_run=dry_run,
        nodes_skipped=skipped,
        items=tuple(items),
        bytes=sum(item.bytes for item in items),
        outcome=outcome,
    )


@dataclass(frozen=True, kw_only=True)
class CleanNodeResult:
    """The result of ``stager clean-node``."""

    ok: bool  # true unless something could not be removed
    dry_run: bool
    roots: tuple[NodeCleanup, ...]
    bytes: int


def list_removed_on_node(answer: CleanAnswer) -> Iterator[CleanedItem]:
    """Yield what a node removed, or would remove."""
    texts = {"place": answer.node, "kind": "environment", "why": "not in use"}
    for root in answer.roots:
        environments = [(f"envs/{name}", size) for name, size in root.removed]
        for name, size in [*environments, *root.left_overs]:
            yield CleanedItem(**texts, path=Path(root.root) / name, bytes=size)


def has_environment(answer: CleanAnswer, bundle_id: str) -> bool:
    """Return whether a node still has the environment of a bundle."""
    return any(name.endswith(bundle_id) for root in answer.roots for name, _ in root.kept)


# --- The nodes on which a user's jobs have left environments, as the logs of the jobs say --------

_TELLING = (b'"unpack"', b'"clean"')  # what a line has that tells of an environment on a node


def find_used_nodes(log_dir: Path) -> list[str]:
    """Return the nodes with environments, in the order of the jobs that made or used them last."""
    used: dict[str, None] = {}
    for line in _read_lines(log_dir):
        record = parse_event(line) if any(map(line.__contains__, _TELLING)) else None
        event = record and record.event
        if isinstance(event, UnpackAnswer) and event.ok:
            used.pop(event.node, None)
            used[event.node] = None
        elif isinstance(event, CleanAnswer) and not any(root.kept for root in event.roots):
            used.pop(event.node, None)
    return list(used)


def _read_lines(log_dir: Path) -> Iterator[bytes]:
    logs = []
    for path in log_dir.glob("events.*.jsonl"):
        with suppress(OSError):
            logs.append((path.lstat().st_mtime, path))
    for _, path in sorted(logs):
        with suppress(OSError), open_regular(path) as handle:
            yield from handle


def choose_nodes(
    options: JobOptions, used: Sequence[str], listing: Collection[PartitionNode]
) -> tuple[JobOptions, list[str]]:
    """Return the options that ask Slurm for the nodes with environments, and what to say of it."""
    up = {node.name for node in listing if node.is_up}
    down = {node.name for node in listing} - up
    chosen, away = [*filter(up.__contains__, used)], fold_hosts([*filter(down.__contains__, used)])
    notes = [f"not cleaned: {away}, which Slurm has down or reserved at the moment"] if away else []
    names, number = fold_hosts(chosen), len(chosen)
    if not chosen or options.nodelist:
        return options, notes
    if not options.nodes:
        here = f"asking for {names}, where your jobs have left environments, as their logs say; "
        options = replace(options, nodes=(number, number), nodelist=names)
        return options, [*notes, f"{here}--nodelist names other nodes"]
    if number > options.nodes[0]:
        count = format_count(number, "node")
        notes.append(f"the logs tell of environments on {count}: --nodelist {names}")
    return options, notes
