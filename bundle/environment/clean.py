"""Removal of unused environments from a node root, and of what killed jobs left there.

An environment is removed under its exclusive lock, which every job that uses it shares, and leaves
``envs/`` by one rename before anything in it is deleted. It is kept also where a process of this
user names the directory in its command line, its variables or as its working directory. A job's
directory, files that were broadcast, and compiled code must also be idle for an hour. Links are
removed, never followed; a tree with a file system mounted in it is not touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple

from ..node import node_root, removal
from ..node.node_root import COMPILED, ROOT_LOCK, SUBDIRECTORIES, hold_lock, make_secure_root
from ..protocol.codec import decode, encode
from ..protocol.counts import format_count, format_size
from ..protocol.dataclass import dataclass
from ..protocol.messages import NodeCleanup
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.files import error_text
from ..system.processes import fork_child, read_pipe
from .unpack import lock_path

IDLE_SECONDS = 3600.0  # a job is over that has written nothing for so long
NOT_OURS = "not made by stager"
_ALONE = fcntl.LOCK_EX | fcntl.LOCK_NB
_BUNDLE_ID = re.compile(r"[0-9a-f]{64}")
_OF_JOB = "job-"


def list_node_roots(setting: str, env: Mapping[str, str]) -> list[str]:
    """Return every node root of this user in the places where one may have been made."""
    bases, is_named = node_root.list_bases(setting, env)
    roots = [os.path.join(path, node_root.node_root_name()) for _, path in bases]
    found = [root for root in roots if os.path.isdir(root) and not os.path.islink(root)]
    return [root for root in found if is_named or not node_root.find_foreign_root(root)]


def clean(
    root: str,
    keep: Collection[str],
    dry_run: bool,
    *,
    idle_since: float | None = None,
    nodes: bool = True,
) -> NodeCleanup:
    """Remove everything from a node root that is neither to be kept nor in use.

    A job's directory that was written to after ``idle_since`` stays, in seconds since the epoch;
    None for an hour ago. With ``nodes``, those of a local allocation below it are cleaned, too.
    """
    if os.path.basename(root) != node_root.node_root_name():
        raise NodeError(Problem(ProblemCode.NOT_A_NODE_ROOT, root))
    if not os.path.lexists(root):
        return NodeCleanup(root, gone=True)
    real = make_secure_root(os.path.dirname(root))
    before = time.time() - IDLE_SECONDS if idle_since is None else idle_since
    cleaning = _Cleaning(real, keep, dry_run, before)
    gone = cleaning.clean(nodes)
    return NodeCleanup(
        root=real,
        removed=tuple(cleaning.removed),
        kept=tuple(cleaning.kept),
        left_overs=tuple(cleaning.left_overs),
        problems=tuple(cleaning.problems),
        gone=gone,
        freed=sum(size for _, size in cleaning.removed + cleaning.left_overs),
    )


class _Kept(Exception):
    """Something is not removed; its text says why."""


@dataclass
class _Cleaning:
    root: str
    keep: Collection[str]
    dry_run: bool
    idle_since: float
    prefix: str = ""  # what labels begin with; empty but for the node roots of a local allocation
    removed: list[tuple[str, int]] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    left_overs: list[tuple[str, int]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    links: Counter[tuple[int, int]] = field(default_factory=Counter)  # see removal.measure

    def clean(self, nodes: bool = True) -> bool:
        """Clean parts in the order of their dependence; return whether the root is gone."""
        self._clean_each("envs", self._clean_environment)
        self._clean_each("incoming", self._clean_incoming)
        self._clean_each("jobs", self._remove_if_idle)
        self._clean_each(COMPILED, self._remove_if_idle)
        if nodes:
            self._clean_each("nodes", self._clean_local_node)
        if self.dry_run:
            return False
        self._clean_each("locks", self._clean_lock)
        return self._remove_root()

    def _path(self, *names: str) -> str:
        return os.path.join(self.root, *names)

    def _clean_each(self, folder: str, remove: Callable[[str], int | None]) -> None:
        """Call a function with each path in a directory; it returns the bytes that it has freed."""
        for name in list_names(self._path(folder)):
            path = self._path(folder, name)
            label = self.prefix + (name if folder == "envs" else f"{folder}/{name}")
            size = self._clean_part(path, label, remove)
            if size is not None and folder == "envs":
                self.removed.append((name, size))
            elif size is not None:
                self.left_overs.append((label, size))

    def _clean_part(self, path: str, label: str, remove: Callable[[str], int | None]) -> int | None:
        try:
            return remove(path)
        except FileNotFoundError:
            pass  # removed by another clean, or at the end of a job
        except BlockingIOError:
            self.kept.append((label, "in use"))
        except _Kept as exc:
            self.kept.append((label, str(exc)))
        except NodeError as exc:
            self.problems.append(exc.problem)
        except OSError as exc:
            self.problems.append(_make_problem(str(exc.filename or path), error_text(exc)))
        return None

    def _clean_environment(self, path: str) -> int:
        name = os.path.basename(path)
        if not _BUNDLE_ID.fullmatch(name):
            raise _Kept(NOT_OURS)
        if name in self.keep:
            raise _Kept("to be kept")
        with self._hold_exclusively(lock_path(self.root, name)):
            _require_no_user(path)
            return self._remove(path, self._path("incoming", f"{name}.{time.monotonic_ns()}"))

    def _clean_incoming(self, path: str) -> int:
        """Remove leftovers of an unpack or a broadcast; one in progress holds a lock, or writes."""
        bundle_id, dot, _ = os.path.basename(path).partition(".")
        if dot and _BUNDLE_ID.fullmatch(bundle_id):
            with self._hold_exclusively(lock_path(self.root, bundle_id)):
                return self._remove(path)
        if not bundle_id.startswith(_OF_JOB):
            raise _Kept(NOT_OURS)
        return self._remove_if_idle(path)

    def _remove_if_idle(self, path: str) -> int:
        _require_no_user(path)
        if not removal.is_unlocked(path):
            raise _Kept("in use")
        if removal.get_last_change(path) > self.idle_since:
            hours = max(1, round((time.time() - self.idle_since) / 3600))
            raise _Kept(f"written to in the last {format_count(hours, 'hour')}")
        return self._remove(path)

    def _clean_local_node(self, base: str) -> None:
        root = os.path.join(base, os.path.basename(self.root))
        if os.path.islink(base) or not os.path.isdir(root):
            return
        make_secure_root(base)
        prefix = f"nodes/{os.path.basename(base)}: "
        if replace(self, root=root, prefix=prefix).clean():
            removal.remove_if_empty(base)

    def _clean_lock(self, path: str) -> None:
        """Remove a lock without an environment; a process that waits for it makes a new one."""
        bundle_id, _, ending = os.path.basename(path).partition(".")
        if ending not in ("lock", "making") or not _BUNDLE_ID.fullmatch(bundle_id):
            return
        with contextlib.suppress(BlockingIOError), hold_lock(path, _ALONE, create=False):
            # Checked under the lock: only its holder makes an environment.
            incoming = list_names(self._path("incoming"))
            is_made = any(entry.startswith(bundle_id) for entry in incoming)
            if not is_made and not os.path.lexists(node_root.env_path(self.root, bundle_id)):
                os.unlink(path)

    @contextlib.contextmanager
    def _hold_exclusively(self, path: str) -> Iterator[None]:
        """Hold an exclusive lock (BlockingIOError if held); a dry run does not make the file."""
        if self.dry_run and not os.path.lexists(path):
            yield
            return
        with hold_lock(path, _ALONE, create=not self.dry_run):
            yield

    def _remove(self, path: str, aside: str = "") -> int:
        if mounts := removal.list_mounts(path):
            values = {"mount": mounts[0]}
            raise NodeError(Problem(ProblemCode.NOT_REMOVED_MOUNT, path, values))
        if self.dry_run:
            return removal.measure(path, self.links)
        if aside:
            os.rename(path, aside)
        return removal.delete(aside or path)

    def _remove_root(self) -> bool:
        """Remove the root if it is empty; a process about to use it holds its lock."""
        lock, names = self._path(ROOT_LOCK), {*SUBDIRECTORIES, COMPILED, "nodes"}
        try:
            with hold_lock(lock, _ALONE):
                found = set(list_names(self.root))
                folders = [self._path(name) for name in found & names]
                is_used = any(os.path.islink(path) or os.listdir(path) for path in folders)
                if is_used or found - names - {".gitignore", ROOT_LOCK}:
                    os.unlink(lock)
                    return False
                for path in folders:
                    os.rmdir(path)
                for name in (".gitignore", ROOT_LOCK):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._path(name))
                os.rmdir(self.root)
        except OSError:
            return False  # another process came in between, and finds it or makes it again
        return True


def _require_no_user(path: str) -> None:
    if user := removal.find_user_process(path):
        raise _Kept(f"process {user} uses it")


def list_names(folder: str) -> list[str]:
    """Return the names in a directory; none if it is a link, or missing."""
    with contextlib.suppress(OSError):
        return [] if os.path.islink(folder) else sorted(os.listdir(folder))
    return []


# --- Cleaning of one node by itself, as in Slurm's epilog: no bundle, no allocation, no settings

# What nobody has used for some days is removed, and the least recently used beyond a limit in
# bytes. Root cleans the node roots of all users, as that user: no other user's file can be removed.

DAYS = 7.0  # days after which an environment that nobody has used is removed
SECONDS_A_USER = 300.0  # then the removal is ended: an epilog keeps the node waiting
_NODE_ROOT = re.compile(r"stager-(\d{1,10})")
_DAY = 86400.0
_MOST_ANSWER = 16 << 20  # bytes of a report on a user's files, whose names the user chooses


class Retention(NamedTuple):
    """What may stay on a node."""

    days: float = DAYS  # for which an unused environment or job's directory stays; at least an hour
    bytes_a_user: int | None = None  # bytes of the environments of one node root; None for no limit


def clean_node(
    bases: Sequence[str], limits: Retention, dry_run: bool, env: Mapping[str, str] = os.environ
) -> list[NodeCleanup]:
    """Clean the node roots on this machine: this user's own, or for root those of all users."""
    places = list(bases) or [path for _, path in node_root.list_automatic_bases(env)]
    return [
        _clean_as_owner(root, status, limits, dry_run)
        for base in dict.fromkeys(map(os.path.realpath, places))
        for root, status in _node_roots(base)
    ]


