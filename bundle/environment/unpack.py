"""From a bundle to an environment: checked, unpacked in parallel, published by one rename.

Of several processes that ask for one bundle, one unpacks it, and the others wait. Until the rename
nothing is visible under ``envs/``; the next unpack removes what a killed one left in ``incoming/``.
A damaged environment is built again beside it, from its sound layers and the bundle, and the two
change places in one step; jobs that use it are not waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import tempfile
import time
from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..format.archive import Arrival, BundleFile, Excerpt
from ..format.layer import Entry, Frame, Index, LayerError
from ..format.manifest import Layer, Manifest, estimate_room
from ..format.zstd import Decompress, load_decompressor
from ..node import node_root, removal
from ..node.node_root import env_path
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.files import compute_digest, disk_problem, examine_directory, list_refusals
from ..system.own_program import read_source
from . import damage, hard_links, imports, listing, patches
from .damage import MANIFEST, find_strays, is_directory, pyvenv_cfg
from .listing import HOOK, HOOK_MODULES, STATE, Merged, Window, merge, site_packages
from .process_pool import run_tasks

# --- The files of layers, written by several processes, a frame at a time ------------------------

# The bytes of a frame have been checked, but only the index, which the bundle's author made, says
# where a file begins and ends in them. So each file of a bundle that somebody else made is compared
# with its digest, which costs half as much again.

_NICENESS = 10  # while a bundle arrives: other nodes wait for what this one's relay passes on
Fresh = tuple[Layer, Index, Sequence[Entry]]  # a layer to write, its index, its files


def write_layers(
    bundle: BundleFile,
    staging: str,
    fresh: Sequence[Fresh],
    decompress: Decompress,
    processes: int,
    compare: bool,
) -> None:
    """Write the files of layers, one frame a task, in the order in which frames arrive."""
    tasks = [task for item in fresh for task in _iterate_frame_tasks(bundle, item)]

    def write(number: int) -> None:
        offset, frame, start, entries = tasks[number]
        data = bundle.frame(offset, frame.size, frame.sha256)
        with bundle.turn_into_damage(LayerError), turn_into_problem(staging):
            content = memoryview(decompress(data, frame.unpacked_size))
            _write_files(staging, content, start, entries, compare)

    niceness = _NICENESS if bundle.is_arriving else 0
    run_tasks(len(tasks), write, processes, niceness=niceness)
    if not compare:
        return
    long = [entry for _, index, entries in fresh for entry in _list_long_files(index, entries)]
    long.sort(key=lambda entry: -entry.size)

    def compare_long(number: int) -> None:
        path = os.path.join(staging, long[number].path)
        with turn_into_problem(staging), open(path, "rb") as file:
            digest = compute_digest(file.fileno())
        with bundle.turn_into_damage(LayerError):
            _compare(digest, long[number])

    run_tasks(len(long), compare_long, processes)


def _iterate_frame_tasks(
    bundle: BundleFile, item: Fresh
) -> Iterator[tuple[int, Frame, int, Sequence[Entry]]]:
    """Yield each frame with its place in the bundle and in the layer's tar, and its files."""
    layer, index, entries = item
    offset = bundle.offset(layer.member)
    starts = [entry.offset for entry in entries]
    start = 0
    for frame in index.frames:
        end = start + frame.unpacked_size
        # The last entry that begins at or before `start` may reach into this frame.
        first = max(bisect_right(starts, start) - 1, 0)
        last = bisect_right(starts, end - 1)
        yield offset, frame, start, entries[first:last]
        offset += frame.size
        start = end


def _list_long_files(index: Index, entries: Sequence[Entry]) -> list[Entry]:
    ends = list(accumulate(frame.unpacked_size for frame in index.frames))
    return [
        entry
        for entry in entries
        if entry.size and entry.offset + entry.size > ends[bisect_right(ends, entry.offset)]
    ]


def _compare(digest: str, entry: Entry) -> None:
    if digest != entry.sha256:
        raise LayerError(f"{entry.path} does not have the digest in the index of its layer")


