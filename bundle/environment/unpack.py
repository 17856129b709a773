"""From a bundle to an environment: checked, unpacked in parallel, published by one rename.

However many processes ask for the same bundle at the same time, one unpacks and the others wait for
it and use the result. Until the rename nothing is visible under ``envs/``; what a killed unpack
leaves in ``incoming/`` is swept by the next one of the same bundle.

A published environment is compared with its listing whenever a job comes to use it. One that is
damaged is made anew beside it, of what is sound in it and what is not, and the two change places in
one step. A job that uses the damaged one at that moment is not waited for, which could take days:
what it has open stays as it is, and what it opens from then on is the sound copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..format.archive import BundleFile, Excerpt
from ..format.arriving_file import Arrival
from ..node import locks, removal
from ..protocol.problem import NodeError, Problem
from . import damage
from .assemble import AssembleOptions, MissingLayer, assemble
from .layer_writer import write_problem
from .virtual_environment import renew

__all__ = [
    "Environment",
    "MissingLayer",
    "Source",
    "env_path",
    "hold",
    "lock_path",
    "unpack",
    "using",
]

_AT_FDCWD, _EXCHANGE = -100, 2
"""Of renameat2(2)."""
_LEFT_OVER = re.compile(r"([0-9a-f]{64})\.")


@dataclass(frozen=True)
class Environment:
    """An environment that is ready for use."""

    path: str
    """Its directory, ``<node root>/envs/<bundle id>``."""
    reused: bool
    """Whether it was there already."""
    linked: int
    """Files taken by hard link from older environments."""
    written: int
    """Files written from the bundle."""
    seconds: float
    """How long it took, waiting for others included."""
    mended: Problem | None = None
    """What was wrong with the one that was there; None if nothing was, or none was there."""


@dataclass(frozen=True)
class Source:
    """What a job has done before: how the bundle's file comes to this node, if it is needed."""

    excerpt: Excerpt | None = None
    """What is in it, where that is not all; the rest is taken from older environments here."""
    arrival: Arrival | None = None
    """How far it is, where it is still being sent: it is unpacked as it comes."""
    checked: bool = False
    """Whether the environment was found here, and undamaged, just now."""
    trusted: bool = False
    """Whether who asks has made the bundle: what its index says of each file is not compared."""


class GoneError(NodeError):
    """The environment has been removed, before it was held."""


def env_path(root: str, bundle_id: str) -> str:
    """Where the environment of a bundle lies under a node root."""
    return os.path.join(root, "envs", bundle_id)


def lock_path(root: str, bundle_id: str) -> str:
    """The file that is locked: exclusively to remove an environment, shared to make or use it."""
    return os.path.join(root, "locks", f"{bundle_id}.lock")


def making_path(root: str, bundle_id: str) -> str:
    """The file that is locked, exclusively, to make an environment."""
    return os.path.join(root, "locks", f"{bundle_id}.making")


def hold(root: str, bundle_id: str) -> int:
    """Keep an environment from being removed until the descriptor, or its last copy, is closed.

    The descriptor is inherited by whatever this process becomes or starts.

    Raises:
        GoneError: the environment is not there.
        NodeError: the lock cannot be made or taken.
    """
    path = lock_path(root, bundle_id)
    try:
        handle = locks.take(path, fcntl.LOCK_SH)
        os.set_inheritable(handle, True)
    except OSError as exc:
        raise NodeError(write_problem(exc, path)) from exc
    if not damage.is_directory(env_path(root, bundle_id)):
        os.close(handle)
        why = "it has been removed, as `stager clean` does with what is not in use"
        where = env_path(root, bundle_id)
        raise GoneError(Problem("the environment is gone", where, why, "start again"))
    return handle


@contextlib.contextmanager
def using(root: str, bundle_id: str) -> Iterator[None]:
    """Keep an environment from being removed for as long as the block runs."""
    handle = hold(root, bundle_id)
    try:
        yield
    finally:
        os.close(handle)


def unpack(
    path: str,
    *,
    root: str,
    expected: str,
    python: str,
    processes: int,
    source: Source | None = None,
) -> Environment:
    """Make sure that the environment of a bundle is there, and complete.

    Args:
        path: the bundle.
        root: the node root, guarded by :func:`bundle.node.root.secure_root`.
        expected: the bundle's id.
        python: the interpreter that the environment is for.
        processes: how many processes unpack.
        source: what the job has done for it before.

    Raises:
        NodeError: the bundle is damaged, there is no room, or the place cannot be written.
    """
    started = time.monotonic()
    final = env_path(root, expected)
    linked = written = 0
    how = source or Source()
    options = AssembleOptions(processes, compare=not how.trusted)
    mended = None
    try:
        there = how.checked and damage.is_directory(final)
        found = [] if there else damage.look(final, processes)
        if found != []:
            with locks.using_root(root), making(root, expected):
                found = damage.look(final, processes)
                if found != []:
                    _sweep(root, expected)
                    with BundleFile(path, expected, how.excerpt, how.arrival) as bundle:
                        linked, written = assemble(bundle, root, python, options, _publish)
                mended = damage.describe(final, found, damage.REPAIRED) if found else None
        renew(final, python)
    except OSError as exc:
        raise NodeError(write_problem(exc, root)) from exc
    seconds = time.monotonic() - started
    return Environment(final, found == [], linked, written, seconds, mended)


@contextlib.contextmanager
def making(root: str, bundle_id: str) -> Iterator[None]:
    """Be the only one to make an environment; those who use it are not waited for."""
    use, make = lock_path(root, bundle_id), making_path(root, bundle_id)
    with locks.taken(use, fcntl.LOCK_SH), locks.taken(make, fcntl.LOCK_EX):
        yield


def _publish(staging: str, final: str) -> None:
    """Give an environment its name; what was there before is in its place afterwards."""
    if not os.path.lexists(final):
        os.rename(staging, final)
        return
    kept = damage.strays(final, staging) if damage.is_directory(final) else []
    _exchange(staging, final)
    for path in kept:
        with contextlib.suppress(OSError):  # its directory was not published, or has gone
            os.rename(os.path.join(staging, path), os.path.join(final, path))


def _exchange(one: str, other: str) -> None:
    """Let two paths change places: in one step where the file system can, else in three."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    paths = os.fsencode(one), os.fsencode(other)
    if rename is not None and not rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _EXCHANGE):
        return
    aside = f"{one}.aside"
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)


def _sweep(root: str, bundle_id: str) -> None:
    """Remove what killed unpacks left, of this bundle, which nobody else makes, and of others."""
    incoming = os.path.join(root, "incoming")
    for name in os.listdir(incoming):
        found = _LEFT_OVER.match(name)
        if found is None:
            continue
        path = os.path.join(incoming, name)
        if found[1] == bundle_id:
            removal.sweep(path)
            continue
        # Where the lock is taken, somebody is making that one, or using it.
        alone = fcntl.LOCK_EX | fcntl.LOCK_NB
        with contextlib.suppress(OSError), locks.taken(lock_path(root, found[1]), alone):
            removal.sweep(path)
