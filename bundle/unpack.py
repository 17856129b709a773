"""From a bundle to an environment: checked, unpacked in parallel, published by one rename.

However many processes ask for the same bundle at the same time, one unpacks and the others wait for
it and use the result. Until the rename nothing is visible under ``envs/``; what a killed unpack
leaves in ``incoming/`` is swept by the next one of the same bundle.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pkgutil
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
from .manifest import Layer, Manifest
from .pool import share
from .problem import NodeError, Problem

STATE = ".stager"
"""Where in an environment its manifest and the heads of its layers are kept."""
_BLOCK = 4096


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
    """
    handle = os.open(lock_path(root, bundle_id), os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(handle, True)
    fcntl.flock(handle, fcntl.LOCK_SH)
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
        root: the node root, guarded by :func:`bundle.fs.secure_root`.
        expected: the bundle's id.
        python: the interpreter that the environment is for.
        processes: how many processes unpack.

    Raises:
        NodeError: the bundle is damaged, there is no room, or the place cannot be written.
    """
    started = time.monotonic()
    final = env_path(root, expected)
    if is_ready(final, python):
        return Environment(final, True, 0, 0, time.monotonic() - started)
    handle = os.open(lock_path(root, expected), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if is_ready(final, python):
            return Environment(final, True, 0, 0, time.monotonic() - started)
        _sweep(root, expected)
        with BundleFile(path, expected) as bundle:
            linked, written = _make(bundle, root, python, processes)
    except OSError as exc:
        raise NodeError(
            Problem(
                what="the environment cannot be written",
                where=exc.filename or root,
                why=exc.strerror or str(exc),
                fix="see the space and the permissions there, or set [cluster] node-root",
            )
        ) from exc
    finally:
        os.close(handle)
    return Environment(final, False, linked, written, time.monotonic() - started)


def is_ready(path: str, python: str) -> bool:
    """Whether a published environment is there; its interpreter link is renewed if it moved."""
    config = os.path.join(path, "pyvenv.cfg")
    if not os.path.isfile(config):
        return False
    link = os.path.join(path, "bin", "python")
    if os.path.realpath(link) != os.path.realpath(python):
        _interpreter(path, python)
    return True


def _make(bundle: BundleFile, root: str, python: str, processes: int) -> tuple[int, int]:
    """Build the environment in a staging directory and publish it."""
    manifest = bundle.manifest
    incoming = os.path.join(root, "incoming")
    older = delta.older_layers(os.path.join(root, "envs"), manifest)
    _require_room(incoming, [layer for layer in manifest.layers if layer.head not in older])
    staging = tempfile.mkdtemp(prefix=f"{manifest.id}.", dir=incoming)
    tools = tempfile.mkdtemp(prefix=f"{manifest.id}.", dir=incoming)
    try:
        decompress = decompressor(bundle, tools)
        indexes = [bundle.index(layer, decompress) for layer in manifest.layers]
        owned = _owned(manifest, indexes)
        _directories(staging, indexes)
        fresh, linked = [], 0
        for layer, index, entries in zip(manifest.layers, indexes, owned):
            source = older.get(layer.head)
            if source is not None and delta.link_layer(source, staging, entries):
                linked += len(entries)
            else:
                fresh.append((layer, index, entries))
        _write_layers(bundle, staging, fresh, decompress, processes)
        for index in indexes:
            for link in index.links:
                os.symlink(link.target, os.path.join(staging, link.path))
        _finish(staging, bundle, python)
        os.rename(staging, env_path(root, manifest.id))
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(tools, ignore_errors=True)
    return linked, sum(len(entries) for _, _, entries in fresh)


def _owned(manifest: Manifest, indexes: Sequence[Index]) -> list[list[Entry]]:
    """For each layer the files it writes: of equal paths in several layers the first one counts."""
    taken: dict[str, Entry] = {}
    owned = []
    for layer, index in zip(manifest.layers, indexes):
        mine = []
        for entry in index.files:
            other = taken.setdefault(entry.path, entry)
            if other is entry:
                mine.append(entry)
            elif other.sha256 != entry.sha256:
                raise NodeError(
                    Problem(
                        what="two layers hold different files of the same name",
                        where=entry.path,
                        why=f"the second one is {layer.name} {layer.version}",
                        fix="make the bundle anew with `stager build`",
                    )
                )
        owned.append(mine)
    return owned


def _directories(staging: str, indexes: Sequence[Index]) -> None:
    needed: set[str] = set()
    for index in indexes:
        for path in [entry.path for entry in index.files] + [link.path for link in index.links]:
            parent = path.rpartition("/")[0]
            while parent and parent not in needed:
                needed.add(parent)
                parent = parent.rpartition("/")[0]
    for path in sorted(needed):
        os.mkdir(os.path.join(staging, path), 0o755)


def _write_layers(
    bundle: BundleFile,
    staging: str,
    fresh: Sequence[tuple[Layer, Index, list[Entry]]],
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
        try:
            content = decompress(data, frame.unpacked_size)
        except LayerError as exc:
            raise NodeError(
                Problem(
                    what="the bundle is damaged",
                    where=bundle.path,
                    why=str(exc),
                    fix="copy it again",
                )
            ) from exc
        _write_files(staging, memoryview(content), start, entries)

    share(len(tasks), work, processes)


def _write_files(staging: str, content: memoryview, start: int, entries: list[Entry]) -> None:
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
    site = os.path.join("lib", f"python{manifest.requires.python}", "site-packages")
    for path in ("bin", site, "project", "assets", os.path.join(STATE, "site")):
        os.makedirs(os.path.join(staging, path), exist_ok=True)
    os.symlink(site, os.path.join(staging, "pkgs"))
    os.symlink("lib", os.path.join(staging, "lib64"))  # the name on Fedora and its kin
    _interpreter(staging, python)
    for name in ("python3", f"python{manifest.requires.python}"):
        os.symlink("python", os.path.join(staging, "bin", name))
    _write(os.path.join(staging, site, "_stager_patches.pth"), patches.PTH_LINE.encode() + b"\n")
    _write(os.path.join(staging, site, "_stager_patches.py"), source_of("patches"))
    heads = os.path.join(staging, STATE, "layers")
    os.makedirs(heads)
    for layer in manifest.layers:
        start = bundle.frames_start(layer) - layer.head_size
        _write(os.path.join(heads, layer.id), bundle.read(start, layer.head_size))
    _write(os.path.join(staging, STATE, "manifest.json"), manifest.to_bytes())


def _interpreter(path: str, python: str) -> None:
    """Point the environment at an interpreter of this node, replacing what was there by renames."""
    config = (
        f"home = {os.path.dirname(python)}\n"
        "include-system-site-packages = false\n"
        f"executable = {python}\n"
    )
    mark = f".{os.getpid()}"
    link = os.path.join(path, "bin", "python")
    os.symlink(python, link + mark)
    os.rename(link + mark, link)
    _write(os.path.join(path, "pyvenv.cfg" + mark), config.encode())
    os.rename(os.path.join(path, "pyvenv.cfg" + mark), os.path.join(path, "pyvenv.cfg"))


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
    with open(path, "wb") as handle:
        handle.write(data)


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
    """Remove what a killed unpack of the same bundle left; the lock is held, so nobody uses it."""
    incoming = os.path.join(root, "incoming")
    for name in os.listdir(incoming):
        if name.startswith(f"{bundle_id}."):
            shutil.rmtree(os.path.join(incoming, name), ignore_errors=True)