def _write_files(
    staging: str, content: memoryview, start: int, entries: Sequence[Entry], compare: bool
) -> None:
    """Write one frame's part of each file; a file may continue in the next frame."""
    end = start + len(content)
    for entry in entries:
        begin, stop = max(entry.offset, start), min(entry.offset + entry.size, end)
        if begin > stop or (begin == stop and entry.offset < start):
            continue
        # O_NOFOLLOW, and no link in the tree yet: nothing can redirect a write.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(os.path.join(staging, entry.path), flags, entry.mode)
        try:
            position = begin - entry.offset
            part = content[begin - start : stop - start]
            if compare and len(part) == entry.size:
                _compare(hashlib.sha256(part).hexdigest(), entry)
            while part:
                written = os.pwrite(handle, part, position)
                part, position = part[written:], position + written
        finally:
            os.close(handle)


@contextlib.contextmanager
def turn_into_problem(where: str) -> Iterator[None]:
    """Turn an OSError into the NodeError about an environment that cannot be written."""
    try:
        yield
    except OSError as exc:
        full, unwritable = ProblemCode.ENVIRONMENT_DISK_FULL, ProblemCode.ENVIRONMENT_UNWRITABLE
        place = str(exc.filename or where)
        raise NodeError(disk_problem(exc, place, full, unwritable)) from exc


# --- A staged tree as a relocatable virtual environment (PEP 405), with its own files ------------


def write_own_files(
    staging: str,
    manifest: Manifest,
    python: str,
    merged: Merged,
    kept: Mapping[str, bytes],
    written: tuple[Mapping[str, Window], int],
) -> None:
    """Make a virtual environment of the tree (PEP 405), and record its sources.

    ``kept`` has heads of layers and the decompressor, by their paths; ``written`` when the files of
    linked layers were written, by the layers' heads, and the time of the first new file.
    """
    version = manifest.requires.python
    links = {**merged.links, **listing.own_links(version)}
    for path, target in links.items():
        os.symlink(target, os.path.join(staging, path))
    point_at_interpreter(staging, python)
    own = {**list_hook_files(version), MANIFEST: manifest.to_bytes(), **kept}
    for path, data in own.items():
        _write(os.path.join(staging, path), data, sync=path == MANIFEST)
    folders = listing.list_folders(merged.entries, links, own, merged.directories)
    linked, started = written
    layers = [(layer.head, linked.get(layer.head)) for layer in manifest.layers]
    # Last of all, as its time is the environment's.
    listing.write(staging, manifest.id, folders, layers, started)


def list_hook_files(python: str) -> dict[str, bytes]:
    """Return the files that every interpreter of an environment runs at start, by their paths."""
    start = f"{site_packages(python)}/{HOOK}"
    lines = {"imports": imports.PTH_LINE, "patches": patches.PTH_LINE}
    modules = (*lines, *HOOK_MODULES)
    return {
        **{f"{start}{name}.pth": line.encode() + b"\n" for name, line in lines.items()},
        **{f"{start}{name}.py": read_source(f"environment.{name}") for name in modules},
    }


def point_at_interpreter(path: str, python: str) -> None:
    """Point an environment at an interpreter of this node, by renames, if it uses another one."""
    link, config = (os.path.join(path, name) for name in ("bin/python", "pyvenv.cfg"))
    if os.path.realpath(link) == os.path.realpath(python):
        return
    mark = f".{os.getpid()}-{time.monotonic_ns()}"
    _write(config + mark, pyvenv_cfg(python))
    os.rename(config + mark, config)
    os.symlink(python, link + mark)
    os.rename(link + mark, link)  # last: if it is right, the rest is, too


def _write(path: str, data: bytes, *, sync: bool = False) -> None:
    # "x": never through a link, and never into a file that older environments share.
    with open(path, "xb") as handle:
        handle.write(data)
        if sync:  # some ms, with the journal; after a crash, the listing shows missing files
            handle.flush()
            os.fsync(handle.fileno())


# --- Assembly of an environment in private: files of older ones are linked, the rest is written


def _require_part(data: bytes | None, name: str, path: str) -> bytes:
    if data is None:  # it is not in the file, and on the node no longer
        raise NodeError(Problem(ProblemCode.LAYER_MISSING, path, {"name": name}))
    return data


