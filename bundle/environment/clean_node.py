"""Cleaning of one node by itself, as in Slurm's epilog: no bundle, no allocation, no settings.

What nobody has used for some days is removed, and the least recently used beyond a limit in bytes.
Root cleans the node roots of all users. It removes a user's files as that user, in a process of its
own: whatever the user puts in their place meanwhile, no file of anybody else can be removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..node import node_root, removal
from ..protocol.codec import decode, encode
from ..protocol.counts import counted, sized
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..protocol.reports import NodeCleanup
from ..system import signals
from .clean import clean, listed
from .unpack import lock_path

DAYS = 7.0
"""Days after which an environment that nobody has used is removed."""
SECONDS_A_USER = 300.0
"""Time after which the removal of one user's files is ended: an epilog keeps the node waiting."""
_NODE_ROOT = re.compile(r"stager-(\d{1,10})")
_DAY = 86400.0
_MOST_ANSWER = 16 << 20
"""Bytes that are read of a report on a user's files: the user chooses their names."""


@dataclass(frozen=True)
class Retention:
    """What may stay on a node."""

    days: float = DAYS
    """Days for which an environment stays that nobody uses."""
    bytes_a_user: int | None = None
    """Bytes of the environments of one node root; None for no limit."""


def clean_node(
    bases: Sequence[str], limits: Retention, dry_run: bool, env: Mapping[str, str] = os.environ
) -> list[NodeCleanup]:
    """Clean the node roots on this machine: this user's own, or for root those of all users."""
    places = list(bases) or [path for _, path in node_root.automatic_bases(env)]
    return [
        _clean_as(root, status, limits, dry_run)
        for base in dict.fromkeys(map(os.path.realpath, places))
        for root, status in _node_roots(base)
    ]


def describe(cleanup: NodeCleanup, dry_run: bool) -> str:
    """Return one line about a node root that was cleaned."""
    word = "would be freed" if dry_run else "freed"
    removed = counted(len(cleanup.removed), "environment")
    kept = f", {counted(len(cleanup.kept), 'item')} kept" if cleanup.kept else ""
    return f"{cleanup.root}: {removed}, {sized(cleanup.freed)} {word}{kept}"


def _node_roots(base: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return
    for name in names:
        match = _NODE_ROOT.fullmatch(name)
        if match is None or os.geteuid() not in (0, int(match[1])):
            continue
        path = os.path.join(base, name)
        try:
            status = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_uid == int(match[1]):
            yield path, status


def _clean_as(root: str, owner: os.stat_result, limits: Retention, dry_run: bool) -> NodeCleanup:
    """Clean a node root with its owner's rights, in another process if that is another user."""
    if owner.st_uid == os.geteuid():
        return _clean(root, limits, dry_run)
    readable, writable = os.pipe()
    with signals.held():
        child = os.fork()
        if not child:
            _be_owner(root, owner, limits, dry_run, writable)
    os.close(writable)
    with open(readable, "rb") as answer:
        data = _read_within(answer.fileno(), SECONDS_A_USER)
    if data is None:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    why = "the process that cleans it was ended"  # as its owner can do
    if data is None:
        why = "it took too long, or has too many files"
    try:
        return decode(NodeCleanup, json.loads(data or b""))
    except (ValueError, RecursionError):
        return NodeCleanup(root, problems=(_problem(root, why),))


def _be_owner(
    root: str, owner: os.stat_result, limits: Retention, dry_run: bool, writable: int
) -> None:
    """Drop to the owner's rights and clean a node root; never return."""
    try:
        signals.end_as_usual()
        os.setgroups([])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)
        os.chdir("/")
        with open(writable, "w", encoding="utf-8") as answer:
            json.dump(encode(_clean(root, limits, dry_run)), answer)
    finally:
        os._exit(0)  # without the parent's clean-up


def _read_within(handle: int, seconds: float) -> bytes | None:
    """Read until end of file; None if that is too much or too late."""
    until = time.monotonic() + seconds
    data = bytearray()
    while len(data) < _MOST_ANSWER:
        left = max(0.0, until - time.monotonic())
        if not select.select([handle], [], [], left)[0]:
            break
        part = os.read(handle, 1 << 16)
        if not part:
            return bytes(data)
        data += part
    return None


def _clean(root: str, limits: Retention, dry_run: bool) -> NodeCleanup:
    try:
        keep = _recently_used(root, limits, time.time())
        return clean(root, keep, dry_run)
    except NodeError as exc:
        return NodeCleanup(root, problems=(exc.problem,))
    except OSError as exc:
        return NodeCleanup(root, problems=(_problem(root, exc.strerror or str(exc)),))


def _recently_used(root: str, limits: Retention, now: float) -> list[str]:
    places: dict[str, list[str]] = {}
    # A local allocation has node roots of its own for its nodes, below the user's.
    inner = [os.path.join(root, "nodes", node) for node in listed(os.path.join(root, "nodes"))]
    for each in [root, *(os.path.join(node, os.path.basename(root)) for node in inner)]:
        for name in listed(os.path.join(each, "envs")):
            places.setdefault(name, []).append(each)
    last = {name: max(_last_use(each, name) for each in at) for name, at in places.items()}
    recent = [name for name in places if last[name] > now - limits.days * _DAY]
    keep: list[str] = []
    seen: set[tuple[int, int]] = set()
    total = 0
    for name in sorted(recent, key=last.__getitem__, reverse=True):
        if limits.bytes_a_user is not None:
            paths = [node_root.env_path(each, name) for each in places[name]]
            total += sum(removal.bytes_besides(path, seen) for path in paths)
            if total > limits.bytes_a_user:
                break
        keep.append(name)
    return keep


def _last_use(root: str, bundle_id: str) -> float:
    """Return when it was made or last held, in seconds since the epoch."""
    times = [0.0]
    for path in (node_root.env_path(root, bundle_id), lock_path(root, bundle_id)):
        with contextlib.suppress(OSError):
            times.append(os.lstat(path).st_mtime)
    return max(times)


def _problem(root: str, why: str) -> Problem:
    return Problem(ProblemCode.NOT_REMOVED, root, {"why": why})
