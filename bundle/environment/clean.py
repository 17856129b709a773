"""Removing from a node root what nobody uses: environments, and what killed jobs left.

An environment is removed under its exclusive lock, which every job that uses it shares. It leaves
``envs/`` by one rename before anything in it is deleted, so that a clean that is killed leaves no
half of one there; the rest lies in ``incoming/``, for the next clean or unpack to sweep. What is
in use is kept: where the lock is taken, or where a process of this user names the directory in its
command line, its variables or as its working directory, as every rank does.

A job's directory, and what was broadcast for a job, must be idle for an hour besides. Symbolic
links are removed, never followed; where a file system is mounted below, nothing is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..node import removal
from ..node.locks import ROOT_LOCK, taken
from ..node.root import SUBDIRECTORIES, secure_root
from ..protocol.problem import NodeError, Problem
from ..system import files
from .unpack import env_path, lock_path

IDLE_SECONDS = 3600.0
"""A job that has written nothing for so long, and has no process left, is over."""
NOT_OURS = "not made by stager"
_ALONE = fcntl.LOCK_EX | fcntl.LOCK_NB
_BUNDLE_ID = re.compile(r"[0-9a-f]{64}")
_OF_BUNDLE = re.compile(r"([0-9a-f]{64})\.")
_OF_JOB = "job-"
_RECENT = "written to less than an hour ago"


@dataclass(frozen=True)
class Cleaned:
    """What became of one node root. In a dry run: what would."""

    root: str
    """The node root."""
    removed: tuple[tuple[str, int], ...] = ()
    """Environments: the bundle's id, and the bytes that became free."""
    kept: tuple[tuple[str, str], ...] = ()
    """What stays, by the bundle's id or its path in the root, and why."""
    left_overs: tuple[tuple[str, int], ...] = ()
    """Whatever else was removed: its path in the root, and the bytes that became free."""
    problems: tuple[Problem, ...] = ()
    """What should have been removed and could not be."""
    gone: bool = False
    """Whether nothing was left and the root itself is gone."""

    @property
    def freed(self) -> int:
        """Bytes that became free; those of files which other environments share are not."""
        return sum(size for _, size in self.removed + self.left_overs)

    def to_json(self) -> dict[str, Any]:
        """All of it as a JSON object."""
        return {**asdict(self), "freed": self.freed}


def roots(setting: str, env: Mapping[str, str]) -> list[str]:
    """Every node root of this user in the places where one may have been made.

    Args:
        setting: the job's ``node_root``.
        env: the node's variables.

    Raises:
        NodeError: the setting names a variable that is not set.
    """
    named = env.get(files.ROOT_VARIABLE) or setting
    places = files.automatic_places(env) if named == "auto" else files.named_places(setting, env)
    own = [os.path.join(path, f"stager-{os.geteuid()}") for _, path in places]
    return [root for root in own if os.path.isdir(root) and not os.path.islink(root)]


def clean(
    root: str,
    keep: Collection[str],
    dry_run: bool,
    *,
    caches: bool = False,
    now: float | None = None,
    nodes: bool = True,
) -> Cleaned:
    """Remove from a node root what is neither to be kept nor in use.

    Args:
        root: the node root; one that is not there is as clean as can be. Those that a local
            allocation has made for its nodes below it are cleaned as well.
        keep: ids of the bundles whose environments stay.
        dry_run: whether nothing is removed, only listed.
        caches: whether ``cache/`` goes too, if nothing in the root is in use.
        now: seconds since the epoch; None for the clock's.
        nodes: whether those of a local allocation are among it.

    Raises:
        NodeError: it is no node root, is a link, or belongs to somebody else.
    """
    if os.path.basename(root) != f"stager-{os.geteuid()}":
        raise files.fault("cannot be cleaned", root, "it does not have the name of our node root")
    if not os.path.lexists(root):
        return Cleaned(root, gone=True)
    real = secure_root(os.path.dirname(root))
    cleaning = _Cleaning(real, frozenset(keep), dry_run, time.time() if now is None else now)
    return cleaning.all(caches, nodes)


