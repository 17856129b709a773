"""From a bundle to an environment: checked, unpacked in parallel, published by one rename.

If several processes ask for the same bundle at the same time, one unpacks it, and the others wait
and use the result. Until the rename nothing is visible under ``envs/``; the next unpack of the same
bundle removes what a killed one left in ``incoming/``.

A published environment is compared with its listing whenever a job is about to use it. If it is
damaged, a new one is built beside it, from its sound layers and the bundle, and the two change
places in one step. A job that uses the damaged one at that moment is not waited for, as that could
take days: its open files stay as they are, and files that it opens later are the sound copies.
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

from ..format.archive import Arrival, BundleFile, Excerpt
from ..node import node_root, removal
from ..node.node_root import env_path
from ..protocol.problem import NodeError, Problem, ProblemCode
from . import damage
from .assemble import AssembleOptions, MissingLayer, assemble
from .layer_writer import write_problem
from .strays import is_directory, strays
from .virtual_environment import renew

__all__ = [
    "Environment",
    "MissingLayer",
    "Source",
    "hold",
    "lock_path",
    "unpack",
    "using",
]

_AT_FDCWD, _EXCHANGE = -100, 2
"""Constants of renameat2(2)."""
_LEFT_OVER = re.compile(r"([0-9a-f]{64})\.")


@dataclass(frozen=True)
class Environment:
    """An environment that is ready for use."""

    path: str
    """Its directory, ``<node root>/envs/<bundle id>``."""
    reused: bool
    """True if it was there already."""
    linked: int
    """Files taken by hard link from older environments."""
    written: int
    """Files written from the bundle."""
    seconds: float
    """Seconds that it took, including the wait for others."""
    mended: Problem | None = None
    """The damage of the former environment; None if there was none."""


@dataclass(frozen=True)
class Source:
    """The source of an environment: the bundle's file, and what the job knows about it."""

    excerpt: Excerpt | None = None
    """The content of a partial file; the rest is taken from older environments here."""
    arrival: Arrival | None = None
    """The progress of a file that is still being transferred; it is unpacked as it arrives."""
    checked: bool = False
    """True if the environment has just been found here without damage."""
    trusted: bool = False
    """True if the caller made the bundle: files are not compared with its index."""


class GoneError(NodeError):
    """The environment was removed before it was held."""


def lock_path(root: str, bundle_id: str) -> str:
    """Return the file that is locked: exclusively to remove an environment, shared to use it."""
    return os.path.join(root, "locks", f"{bundle_id}.lock")


def making_path(root: str, bundle_id: str) -> str:
    """Return the file that is locked, exclusively, to make an environment."""
    return os.path.join(root, "locks", f"{bundle_id}.making")


def hold(root: str, bundle_id: str) -> int:
    """Keep an environment from being removed until the descriptor, or its last copy, is closed.

    The descriptor is inherited by whatever this process becomes or starts.

    Raises:
        GoneError: the environment is not there.
        NodeError: the file cannot be made or locked.
    """
    path = lock_path(root, bundle_id)
    try:
        handle = node_root.take(path, fcntl.LOCK_SH)
        os.set_inheritable(handle, True)
        with contextlib.suppress(OSError):
            os.utime(handle)  # the time of its last use, for clean_node
    except OSError as exc:
        raise NodeError(write_problem(exc, path)) from exc
    if not is_directory(env_path(root, bundle_id)):
        os.close(handle)
        raise GoneError(Problem(ProblemCode.ENVIRONMENT_GONE, env_path(root, bundle_id)))
    return handle


@contextlib.contextmanager
def using(root: str, bundle_id: str) -> Iterator[None]:
    """Keep an environment from being removed while the block runs."""
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
    """Make sure that the environment of a bundle exists and is complete.

    Raises:
        NodeError: the bundle is damaged, there is no room, or the place cannot be written.
    """
    started = time.monotonic()
    source = source or Source()
    final = env_path(root, expected)
    linked = written = 0
    mended = None
    options = AssembleOptions(processes, compare=not source.trusted)
    try:
        is_sound = source.checked and is_directory(final)
        faults = [] if is_sound else damage.look(final, processes)
        if faults != []:
            with node_root.using_root(root), making(root, expected):
                faults = damage.look(final, processes)
                if faults != []:
                    _sweep(root, expected)
                    with BundleFile(path, expected, source.excerpt, source.arrival) as bundle:
                        linked, written = assemble(bundle, root, python, options, _publish)
                if faults:
                    mended = damage.describe(final, faults)
        renew(final, python)
    except OSError as exc:
        raise NodeError(write_problem(exc, root)) from exc
    seconds = time.monotonic() - started
    return Environment(final, faults == [], linked, written, seconds, mended)


@contextlib.contextmanager
def making(root: str, bundle_id: str) -> Iterator[None]:
    """Be the only process to make an environment; processes that use it are not waited for."""
    use, make = lock_path(root, bundle_id), making_path(root, bundle_id)
    with node_root.taken(use, fcntl.LOCK_SH), node_root.taken(make, fcntl.LOCK_EX):
        yield


def _publish(staging: str, final: str) -> None:
    """Rename an environment to its final path; a former one moves to ``incoming/``."""
    if not os.path.lexists(final):
        os.rename(staging, final)
        return
    left = strays(final, staging) if is_directory(final) else []
    _exchange(staging, final)
    for path in left:
        with contextlib.suppress(OSError):  # its directory was not published, or has gone
            os.rename(os.path.join(staging, path), os.path.join(final, path))


def _exchange(one: str, other: str) -> None:
    """Exchange two paths: in one step if the file system can, else in three."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    paths = os.fsencode(one), os.fsencode(other)
    if rename is not None and not rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _EXCHANGE):
        return
    aside = f"{one}.aside"
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)


def _sweep(root: str, bundle_id: str) -> None:
    """Remove leftovers of killed unpacks: of this bundle, and of those not in use."""
    incoming = os.path.join(root, "incoming")
    for name in os.listdir(incoming):
        left_over = _LEFT_OVER.match(name)
        if left_over is None:
            continue
        path = os.path.join(incoming, name)
        if left_over[1] == bundle_id:
            removal.sweep(path)
            continue
        # If the lock is taken, another process makes that environment, or uses it.
        alone = fcntl.LOCK_EX | fcntl.LOCK_NB
        with contextlib.suppress(OSError), node_root.taken(lock_path(root, left_over[1]), alone):
            removal.sweep(path)