def assemble(
    bundle: BundleFile, root: str, python: str, processes: int, compare: bool
) -> tuple[int, int]:
    """Build the environment of a bundle and publish it; return the files linked and written."""
    manifest = bundle.manifest
    incoming, final = os.path.join(root, "incoming"), env_path(root, manifest.id)
    older = _find_sources(root, manifest)
    _require_room(incoming, manifest, older)
    private = tempfile.mkdtemp(prefix=f"{manifest.id}.", dir=incoming)
    staging, tools = os.path.join(private, "env"), os.path.join(private, "tools")
    try:
        os.mkdir(staging, 0o700)
        os.mkdir(tools, 0o700)
        if bundle.holds(manifest.node.name):
            bundle.read_part(manifest.node)  # not needed here, but damage must be found
        kept = _read_kept_files(bundle, root, older)
        name = manifest.decompressor.name if manifest.decompressor else ""
        decompress = load_decompressor(name, kept.get(f"{STATE}/decompressor/{name}"), tools)
        # Heads in another environment were checked when that was made; this one is damaged.
        checked = {head for head, sources in older.items() if set(sources) != {final}}
        indexes, merged = _merge_layers(bundle, kept, decompress, checked)
        for path in merged.directories:
            os.mkdir(os.path.join(staging, path), 0o755)
        started = os.stat(staging).st_mtime_ns  # by the clock that files get their times from
        # Where one file is damaged, more are likely to be: no file is then linked unread.
        verify = os.path.lexists(final)
        heads = (layer.head for layer in manifest.layers)
        files = list(zip(heads, merged.entries))
        linked = hard_links.link_layers(files, older, staging, processes, verify=verify)
        fresh = _list_layers_to_write(bundle, indexes, merged, linked)
        write_layers(bundle, staging, fresh, decompress, processes, compare)
        bundle.check_frame()  # possible only now if the file was still arriving
        write_own_files(staging, manifest, python, merged, kept, (linked, started))
        _publish(staging, final)
    finally:
        removal.delete_as_far_as_possible(private)
    written = sum(len(entries) for _, _, entries in fresh)
    return sum(map(len, merged.entries)) - written, written


def _list_layers_to_write(
    bundle: BundleFile, indexes: Sequence[Index], merged: Merged, linked: Container[str]
) -> list[Fresh]:
    fresh: list[Fresh] = []
    for layer, index, entries in zip(bundle.manifest.layers, indexes, merged.entries):
        if layer.head not in linked:
            _require_part(b"" if bundle.holds(layer.member) else None, layer.name, bundle.path)
            fresh.append((layer, index, entries))
    return fresh


def _read_kept_files(
    bundle: BundleFile, root: str, older: Mapping[str, Sequence[str]]
) -> dict[str, bytes]:
    kept: dict[str, bytes] = {}
    for layer in bundle.manifest.layers:
        path = f"layers/{layer.id}"
        if bundle.holds(layer.head_member):
            data = bundle.head(layer)
        else:
            envs = older.get(layer.head, ())
            found = hard_links.read_kept_file(envs, path, layer.head)
            data = _require_part(found, layer.name, bundle.path)
        kept[f"{STATE}/{path}"] = data
    if part := bundle.manifest.decompressor:
        path = f"decompressor/{part.name}"
        if bundle.holds(part.name):
            data = bundle.read_part(part)
        else:
            envs = hard_links.list_newest_first(os.path.join(root, "envs"))
            found = hard_links.read_kept_file(envs, path, part.sha256)
            data = _require_part(found, part.name, bundle.path)
        kept[f"{STATE}/{path}"] = data
    return kept


def _merge_layers(
    bundle: BundleFile, kept: Mapping[str, bytes], decompress: Decompress, checked: Container[str]
) -> tuple[list[Index], Merged]:
    layers = bundle.manifest.layers
    heads = [(layer, kept[f"{STATE}/layers/{layer.id}"], layer.head in checked) for layer in layers]
    indexes = [bundle.index(one, head, decompress, checked=known) for one, head, known in heads]
    with bundle.turn_into_damage(LayerError):
        return indexes, merge(layers, indexes, bundle.manifest.requires.python)


