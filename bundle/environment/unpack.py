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
import gc
import hashlib
import os
import re
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..format.archive import Arrival, BundleFile, Excerpt
from ..format.layer import Entry, Frame, Index, LayerError
from ..format.manifest import Layer, Manifest, room_for
from ..format.zstd import Decompress, load_decompressor
from ..node import node_root, removal
from ..node.node_root import env_path
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.files import digest_of, disk_problem, facts_of, refusals
from ..system.own_program import source_of
from . import damage, hard_links, imports, listing, patches
from .damage import MANIFEST, is_directory, pyvenv_cfg, strays
from .hard_links import LinkableLayer, Linking
from .listing import HOOK, HOOK_MODULES, STATE, Merged, Window, merge, site_packages
from .process_pool import share

# --- The files of layers, written by several processes, a frame at a time ------------------------

# The bytes of a frame have been checked, but only the index, which the bundle's author made, knows
# where a file begins and ends in them. So each file of a bundle that somebody else made is compared
# with its digest, which costs half as much again.

_NICENESS = 10
"""Of processes that unpack a bundle while it arrives. Other nodes wait for what this one's relay
passes on, which needs the same processors; nobody else waits for what is unpacked."""
Fresh = tuple[Layer, Index, Sequence[Entry]]
"""A layer that is written, its index, and the files of it that are wanted."""


@dataclass(frozen=True)
class WriteSettings:
    """The settings of writing."""

    decompress: Decompress
    """Turns a frame into its content."""
    processes: int
    """Number of processes."""
    compare: bool
    """True to compare each file with its digest."""


class _Task(NamedTuple):
    """One frame, and the files that have bytes in it."""

    offset: int
    """The start of its compressed bytes in the bundle."""
    frame: Frame
    start: int
    """The start of its content in the layer's tar."""
    entries: Sequence[Entry]


def write_layers(
    bundle: BundleFile,
    staging: str,
    fresh: Sequence[Fresh],
    work: WriteSettings,
) -> None:
    """Write the files of the given layers, one frame a task, in the order of the file.

    The frames of a file that is still being transferred arrive in that order, and a disk reads it
    best.
    """
    tasks = [task for item in fresh for task in _tasks(bundle, item)]

    def write(number: int) -> None:
        task = tasks[number]
        frame = task.frame
        data = bundle.frame(task.offset, frame.size, frame.sha256)
        with bundle.refusing(LayerError):
            content = work.decompress(data, frame.unpacked_size)
        try:
            with bundle.refusing(LayerError):
                _write_files(staging, memoryview(content), task.start, task.entries, work.compare)
        except OSError as exc:
            raise NodeError(write_problem(exc, staging)) from exc

    niceness = _NICENESS if bundle.is_arriving else 0
    share(len(tasks), write, work.processes, niceness=niceness)
    if work.compare:
        _compare_long(bundle, staging, fresh, work.processes)


def _tasks(bundle: BundleFile, item: Fresh) -> Iterator[_Task]:
    layer, index, entries = item
    offset = bundle.frames_start(layer)
    starts = [entry.offset for entry in entries]
    start = 0
    for frame in index.frames:
        end = start + frame.unpacked_size
        # The last entry that begins at or before `start` may reach into this frame.
        first = max(bisect_right(starts, start) - 1, 0)
        last = bisect_right(starts, end - 1)
        yield _Task(offset, frame, start, entries[first:last])
        offset += frame.size
        start = end


def _compare_long(
    bundle: BundleFile,
    staging: str,
    fresh: Sequence[Fresh],
    processes: int,
) -> None:
    """Compare files that span frames, the largest first; they are read again."""
    long: list[Entry] = []
    for _, index, entries in fresh:
        long += _across_frames(index, entries)
    long.sort(key=lambda entry: -entry.size)

    def work(number: int) -> None:
        entry = long[number]
        try:
            with open(os.path.join(staging, entry.path), "rb") as file:
                digest = digest_of(file.fileno())
        except OSError as exc:
            raise NodeError(write_problem(exc, staging)) from exc
        with bundle.refusing(LayerError):
            _compare(digest, entry)

    share(len(long), work, processes)


def _across_frames(index: Index, entries: Sequence[Entry]) -> Iterator[Entry]:
    ends = list(accumulate(frame.unpacked_size for frame in index.frames))
    for entry in entries:
        if not entry.size:
            continue
        frame = bisect_right(ends, entry.offset)
        if entry.offset + entry.size > ends[frame]:
            yield entry


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


def write_problem(exc: OSError, where: str) -> Problem:
    """Return the problem behind an error while writing, such as a full disk or quota."""
    full, unwritable = ProblemCode.ENVIRONMENT_DISK_FULL, ProblemCode.ENVIRONMENT_UNWRITABLE
    return disk_problem(exc, str(exc.filename or where), full, unwritable)


# --- A staged tree as a relocatable virtual environment (PEP 405), with its own files ------------


def renew(path: str, python: str) -> None:
    """Point a published environment at an interpreter, if it uses another one."""
    if os.path.realpath(os.path.join(path, "bin", "python")) != os.path.realpath(python):
        _interpreter(path, python)


