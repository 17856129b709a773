"""Making layers: one for each wheel, the project, the trainer and each asset; several at a time."""

from __future__ import annotations

import gc
import io
import logging
import multiprocessing
import os
import resource
import signal
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from bundle.format.layer import HEAD_PREFIX, LayerError, head_summary, origin_of
from bundle.format.manifest import Layer
from bundle.format.path_limits import excess
from bundle.protocol.digest import Digest

from ..core.deletion import remove
from ..core.errors import StagerError, WheelError
from ..core.regular_files import opened
from ..core.store import Store, cannot_write
from ..core.values import Target
from .bytecode import bytecode_path, compile_module
from .layer_file import Added, LayerWriter
from .parallel_compile import compiling
from .parent_death import end_with_parent
from .source import LayerSource, layer_id, origin
from .tree import Tree, digest_of
from .wheel import add_wheel

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with the name of a finished layer, the number done, and the number to make."""

_THREADS = 4
"""Frames of one layer that are compressed at a time: the largest wheel must neither keep a build
waiting nor fill the memory."""


@dataclass(frozen=True, kw_only=True)
class MadeLayers:
    """All layers of a bundle, in the order of the sources, each once."""

    layers: tuple[Layer, ...]
    """Descriptions of the layers; the files lie in the store under their ids."""
    built: int
    """Number of layers that were made now."""
    reused: int
    """Number of layers that the store had already."""
    notes: tuple[str, ...]
    """Notes for the user about the layers."""


def make_layers(
    sources: Sequence[LayerSource],
    *,
    store: Store,
    target: Target,
    jobs: int,
    progress: Progress = lambda name, done, total: None,
) -> MadeLayers:
    """Make every layer that is not in the store yet. The store's lock must be held.

    Args:
        sources: the sources of the layers.
        store: the offline root, which keeps layers.
        target: the interpreter and platform they are for.
        jobs: number of processes at a time.
        progress: called for each finished layer.

    Raises:
        WheelError: one or more wheels are unsound; all of them are reported.
        SpaceError: there is not enough room in the store.
    """
    ids = {layer_id(source, target): source for source in sources}
    missing = {key: source for key, source in ids.items() if not _usable(store, key)}
    if missing:
        # A spool holds a layer unpacked; there are only `jobs` at a time.
        spools = sorted(map(_spooled, missing.values()), reverse=True)[:jobs]
        room = sum(source.size for source in missing.values()) * 3 // 2 + sum(spools)
        store.require_space(room, "the layers")
        _require_files(min(jobs, len(missing)))
        _build_all(missing, store=store, target=target, jobs=jobs, progress=progress)
    return MadeLayers(
        layers=tuple(_describe(store, key, source) for key, source in ids.items()),
        built=len(missing),
        reused=len(ids) - len(missing),
        notes=() if target.is_host_python else (_no_bytecode(target),),
    )


def _require_files(processes: int) -> None:
    """Refuse a limit of open files with which the server that forks processes would crash."""
    needed, limit = 24 + 3 * processes, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < needed:
        raise StagerError(
            f"too few files may be open to make the layers: {limit}, where {needed} are needed",
            hint="allow more in this shell: ulimit -n 1024",
        )


def _spooled(source: LayerSource) -> int:
    """Return the bytes that a source takes while its layer is made: unpacked, with bytecode."""
    if source.wheel is None:
        return source.size
    try:
        with zipfile.ZipFile(source.wheel) as archive:
            members = [(member.filename, member.file_size) for member in archive.infolist()]
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return source.size  # it is refused with a message of its own
    total = 0
    for name, size in members:
        total += size * 5 // 2 if name.endswith(".py") else size
    return total


def _no_bytecode(target: Target) -> str:
    """Return a note on a bundle without bytecode: only the running interpreter's can be made."""
    return (
        f"no bytecode is included: it can be compiled for Python {Target.of_host().python} only, "
        f"which runs this, and the bundle is for {target.python}; the first imports on each node "
        f"take about twice as long. Run stager with Python {target.python} to avoid that"
    )