def _find_sources(root: str, manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return environments that may have each layer, by head; a damaged one of this bundle too."""
    heads = [layer.head for layer in manifest.layers]
    older = hard_links.find_older_layers(os.path.join(root, "envs"), heads)
    final = env_path(root, manifest.id)
    if is_directory(final):
        older = {head: tuple({**dict.fromkeys(older.get(head, ())), final: None}) for head in heads}
    return older


def _require_room(path: str, manifest: Manifest, older: Container[str]) -> None:
    absent = [layer for layer in manifest.layers if layer.head not in older]
    if faults := list_refusals(examine_directory(path), *estimate_room(absent, manifest)):
        raise NodeError(Problem(ProblemCode.NO_ROOM, path, {"why": "; ".join(faults)}))


_AT_FDCWD, _EXCHANGE = -100, 2  # constants of renameat2(2)
_LEFT_OVER = re.compile(r"([0-9a-f]{64})\.")


class Environment(NamedTuple):
    """An environment that is ready for use."""

    path: str
    reused: bool
    linked: int  # files taken by hard link from older environments
    written: int
    seconds: float  # includes the wait for others
    mended: Problem | None = None  # the damage of the former environment; None if there was none


class Source(NamedTuple):
    """What a job knows about a bundle's file."""

    excerpt: Excerpt | None = None  # of a partial file; older environments here have the rest
    arrival: Arrival | None = None  # of a file that is unpacked while it is being transferred
    checked: bool = False  # true if the environment has just been found here without damage
    trusted: bool = False  # true if the caller made it: files are not compared with its index


def lock_path(root: str, bundle_id: str) -> str:
    """Return the file that is locked: exclusively to remove an environment, shared to use it."""
    return os.path.join(root, "locks", f"{bundle_id}.lock")


def hold_environment(root: str, bundle_id: str) -> int:
    """Keep an environment from being removed until the last copy of the descriptor is closed."""
    path, final = lock_path(root, bundle_id), env_path(root, bundle_id)
    with turn_into_problem(path):
        handle = node_root.take_lock(path, fcntl.LOCK_SH)
        os.set_inheritable(handle, True)
        with contextlib.suppress(OSError):
            os.utime(handle)  # the time of its last use, for clean_node
    if not is_directory(final):
        os.close(handle)
        raise NodeError(Problem(ProblemCode.ENVIRONMENT_GONE, final))
    return handle


@contextlib.contextmanager
def hold_during(root: str, bundle_id: str) -> Iterator[None]:
    """Keep an environment from being removed while the block runs."""
    with node_root.close_after(hold_environment(root, bundle_id)):
        yield


def unpack(
    path: str,
    *,
    root: str,
    expected: str,
    python: str,
    processes: int,
    source: Source,
) -> Environment:
    """Make sure that the environment of a bundle exists and is complete."""
    started, final = time.monotonic(), env_path(root, expected)
    linked, written, mended = 0, 0, None
    with turn_into_problem(root):
        is_sound = source.checked and is_directory(final)
        faults = [] if is_sound else damage.find_faults(final, processes)
        if faults != []:
            with node_root.hold_root(root), lock_for_making(root, expected):
                faults = damage.find_faults(final, processes)
                if faults != []:
                    _remove_leftovers(root, expected)
                    with BundleFile(path, expected, source.excerpt, source.arrival) as bundle:
                        compare = not source.trusted
                        linked, written = assemble(bundle, root, python, processes, compare)
                if faults:
                    mended = damage.describe(final, faults)
        point_at_interpreter(final, python)
    seconds = time.monotonic() - started
    return Environment(final, faults == [], linked, written, seconds, mended)


@contextlib.contextmanager
def lock_for_making(root: str, bundle_id: str) -> Iterator[None]:
    """Be the only process to make an environment; processes that use it are not waited for."""
    use = lock_path(root, bundle_id)
    make = os.path.join(root, "locks", f"{bundle_id}.making")
    with node_root.hold_lock(use, fcntl.LOCK_SH), node_root.hold_lock(make, fcntl.LOCK_EX):
        yield


def _publish(staging: str, final: str) -> None:
    """Rename an environment to its final path; a former one moves to ``incoming/``."""
    if not os.path.lexists(final):
        os.rename(staging, final)
        return
    left = find_strays(final, staging) if is_directory(final) else []
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


def _remove_leftovers(root: str, bundle_id: str) -> None:
    """Remove leftovers of killed unpacks: of this bundle, and of those not in use."""
    incoming = os.path.join(root, "incoming")
    for left_over in filter(None, map(_LEFT_OVER.match, os.listdir(incoming))):
        path = os.path.join(incoming, left_over.string)
        if left_over[1] == bundle_id:
            removal.delete_as_far_as_possible(path)
            continue
        # If the lock is taken, another process makes that environment, or uses it.
        lock, alone = lock_path(root, left_over[1]), fcntl.LOCK_EX | fcntl.LOCK_NB
        with contextlib.suppress(OSError), node_root.hold_lock(lock, alone):
            removal.delete_as_far_as_possible(path)