@dataclass(frozen=True)
class EnvironmentOrigin:
    """The sources of an environment, and their times."""

    heads: Sequence[bytes]
    """The head of each layer."""
    wheel: bytes | None
    """The decompressor, if not this Python's own."""
    linked: Mapping[str, Window]
    """The times at which the files of linked layers were written, by the layers' heads."""
    started: int
    """The time of the first new file, in nanoseconds by the file system's clock."""


def finish(
    staging: str, manifest: Manifest, python: str, merged: Merged, origin: EnvironmentOrigin
) -> None:
    """Make a virtual environment of the tree (PEP 405), and record its sources."""
    version = manifest.requires.python
    links = own_links(version)
    for path, target in links.items():
        os.symlink(target, os.path.join(staging, path))
    _interpreter(staging, python)
    own = {**hooks(version), MANIFEST: manifest.to_bytes()}
    for layer, head in zip(manifest.layers, origin.heads):
        own[f"{STATE}/layers/{layer.id}"] = head
    if manifest.decompressor is not None and origin.wheel is not None:
        own[f"{STATE}/decompressor/{manifest.decompressor.name}"] = origin.wheel
    for path, data in own.items():
        _write(os.path.join(staging, path), data)
    _sync(os.path.join(staging, MANIFEST))
    links = {**merged.links, **links}
    folders = listing.contents(merged.entries, links, own, merged.directories)
    layers = [(layer.head, origin.linked.get(layer.head)) for layer in manifest.layers]
    # Last of all, as its time is the environment's.
    listing.write(staging, manifest.id, folders, layers, origin.started)


def own_links(python: str) -> dict[str, str]:
    """Return the targets of an environment's own links, except the interpreter, by their paths."""
    return {
        "pkgs": site_packages(python),
        "lib64": "lib",  # the name on Fedora and its kin
        "bin/python3": "python",
        f"bin/python{python}": "python",
    }


def hooks(python: str) -> dict[str, bytes]:
    """Return the files that every interpreter of an environment runs at start, by their paths."""
    start = f"{site_packages(python)}/{HOOK}"
    contents = {}
    for name, line in (("imports", imports.PTH_LINE), ("patches", patches.PTH_LINE)):
        contents[f"{start}{name}.pth"] = line.encode() + b"\n"
        contents[f"{start}{name}.py"] = source_of(f"environment.{name}")
    for name in HOOK_MODULES:
        contents[f"{start}{name}.py"] = source_of(f"environment.{name}")
    return contents


def _interpreter(path: str, python: str) -> None:
    """Point the environment at an interpreter of this node, by renames."""
    mark = f".{os.getpid()}-{time.monotonic_ns()}"
    # The link comes last: if it is right, the rest is, too.
    _write(os.path.join(path, "pyvenv.cfg" + mark), pyvenv_cfg(python))
    os.rename(os.path.join(path, "pyvenv.cfg" + mark), os.path.join(path, "pyvenv.cfg"))
    link = os.path.join(path, "bin", "python")
    os.symlink(python, link + mark)
    os.rename(link + mark, link)


def _sync(path: str) -> None:
    """Fsync a file with the journal (some ms); after a crash, the listing shows missing files."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: str, data: bytes) -> None:
    # "x": never through a link, and never into a file that older environments share.
    with open(path, "xb") as handle:
        handle.write(data)


# --- Assembly of an environment in private: files of older ones are linked, the rest is written


class MissingLayer(NodeError):
    """A layer is neither in the file nor on the node: an older environment has gone or changed."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(Problem(ProblemCode.LAYER_MISSING, path, {"name": name}))


@dataclass(frozen=True)
class AssembleOptions:
    """The settings of an assembly."""

    processes: int
    """Number of processes."""
    compare: bool = True
    """True to compare each file with its digest in the index, as for a bundle of somebody else."""


def assemble(
    bundle: BundleFile,
    root: str,
    python: str,
    how: AssembleOptions,
    publish: Callable[[str, str], None],
) -> tuple[int, int]:
    """Build the environment of a bundle and publish it; return the files linked and written.

    Raises:
        NodeError: the bundle is damaged, or there is no room.
        MissingLayer: a layer is neither in the file nor in an older environment.
    """
    manifest = bundle.manifest
    layers = manifest.layers
    incoming, final = os.path.join(root, "incoming"), os.path.join(root, "envs", manifest.id)
    older = _sources(root, manifest)
    _require_room(incoming, manifest, [layer for layer in layers if layer.head not in older])
    private = tempfile.mkdtemp(prefix=f"{manifest.id}.", dir=incoming)
    staging, tools = os.path.join(private, "env"), os.path.join(private, "tools")
    try:
        os.mkdir(staging, 0o700)
        os.mkdir(tools, 0o700)
        if bundle.holds(manifest.node.name):
            bundle.part(manifest.node)  # not needed here, but damage must be found
        content = _content_of(bundle, root, older, tools)
        merged = content.merged
        for path in merged.directories:
            os.mkdir(os.path.join(staging, path), 0o755)
        started = os.stat(staging).st_mtime_ns  # by the clock that files get their times from
        # Where one file is damaged, more are likely to be: no file is then linked unread.
        linking = Linking(how.processes, verify=os.path.lexists(final))
        linked = _fill(bundle, staging, content, older, linking, compare=how.compare)
        for path, target in merged.links.items():
            os.symlink(target, os.path.join(staging, path))
        bundle.check_frame()  # possible only now if the file was still arriving
        origin = EnvironmentOrigin(content.heads, content.wheel, linked, started)
        finish(staging, manifest, python, merged, origin)
        publish(staging, final)
    finally:
        removal.sweep(private)
    total = sum(map(len, merged.entries))
    written = 0
    for layer, entries in zip(layers, merged.entries):
        if layer.head not in linked:
            written += len(entries)
    return total - written, written