@dataclass
class _Cleaning:
    """One run over one node root."""

    root: str
    keep: frozenset[str]
    dry_run: bool
    now: float
    removed: list[tuple[str, int]] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    left_overs: list[tuple[str, int]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    in_use: bool = False
    links: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How many names of each file have been counted, by device and inode."""

    def all(self, caches: bool, nodes: bool = True) -> Cleaned:
        """Everything, in the order in which one thing makes the next one removable."""
        self._each("envs", self._environment)
        self._each("incoming", self._incoming)
        self._each("jobs", self._job)
        if nodes:
            self._each("nodes", lambda name: self._local_node(name, caches))
        if caches and os.path.lexists(self._path("cache")):
            self._cache()
        gone = False
        if not self.dry_run:
            self._each("locks", self._lock)
            gone = self._remove_root()
        return Cleaned(
            root=self.root,
            removed=tuple(self.removed),
            kept=tuple(self.kept),
            left_overs=tuple(self.left_overs),
            problems=tuple(self.problems),
            gone=gone,
        )

    def _path(self, *names: str) -> str:
        return os.path.join(self.root, *names)

    def _each(self, folder: str, act: Callable[[str], None]) -> None:
        """Do something with each name in one of the root's directories; a failure is a problem."""
        for name in _names(self._path(folder)):
            try:
                act(name)
            except FileNotFoundError:
                continue  # another clean, or the end of a job, was first
            except BlockingIOError:
                self._keep(name if folder == "envs" else f"{folder}/{name}", "in use")
            except OSError as exc:
                self.problems.append(_problem(self._path(folder, name), exc))

    def _keep(self, what: str, why: str) -> None:
        """Note what stays because somebody uses it."""
        self.kept.append((what, why))
        self.in_use = True

    def _environment(self, name: str) -> None:
        path = self._path("envs", name)
        if not _BUNDLE_ID.fullmatch(name):
            self.kept.append((name, NOT_OURS))
        elif name in self.keep:
            self.kept.append((name, "to be kept"))
        else:
            with self._alone(lock_path(self.root, name)):
                user = removal.user_of(path)
                if user is not None:
                    self._keep(name, f"process {user} uses it")
                    return
                aside = self._path("incoming", f"{name}.{time.monotonic_ns()}")
                size = self._remove(path, aside)
                if size is not None:
                    self.removed.append((name, size))

    def _incoming(self, name: str) -> None:
        """What an unpack or a broadcast left; those that go on hold a lock, or write."""
        path, label = self._path("incoming", name), f"incoming/{name}"
        found = _OF_BUNDLE.match(name)
        if found is not None:
            with self._alone(lock_path(self.root, found[1])):
                self._left_over(path, label)
        elif not name.startswith(_OF_JOB):
            self.kept.append((label, NOT_OURS))
        else:
            self._idle_only(path, label)

    def _job(self, name: str) -> None:
        self._idle_only(self._path("jobs", name), f"jobs/{name}")

    def _idle_only(self, path: str, label: str) -> None:
        """Remove what belongs to a job, if the job is over."""
        user = removal.user_of(path)
        if user is not None:
            self._keep(label, f"process {user} uses it")
        elif not removal.lock_is_free(path):
            self._keep(label, "in use")
        elif removal.last_change(path) > self.now - IDLE_SECONDS:
            self._keep(label, _RECENT)
        else:
            self._left_over(path, label)

    def _local_node(self, name: str, caches: bool) -> None:
        """The node root of a node of a local allocation, which lies below this user's own."""
        base = self._path("nodes", name)
        own = os.path.join(base, os.path.basename(self.root))
        if os.path.islink(base) or not os.path.isdir(own):
            return
        try:
            secure_root(base)
        except NodeError as exc:
            self.problems.append(exc.problem)
            return
        inner = _Cleaning(own, self.keep, self.dry_run, self.now, links=self.links).all(caches)
        self.removed += inner.removed
        self.kept += [(f"nodes/{name}: {what}", why) for what, why in inner.kept]
        self.left_overs += [(f"nodes/{name}: {what}", size) for what, size in inner.left_overs]
        self.problems += inner.problems
        if inner.gone:
            with contextlib.suppress(OSError):  # somebody has put something there
                os.rmdir(base)

    def _cache(self) -> None:
        if self.in_use:
            self.kept.append(("cache", "something in the node root is in use"))
            return
        try:
            self._left_over(self._path("cache"), "cache")
        except OSError as exc:
            self.problems.append(_problem(self._path("cache"), exc))

    def _lock(self, name: str) -> None:
        """Remove a lock whose environment is gone; see ``locks`` for those who wait."""
        bundle_id, _, ending = name.partition(".")
        if ending not in ("lock", "making") or not _BUNDLE_ID.fullmatch(bundle_id):
            return
        path = self._path("locks", name)
        with contextlib.suppress(BlockingIOError), taken(path, _ALONE, create=False):
            # Looked at under the lock: only its holder makes an environment.
            making = any(one.startswith(bundle_id) for one in _names(self._path("incoming")))
            if not making and not os.path.lexists(env_path(self.root, bundle_id)):
                os.unlink(path)

    @contextlib.contextmanager
    def _alone(self, path: str) -> Iterator[None]:
        """Hold a lock alone; a dry run does not make the file.

        Raises:
            BlockingIOError: somebody else holds it.
        """
        if self.dry_run and not os.path.lexists(path):
            yield
            return
        with taken(path, _ALONE, create=not self.dry_run):
            yield

    def _left_over(self, path: str, label: str) -> None:
        size = self._remove(path)
        if size is not None:
            self.left_overs.append((label, size))

    def _remove(self, path: str, aside: str = "") -> int | None:
        """Delete something, by way of another name if one is given; the bytes that became free.

        Returns None where it stays, which is a problem then.

        Raises:
            OSError: it could not be deleted, or not all of it.
        """
        mounts = removal.mounts_below(path)
        if mounts:
            why = f"a file system is mounted at {mounts[0]}"
            fix = f"unmount it (umount {mounts[0]}), then clean again"
            self.problems.append(Problem("cannot be removed", path, why, fix))
            return None
        if self.dry_run:
            return removal.measure(path, self.links)
        if aside:
            os.rename(path, aside)
        return removal.delete(aside or path)

    def _remove_root(self) -> bool:
        """Remove the root itself if it is empty; whoever is about to use it holds its lock."""
        own = {*SUBDIRECTORIES, "nodes", ".gitignore", ROOT_LOCK}
        try:
            with taken(self._path(ROOT_LOCK), _ALONE):
                there = set(_names(self.root))
                folders = sorted(there & {*SUBDIRECTORIES, "nodes"})
                if there - own or any(_is_taken(self._path(name)) for name in folders):
                    os.unlink(self._path(ROOT_LOCK))
                    return False
                for name in folders:
                    os.rmdir(self._path(name))
                for name in (".gitignore", ROOT_LOCK):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._path(name))
                os.rmdir(self.root)
        except OSError:
            return False  # somebody came in between, and finds it, or makes it anew
        return True


def _names(folder: str) -> list[str]:
    """What is in a directory; nothing where it is a link, or not there."""
    try:
        return [] if os.path.islink(folder) else sorted(os.listdir(folder))
    except OSError:
        return []


def _is_taken(folder: str) -> bool:
    return os.path.islink(folder) or bool(os.listdir(folder))


def _problem(path: str, exc: BaseException) -> Problem:
    where = str(getattr(exc, "filename", None) or path)
    why = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
    return Problem("cannot be removed", where, why, f"remove {where} by hand, then clean again")