def _usable(store: Store, key: Digest) -> bool:
    """Return whether the store has the layer, with the origin its id says, whole by its length.

    Any other file in its place is removed. The frames are checked when they are read: to make a
    bundle, and to unpack it.

    Raises:
        StagerError: it cannot be read.
    """
    path = store.layer(key)
    try:
        with opened(path) as handle:
            prefix = handle.read(HEAD_PREFIX)
            summary = head_summary(prefix)
            made_from = origin_of(prefix + handle.read(summary.origin_size))
            if made_from.id == key and summary.size == os.fstat(handle.fileno()).st_size:
                return True
        log.debug("%s: %s %s", path, made_from.name, made_from.version)
    except FileNotFoundError:
        return False
    except LayerError as exc:
        log.debug("%s: %s", path, exc)
    except OSError as exc:
        raise StagerError(
            f"{path}: {exc.strerror or exc}", hint="make it readable, or remove it"
        ) from exc
    log.warning("the stored layer %s is damaged, or is another one, and is made again", key)
    remove(path)
    return False


def _describe(store: Store, key: Digest, source: LayerSource) -> Layer:
    with opened(store.layer(key)) as handle:
        prefix = handle.read(HEAD_PREFIX)
        summary = head_summary(prefix)
        head = prefix + handle.read(summary.head_size - HEAD_PREFIX)
    return Layer(
        id=key,
        kind=source.kind,
        name=source.name,
        version=source.version,
        head=Digest.of(head),
        head_size=summary.head_size,
        size=summary.size,
        unpacked_size=summary.unpacked_size,
        files=summary.files,
    )


def _build_all(
    missing: dict[Digest, LayerSource],
    *,
    store: Store,
    target: Target,
    jobs: int,
    progress: Progress,
) -> None:
    """Build each layer in a process of its own, the largest first.

    Raises:
        StagerError: layers that cannot be built; all of them.
    """
    queue = sorted(missing.values(), key=lambda source: source.size)
    scratch = store.scratch("spool")
    builders = _Builders(_Work(target=target, store=store, scratch=scratch, jobs=jobs))
    faults: list[StagerError] = []
    done = 0
    try:
        while queue or builders.running:
            while queue and len(builders.running) < jobs:
                builders.start(queue.pop())
            for source, fault in builders.wait():
                if fault is None:
                    done += 1
                    progress(f"{source.name} {source.version}".strip(), done, len(missing))
                    continue
                faults.append(fault)
                if not isinstance(fault, WheelError):
                    queue.clear()  # no room, or no memory: the others would end alike
    finally:
        builders.kill()
        remove(scratch)
    if faults:
        raise _joined(faults)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The settings that all processes of a build share."""

    target: Target
    """The interpreter and platform the layers are for."""
    store: Store
    """The offline root."""
    scratch: Path
    """A directory on the store's own disk for unfinished layers."""
    jobs: int
    """Number of layers made at a time."""


class _Builders:
    """The processes that build layers, forked from one prepared server.

    A fresh process for each wheel keeps one wheel's state (interned strings, which marshal's output
    depends on in some Python versions) out of the next one's bytes, and gives its memory back.
    """

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self.running: dict[Connection, tuple[BaseProcess, LayerSource]] = {}

    def start(self, source: LayerSource) -> None:
        """Start a process for one layer."""
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_build_one, args=(source, self._work, sender))
        with _setting_up():
            process.start()
            self.running[receiver] = (process, source)
        sender.close()

    def wait(self) -> Iterator[tuple[LayerSource, StagerError | None]]:
        """Wait for a process to end; yield the outcome of each that has ended."""
        for connection in wait(list(self.running)):
            if isinstance(connection, Connection):
                process, source = self.running.pop(connection)
                yield source, _outcome(connection, process, source)

    def kill(self) -> None:
        """Kill the processes that still run."""
        for process, _ in self.running.values():
            process.kill()
            process.join()


