"""From a bundle to an environment: checked, unpacked in parallel, published by one rename.

However many processes ask for the same bundle at the same time, one unpacks and the others wait for
it and use the result. Until the rename nothing is visible under ``envs/``; what a killed unpack
leaves in ``incoming/`` is swept by the next one of the same bundle.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pkgutil
import re
import shutil
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import delta, patches
from .archive import BundleFile, Decompress, decompressor
from .fs import facts_of, refusals
from .layer import Entry, Index, LayerError
from .manifest import Layer
from .merge import STATE, merge, site_packages
from .pool import share
from .problem import NodeError, Problem

_BLOCK = 4096
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
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
        NodeError: the lock cannot be made or taken.
    """
    path = lock_path(root, bundle_id)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        os.set_inheritable(handle, True)
        fcntl.flock(handle, fcntl.LOCK_SH)
    except OSError as exc:
        raise NodeError(_write_problem(exc, path)) from exc
    return handle


@contextlib.contextmanager
def using(root: str, bundle_id: str) -> Iterator[None]:
    """Keep an environment from being removed for as long as the block runs."""
    handle = hold(root, bundle_id)
    try:
        yield
    finally:
        os.close(handle)


def unpack(path: str, *, root: str, expected: str, python: str, processes: int) -> Environment:
    """Make sure that the environment of a bundle is there, and complete.

    Args:
        path: the bundle.
        root: the node root, guarded by :func:`bundle.root.secure_root`.
        expected: the bundle's id.
        python: the interpreter that the environment is for.
        processes: how many processes unpack.

    Raises:
        NodeError: the bundle is damaged, there is no room, or the place cannot be written.
    """
    started = time.monotonic()
    final = env_path(root, expected)
    linked = written = 0
    try:
        reused = is_ready(final, python)
        if not reused:
            with _locked(root, expected):
                reused = is_ready(final, python)
                if not reused:
                    _sweep(root, expected)
                    with BundleFile(path, expected) as bundle:
                        linked, written = _make(bundle, root, python, processes)
    except OSError as exc:
        raise NodeError(_write_problem(exc, root)) from exc
    return Environment(final, reused, linked, written, time.monotonic() - started)


def is_ready(path: str, python: str) -> bool:
    """Whether a published environment is there; its interpreter link is renewed if it moved."""
    for name in ("pyvenv.cfg", "bin", os.path.join(STATE, "manifest.json")):
        if not os.path.exists(os.path.join(path, name)):
            return False  # never made, or cleared away in part, as cleaners of /tmp do
    link = os.path.join(path, "bin", "python")
    if os.path.realpath(link) != os.path.realpath(python):
        _interpreter(path, python)
    return True