def describe(cleanup: NodeCleanup, dry_run: bool) -> str:
    """Return one line about a node root that was cleaned."""
    freed = f"{format_size(cleanup.freed)} {'would be freed' if dry_run else 'freed'}"
    kept = f", {format_count(len(cleanup.kept), 'item')} kept" if cleanup.kept else ""
    return f"{cleanup.root}: {format_count(len(cleanup.removed), 'environment')}, {freed}{kept}"


def _node_roots(base: str) -> Iterator[tuple[str, os.stat_result]]:
    for match in filter(None, map(_NODE_ROOT.fullmatch, list_names(base))):
        owner, path = int(match[1]), os.path.join(base, match[0])
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            is_owners = stat.S_ISDIR(status.st_mode) and status.st_uid == owner
            if is_owners and os.geteuid() in (0, owner):
                yield path, status


def _clean_as_owner(
    root: str, owner: os.stat_result, limits: Retention, dry_run: bool
) -> NodeCleanup:
    if owner.st_uid == os.geteuid():
        return _clean(root, limits, dry_run)
    readable, writable = os.pipe()

    def run() -> None:
        os.setgroups([])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)
        os.chdir("/")
        with open(writable, "w", encoding="utf-8") as answer:
            json.dump(encode(_clean(root, limits, dry_run)), answer)

    child = fork_child(run)
    os.close(writable)
    data = read_pipe(io.FileIO(readable), time.monotonic() + SECONDS_A_USER, _MOST_ANSWER)
    why = "the process that cleans it was ended"  # as its owner can do
    if data is None or len(data) == _MOST_ANSWER:
        os.kill(child, signal.SIGKILL)
        why = "it took too long, or has too many files"
    os.waitpid(child, 0)
    with contextlib.suppress(ValueError, RecursionError):
        return decode(NodeCleanup, json.loads(data or b""))
    return NodeCleanup(root, problems=(_make_problem(root, why),))


