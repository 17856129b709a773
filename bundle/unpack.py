"""From a bundle to an environment: checked, unpacked in parallel, published by one rename.

However many processes ask for the same bundle at the same time, one unpacks and the others wait for
it and use the result. Until the rename nothing is visible under ``envs/``; what a killed unpack
leaves in ``incoming/`` is swept by the next one of the same bundle.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import delta
from .archive import BundleFile, Excerpt
from .delivering.arrival import Arrival
from .fs import facts_of, refusals
from .manifest import Layer, room_for
from .node import locks
from .problem import NodeError, Problem
from .unpacking.decompressor import load_decompressor
from .unpacking.layer import LayerError
from .unpacking.merge import Merged, merge
from .unpacking.venv import finish, is_ready
from .unpacking.writer import write_layers, write_problem

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


@dataclass(frozen=True)
class Sent:
    """How a bundle's file comes to this node."""

    excerpt: Excerpt | None = None
    """What is in it, where that is not all; the rest is taken from older environments here."""
    arrival: Arrival | None = None
    """How far it is, where it is still being sent: it is unpacked as it comes."""


class Lacking(NodeError):
    """What was sent is not enough: an older environment that had the rest has gone or changed."""

    def __init__(self, name: str, path: str) -> None:
        """Say which part is missing, and in which file."""
        super().__init__(
            Problem(
                what="a part of the environment is missing",
                where=path,
                why=f"{name} was to be taken from an older environment, which has changed",
                fix="start again",
            )
        )


def env_path(root: str, bundle_id: str) -> str:
    """Where the environment of a bundle lies under a node root."""
    return os.path.join(root, "envs", bundle_id)


def lock_path(root: str, bundle_id: str) -> str:
    """The file that is locked: exclusively to make or remove an environment, shared to use it."""
    return os.path.join(root, "locks", f"{bundle_id}.lock")


def hold(root: str, bundle_id: str) -> int:
    """Keep an environment from being removed until the descriptor, or its last copy, is closed.

    The descriptor is inherited by whatever this process becomes or starts.

    Raises:
        NodeError: the environment is not there, or the lock cannot be made or taken.
    """
    path = lock_path(root, bundle_id)
    try:
        handle = locks.take(path, fcntl.LOCK_SH)
        os.set_inheritable(handle, True)
    except OSError as exc:
        raise NodeError(write_problem(exc, path)) from exc
    if not os.path.isdir(env_path(root, bundle_id)):
        os.close(handle)
        why = "it has been removed, as `stager clean` does with what is not in use"
        where = env_path(root, bundle_id)
        raise NodeError(Problem("the environment is gone", where, why, "start again"))
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
    sent: Sent | None = None,
) -> Environment:
    """Make sure that the environment of a bundle is there, and complete.

    Args:
        path: the bundle.
        root: the node root, guarded by :func:`bundle.node.root.secure_root`.
        expected: the bundle's id.
        python: the interpreter that the environment is for.
        processes: how many processes unpack.
        sent: how the file comes here, where it is or was sent.

    Raises:
        NodeError: the bundle is damaged, there is no room, or the place cannot be written.
    """
    started = time.monotonic()
    final = env_path(root, expected)
    linked = written = 0
    how = sent or Sent()
    try:
        reused = is_ready(final, python)
        if not reused:
            with locks.using_root(root), _locked(root, expected):
                reused = is_ready(final, python)
                if not reused:
                    _sweep(root, expected)
                    with BundleFile(path, expected, how.excerpt, how.arrival) as bundle:
                        linked, written = _make(bundle, root, python, processes)
    except OSError as exc:
        raise NodeError(write_problem(exc, root)) from exc
    return Environment(final, reused, linked, written, time.monotonic() - started)