@contextlib.contextmanager
def _locked(root: str, bundle_id: str, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of an environment for oneself alone.

    Raises:
        BlockingIOError: somebody else holds it, and ``wait`` is false.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(lock_path(root, bundle_id), flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def _make(bundle: BundleFile, root: str, python: str, processes: int) -> tuple[int, int]:
    """Build the environment in a private directory and publish it; files linked and written."""
    manifest = bundle.manifest
    incoming = os.path.join(root, "incoming")
    older = delta.older_layers(os.path.join(root, "envs"), manifest)
    _require_room(incoming, [layer for layer in manifest.layers if layer.head not in older])
    private = tempfile.mkdtemp(prefix=f"{manifest.id}.", dir=incoming)
    staging, tools = os.path.join(private, "env"), os.path.join(private, "tools")
    try:
        os.mkdir(staging, 0o700)
        os.mkdir(tools, 0o700)
        bundle.part(manifest.node)  # not needed here; but a damaged bundle is to be found out
        decompress = decompressor(bundle, tools)
        indexes = [bundle.index(layer, decompress) for layer in manifest.layers]
        with bundle.refusing(LayerError):
            merged = merge(manifest.layers, indexes, manifest.requires.python)
        for path in merged.directories:
            os.mkdir(os.path.join(staging, path), 0o755)
        fresh, linked = [], 0
        for layer, index, entries in zip(manifest.layers, indexes, merged.entries):
            source = older.get(layer.head)
            if source is not None and delta.link_layer(source, staging, entries):
                linked += len(entries)
            else:
                fresh.append((layer, index, entries))
        _write_layers(bundle, staging, fresh, decompress, processes)
        for path, target in merged.links.items():
            os.symlink(target, os.path.join(staging, path))
        _finish(staging, bundle, python)
        shutil.rmtree(tools)
        os.rename(staging, env_path(root, manifest.id))
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return linked, sum(len(entries) for _, _, entries in fresh)


def _write_layers(
    bundle: BundleFile,
    staging: str,
    fresh: Sequence[tuple[Layer, Index, Sequence[Entry]]],
    decompress: Decompress,
    processes: int,
) -> None:
    """Write the files of the given layers, one frame a task, the largest frames first."""
    tasks = []
    for layer, index, entries in fresh:
        offset, start = bundle.frames_start(layer), 0
        starts = [entry.offset for entry in entries]
        for frame in index.frames:
            end = start + frame.unpacked_size
            # The last entry that begins at or before `start` may reach into this frame.
            first = max(bisect_right(starts, start) - 1, 0)
            last = bisect_right(starts, end - 1)
            tasks.append((offset, frame, start, entries[first:last]))
            offset, start = offset + frame.size, end
    tasks.sort(key=lambda task: -task[1].unpacked_size)

    def work(number: int) -> None:
        offset, frame, start, entries = tasks[number]
        data = bundle.frame(offset, frame.size, frame.sha256)
        with bundle.refusing(LayerError):
            content = decompress(data, frame.unpacked_size)
        try:
            _write_files(staging, memoryview(content), start, entries)
        except OSError as exc:
            raise NodeError(_write_problem(exc, staging)) from exc

    share(len(tasks), work, processes)


def _write_files(staging: str, content: memoryview, start: int, entries: Sequence[Entry]) -> None:
    """Write what one frame holds of each file; a file may go on in the next frame."""
    end = start + len(content)
    for entry in entries:
        begin, stop = max(entry.offset, start), min(entry.offset + entry.size, end)
        if begin > stop or (begin == stop and entry.offset < start):
            continue
        # O_NOFOLLOW and no link in the tree yet: nothing can redirect what is written.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(os.path.join(staging, entry.path), flags, entry.mode)
        try:
            place = begin - entry.offset
            part = content[begin - start : stop - start]
            while part:
                written = os.pwrite(handle, part, place)
                part, place = part[written:], place + written
        finally:
            os.close(handle)


def _finish(staging: str, bundle: BundleFile, python: str) -> None:
    """Make a virtual environment of the tree (PEP 405), and note what it was made from."""
    manifest = bundle.manifest
    site = site_packages(manifest.requires.python)
    os.symlink(site, os.path.join(staging, "pkgs"))
    os.symlink("lib", os.path.join(staging, "lib64"))  # the name on Fedora and its kin
    _interpreter(staging, python)
    for name in ("python3", f"python{manifest.requires.python}"):
        os.symlink("python", os.path.join(staging, "bin", name))
    _write(os.path.join(staging, site, "_stager_patches.pth"), patches.PTH_LINE.encode() + b"\n")
    _write(os.path.join(staging, site, "_stager_patches.py"), source_of("patches"))
    for layer in manifest.layers:
        start = bundle.frames_start(layer) - layer.head_size
        head = bundle.read(start, layer.head_size)
        _write(os.path.join(staging, STATE, "layers", layer.id), head)
    # The last file of all: its time is the environment's, see bundle.delta.
    _write(os.path.join(staging, STATE, "manifest.json"), manifest.to_bytes())


def _interpreter(path: str, python: str) -> None:
    """Point the environment at an interpreter of this node, replacing what was there by renames."""
    config = (
        f"home = {os.path.dirname(python)}\n"
        "include-system-site-packages = false\n"
        f"executable = {python}\n"
    )
    mark = f".{os.getpid()}-{time.monotonic_ns()}"
    # The link comes last: where it is right, all is.
    _write(os.path.join(path, "pyvenv.cfg" + mark), config.encode())
    os.rename(os.path.join(path, "pyvenv.cfg" + mark), os.path.join(path, "pyvenv.cfg"))
    link = os.path.join(path, "bin", "python")
    os.symlink(python, link + mark)
    os.rename(link + mark, link)


def source_of(name: str) -> bytes:
    """The source of a module of this package, from the directory or the zip it was loaded from.

    Raises:
        NodeError: there is none.
    """
    data = pkgutil.get_data(__package__, f"{name}.py")
    if data is None:
        raise NodeError(Problem("the node program is incomplete", name, "no source", "build again"))
    return data


def _write(path: str, data: bytes) -> None:
    # "x": never through a link, and never into a file that older environments share.
    with open(path, "xb") as handle:
        handle.write(data)


def _write_problem(exc: OSError, where: str) -> Problem:
    full = exc.errno in _NO_ROOM
    return Problem(
        what="the environment does not fit" if full else "the environment cannot be written",
        where=str(exc.filename or where),
        why=exc.strerror or str(exc),
        fix="see the space, the inodes and the permissions there, or name another place with "
        "[cluster] node-root or $STAGER_NODE_ROOT",
    )


def room_for(layers: Sequence[Layer]) -> tuple[int, int]:
    """Bytes and inodes that unpacking these layers takes: file systems hand out whole blocks."""
    files = sum(layer.files for layer in layers)
    size = sum(layer.unpacked_size for layer in layers)
    return size + files * _BLOCK // 2, files + files // 4 + 64


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