def _clean(root: str, limits: Retention, dry_run: bool) -> NodeCleanup:
    try:
        now = time.time()
        keep = _list_recently_used(root, limits, now)
        # What lies in a job's directory may be results that could not be brought back.
        idle_since = now - max(IDLE_SECONDS, limits.days * _DAY)
        return clean(root, keep, dry_run, idle_since=idle_since)
    except NodeError as exc:
        return NodeCleanup(root, problems=(exc.problem,))
    except OSError as exc:
        return NodeCleanup(root, problems=(_make_problem(root, error_text(exc)),))


def _list_roots(root: str) -> list[str]:
    nodes = os.path.join(root, "nodes")  # of a local allocation
    return [root, *(os.path.join(nodes, one, os.path.basename(root)) for one in list_names(nodes))]


def _list_recently_used(root: str, limits: Retention, now: float) -> list[str]:
    roots: dict[str, list[str]] = {}
    last: dict[str, float] = {}  # when each environment was made, or last held
    for each in _list_roots(root):
        for name in list_names(os.path.join(each, "envs")):
            roots.setdefault(name, []).append(each)
            for used in (node_root.env_path(each, name), lock_path(each, name)):
                with contextlib.suppress(OSError):
                    last[name] = max(last.get(name, 0.0), os.lstat(used).st_mtime)
    recent = sorted(last, key=last.__getitem__, reverse=True)
    most, seen, total = limits.bytes_a_user, set[tuple[int, int]](), 0
    for number, name in enumerate(recent):
        for each in roots[name] if most is not None else ():
            total += removal.count_new_bytes(node_root.env_path(each, name), seen)
        if last[name] <= now - limits.days * _DAY or (most is not None and total > most):
            return recent[:number]
    return recent


def _make_problem(path: str, why: str) -> Problem:
    return Problem(ProblemCode.NOT_REMOVED, path, {"why": why})