@contextmanager
def _setting_up() -> Iterator[None]:
    """Surround the start of a process, and with the first one that of the server.

    Signals such as Ctrl-C wait until the process is recorded, to be killed like the others. They
    stay blocked in the children, which inherit the mask but no handler: a terminal sends Ctrl-C to
    the whole group, and each child would die with a traceback of its own.

    The main module is replaced by an empty one, because multiprocessing runs it again in every
    child: here it is the command line, as much work as a small layer, elsewhere a user's script.
    """
    resource_tracker.ensure_running()  # starting it lets those signals through again
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outcome(
    connection: Connection, process: BaseProcess, source: LayerSource
) -> StagerError | None:
    """Return what a finished process reports: None, or the error that stopped it."""
    try:
        fault = connection.recv()
    except EOFError:
        process.join()
        fault = StagerError(
            f"the process that made the layer of {source.name} ended with status "
            f"{process.exitcode}",
            hint="status -9 is usually a machine out of memory: free some, or give --jobs 1",
        )
    process.join()
    connection.close()
    return fault if isinstance(fault, StagerError) else None


def _joined(faults: list[StagerError]) -> StagerError:
    """Return one error for all; one that is no wheel's fault goes first: it stopped the rest."""
    faults = sorted(faults, key=lambda fault: isinstance(fault, WheelError))
    if len(faults) == 1:
        return faults[0]
    lines = [line for fault in faults for line in (fault.message, *fault.context)]
    return type(faults[0])(
        f"{len(faults)} layers cannot be built", hint=faults[0].hint, context=lines
    )


def _build_one(source: LayerSource, work: _Work, report: Connection) -> None:
    """Build one layer in a child process; report None or the error that stopped it."""
    end_with_parent()  # which is the server
    final = work.store.layer(layer_id(source, work.target))
    fault: StagerError | None = None
    gc.disable()  # this process ends with its layer; compiling is 7 % faster
    try:
        partial = work.scratch / final.name
        _write_layer(source, work, partial)
        # Not synced to the disk, which would cost more than the compression: a layer that a crash
        # of the machine damaged is found by its digests and made again.
        work.store.open_up(partial)
        partial.replace(final)
    except StagerError as exc:
        fault = exc
    except OSError as exc:
        fault = _failed(source, final, exc)
    with suppress(BrokenPipeError):  # the parent is gone
        report.send(fault)


def _write_layer(source: LayerSource, work: _Work, path: Path) -> None:
    target = work.target
    with LayerWriter(work.scratch, min(work.jobs, _THREADS)) as writer:
        if source.wheel is not None:
            with compiling(source.wheel, target, work.scratch, work.jobs, source.prune) as modules:
                add_wheel(writer, source.wheel, target, source.prune, modules)
        elif source.tree is not None:
            _add_tree(writer, source, target)
        writer.write(path, origin(source, target))


def _failed(source: LayerSource, final: Path, exc: OSError) -> StagerError:
    if exc.filename is not None and not Path(exc.filename).is_relative_to(final.parents[1]):
        return _changed(source, f"{exc.filename}: {exc.strerror}")
    return cannot_write(final, exc)


def _add_tree(writer: LayerWriter, source: LayerSource, target: Target) -> None:
    """Add the files of a project or asset; a project's modules with their bytecode.

    Raises:
        StagerError: the files have changed since the layer's id was made.
    """
    tree = source.tree or Tree(files=(), links=(), skipped=())
    compiled = source.kind != "asset" and target.is_host_python
    digests = []
    for file in tree.files:
        path = f"{source.prefix}/{file.path}"
        executable = file.mode == 0o755
        with file.source.open("rb") as stream:
            if compiled and path.endswith(".py"):
                added = _add_module(writer, path, stream.read(), target, executable=executable)
            else:
                added = writer.add(path, stream, executable=executable)
        digests.append(added.sha256.hex())
    for path, goal in tree.links:
        writer.link(f"{source.prefix}/{path}", goal)
    if digest_of(tree, digests) != source.digest:
        raise _changed(source, "files of it have other contents than a moment ago")


def _add_module(
    writer: LayerWriter, path: str, text: bytes, target: Target, *, executable: bool
) -> Added:
    """Add a module, and its bytecode if it compiles."""
    added = writer.add(path, io.BytesIO(text), executable=executable)
    bytecode = compile_module(text, path)
    cached = bytecode_path(path, target)
    if bytecode is not None and not excess(cached):
        writer.add(cached, io.BytesIO(bytecode))
    return added


def _changed(source: LayerSource, how: str) -> StagerError:
    return StagerError(
        f"{source.kind} {source.name} changed while it was being packed: {how}",
        hint="something else writes there; run the command again when it is done, or leave those "
        "files out with project.exclude",
    )