@contextlib.contextmanager
def _locked(root: str, bundle_id: str, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of an environment for oneself alone.

    Raises:
        BlockingIOError: somebody else holds it, and ``wait`` is false.
    """
    operation = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
    with locks.taken(lock_path(root, bundle_id), operation):
        yield


def _make(bundle: BundleFile, root: str, python: str, processes: int) -> tuple[int, int]:
    """Build the environment in a private directory and publish it; files linked and written."""
    manifest = bundle.manifest
    layers = manifest.layers
    incoming = os.path.join(root, "incoming")
    older = delta.older_layers(os.path.join(root, "envs"), [layer.head for layer in layers])
    _require_room(incoming, [layer for layer in layers if layer.head not in older])
    private = tempfile.mkdtemp(prefix=f"{manifest.id}.", dir=incoming)
    staging, tools = os.path.join(private, "env"), os.path.join(private, "tools")
    try:
        os.mkdir(staging, 0o700)
        os.mkdir(tools, 0o700)
        if bundle.holds(manifest.node.name):
            bundle.part(manifest.node)  # not needed here; but damage is to be found out
        wheel = _wheel(bundle, os.path.join(root, "envs"))
        part = manifest.decompressor
        decompress = load_decompressor(part.name if part else "", wheel, tools)
        heads = _heads(bundle, older, layers)
        with _no_collection():
            # What an older environment was made from has been checked then.
            indexes = [
                bundle.index(layer, head, decompress, checked=layer.head in older)
                for layer, head in zip(layers, heads)
            ]
            with bundle.refusing(LayerError):
                merged = merge(layers, indexes, manifest.requires.python)
        for path in merged.directories:
            os.mkdir(os.path.join(staging, path), 0o755)
        linked = _link(layers, merged, older, staging, processes)
        fresh = [
            (layer, index, entries)
            for layer, index, entries in zip(layers, indexes, merged.entries)
            if layer.head not in linked
        ]
        for layer, _, _ in fresh:
            if not bundle.holds(layer.member):
                raise Lacking(layer.name, bundle.path)
        write_layers(bundle, staging, fresh, decompress, processes)
        for path, target in merged.links.items():
            os.symlink(target, os.path.join(staging, path))
        bundle.check_frame()  # could not be done before where the file was still being sent
        finish(staging, manifest, python, heads, wheel)
        shutil.rmtree(tools)
        os.rename(staging, env_path(root, manifest.id))
    finally:
        shutil.rmtree(private, ignore_errors=True)
    written = sum(len(entries) for _, _, entries in fresh)
    return sum(map(len, merged.entries)) - written, written


def _link(
    layers: Sequence[Layer], merged: Merged, older: Mapping[str, str], staging: str, processes: int
) -> set[str]:
    """Take from older environments what they have; returns the heads of the layers taken."""
    known = [
        (layer.head, entries)
        for layer, entries in zip(layers, merged.entries)
        if layer.head in older
    ]
    wanted = [(older[head], entries) for head, entries in known]
    done = delta.link_layers(wanted, staging, processes)
    return {head for (head, _), whole in zip(known, done) if whole}


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Build large structures that have no cycles, without the collector looking at them often."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _heads(bundle: BundleFile, older: Mapping[str, str], layers: Sequence[Layer]) -> list[bytes]:
    """The head of every layer, from the file or from an older environment.

    Raises:
        Lacking: one is in neither.
    """
    heads = []
    for layer in layers:
        if bundle.holds(layer.head_member):
            head: bytes | None = bundle.head(layer)
        else:
            head = delta.head_of(older[layer.head], layer) if layer.head in older else None
        if head is None:
            raise Lacking(layer.name, bundle.path)
        heads.append(head)
    return heads


def _wheel(bundle: BundleFile, envs: str) -> bytes | None:
    """The zstandard wheel; None where this Python has zstd of its own.

    Raises:
        Lacking: it is neither in the file nor in an older environment.
    """
    part = bundle.manifest.decompressor
    if part is None:
        return None
    if bundle.holds(part.name):
        return bundle.part(part)
    data = delta.older_decompressor(envs, part)
    if data is None:
        raise Lacking(part.name, bundle.path)
    return data


def _require_room(path: str, layers: Sequence[Layer]) -> None:
    """Refuse before writing what will not fit."""
    needed, inodes = room_for(layers)
    faults = refusals(facts_of(path), needed, inodes)
    if faults:
        raise NodeError(
            Problem(
                what="the environment does not fit",
                where=path,
                why="; ".join(faults),
                fix="free some, or name another place with [cluster] node-root "
                "or $STAGER_NODE_ROOT",
            )
        )


def _sweep(root: str, bundle_id: str) -> None:
    """Remove what killed unpacks left, of this bundle, whose lock is held, and of others.

    An environment that lost its head, as it does to cleaners of /tmp, is such a left-over too.
    """
    incoming = os.path.join(root, "incoming")
    final = env_path(root, bundle_id)
    if os.path.lexists(final):
        os.rename(final, os.path.join(incoming, f"{bundle_id}.{time.monotonic_ns()}"))
    for name in os.listdir(incoming):
        found = _LEFT_OVER.match(name)
        if found is None:
            continue
        path = os.path.join(incoming, name)
        if found[1] == bundle_id:
            shutil.rmtree(path, ignore_errors=True)
            continue
        # Where the lock is taken, somebody is making that one.
        with contextlib.suppress(BlockingIOError), _locked(root, found[1], wait=False):
            shutil.rmtree(path, ignore_errors=True)