@dataclass(frozen=True)
class _Content:
    decompress: Decompress
    """Turns a frame into its content."""
    wheel: bytes | None
    """The wheel with the decompressor, unless it is this Python's own."""
    heads: list[bytes]
    """The head of each layer."""
    indexes: list[Index]
    """The index of each layer."""
    merged: Merged
    """The files that each of them writes."""


def _content_of(
    bundle: BundleFile, root: str, older: Mapping[str, Sequence[str]], tools: str
) -> _Content:
    layers, part = bundle.manifest.layers, bundle.manifest.decompressor
    wheel = _wheel(bundle, os.path.join(root, "envs"))
    decompress = load_decompressor(part.name if part else "", wheel, tools)
    heads = _heads(bundle, older, layers)
    final = os.path.join(root, "envs", bundle.manifest.id)
    # Heads in another environment were checked when that was made; this one is damaged.
    checked = {head for head, sources in older.items() if set(sources) != {final}}
    with _no_collection():
        indexes = [
            bundle.index(layer, head, decompress, checked=layer.head in checked)
            for layer, head in zip(layers, heads)
        ]
        with bundle.refusing(LayerError):
            merged = merge(layers, indexes, bundle.manifest.requires.python)
    return _Content(decompress, wheel, heads, indexes, merged)


def _fill(
    bundle: BundleFile,
    staging: str,
    content: _Content,
    older: Mapping[str, Sequence[str]],
    linking: Linking,
    *,
    compare: bool,
) -> dict[str, Window]:
    """Link files of older environments, write the rest; return write times by linked head."""
    layers = bundle.manifest.layers
    linked = _link(layers, content.merged, older, staging, linking)
    fresh = [
        (layer, index, entries)
        for layer, index, entries in zip(layers, content.indexes, content.merged.entries)
        if layer.head not in linked
    ]
    for layer, _, _ in fresh:
        if not bundle.holds(layer.member):
            raise MissingLayer(layer.name, bundle.path)
    write_layers(
        bundle, staging, fresh, WriteSettings(content.decompress, linking.processes, compare)
    )
    return linked


def _sources(root: str, manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return environments that may have each layer, by head; a damaged one of this bundle too."""
    heads = [layer.head for layer in manifest.layers]
    older = hard_links.older_layers(os.path.join(root, "envs"), heads)
    final = os.path.join(root, "envs", manifest.id)
    if os.path.isdir(final) and not os.path.islink(final):
        for head in heads:
            older[head] = tuple(dict.fromkeys((*older.get(head, ()), final)))
    return older


def _link(
    layers: Sequence[Layer],
    merged: Merged,
    older: Mapping[str, Sequence[str]],
    staging: str,
    linking: Linking,
) -> dict[str, Window]:
    wanted = [
        LinkableLayer(layer.head, older[layer.head], entries)
        for layer, entries in zip(layers, merged.entries)
        if layer.head in older
    ]
    return hard_links.link_layers(wanted, staging, linking)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector while large structures without cycles are built."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _heads(
    bundle: BundleFile, older: Mapping[str, Sequence[str]], layers: Sequence[Layer]
) -> list[bytes]:
    heads = []
    for layer in layers:
        if bundle.holds(layer.head_member):
            head: bytes | None = bundle.head(layer)
        else:
            head = hard_links.head_of(older.get(layer.head, ()), layer)
        if head is None:
            raise MissingLayer(layer.name, bundle.path)
        heads.append(head)
    return heads


def _wheel(bundle: BundleFile, envs: str) -> bytes | None:
    """Return the zstandard wheel; None if this Python has its own zstd."""
    part = bundle.manifest.decompressor
    if part is None:
        return None
    if bundle.holds(part.name):
        return bundle.part(part)
    data = hard_links.older_decompressor(envs, part)
    if data is None:
        raise MissingLayer(part.name, bundle.path)
    return data


def _require_room(path: str, manifest: Manifest, layers: Sequence[Layer]) -> None:
    needed, inodes = room_for(layers, manifest)
    faults = refusals(facts_of(path), needed, inodes)
    if faults:
        raise NodeError(Problem(ProblemCode.NO_ROOM, path, {"why": "; ".join(faults)}))


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
