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
from .layer_file import LayerWriter
from .parallel_compile import compiling
from .parent_death import end_with_parent
from .source import Source, layer_id, origin
from .tree import Tree, digest_of
from .wheel import add_wheel

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with what was just made, how many layers are done, and how many there are to make."""

_THREADS = 4
"""Frames of one layer that are compressed at a time: the largest wheel must not be the last one at
work for long, nor fill the memory."""


@dataclass(frozen=True, kw_only=True)
class MadeLayers:
    """All layers of a bundle, in the order of the sources; of equal ones there is one."""

    layers: tuple[Layer, ...]
    """What each one is; the files lie in the store under their ids."""
    built: int
    """How many were made now."""
    reused: int
    """How many were there already."""
    notes: tuple[str, ...]
    """What the user should know about them."""


def make_layers(
    sources: Sequence[Source],
    *,
    store: Store,
    target: Target,
    jobs: int,
    progress: Progress = lambda name, done, total: None,
) -> MadeLayers:
    """Make whatever layer is not in the store yet. The store's lock must be held.

    Args:
        sources: what to make layers from.
        store: where layers live.
        target: the interpreter and platform they are for.
        jobs: how many processes work at a time.
        progress: told about each finished layer.

    Raises:
        WheelError: one or more wheels are unsound; all of them are reported.
        SpaceError: there is not enough room in the store.
    """
    ids = {layer_id(source, target): source for source in sources}
    missing = {key: source for key, source in ids.items() if not _usable(store, key)}
    if missing:
        # What is spooled lies there unpacked, and only `jobs` at a time.
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
    """Refuse to start processes where the server that forks them would fail, with a traceback."""
    needed, most = 24 + 3 * processes, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most < needed:
        raise StagerError(
            f"too few files may be open to make the layers: {most}, where {needed} are needed",
            hint="allow more in this shell: ulimit -n 1024",
        )


def _spooled(source: Source) -> int:
    """Bytes that a source takes while its layer is made: unpacked, with its bytecode."""
    if source.wheel is None:
        return source.size
    try:
        with zipfile.ZipFile(source.wheel) as archive:
            members = [(member.filename, member.file_size) for member in archive.infolist()]
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return source.size  # it is refused with a message of its own
    return sum(size * 5 // 2 if name.endswith(".py") else size for name, size in members)


def _no_bytecode(target: Target) -> str:
    """What it costs that only the running interpreter's own bytecode can be compiled."""
    return (
        f"no bytecode is included: it can be compiled for Python {Target.of_host().python} only, "
        f"which runs this, and the bundle is for {target.python}; the first imports on each node "
        f"take about twice as long. Run stager with Python {target.python} to avoid that"
    )


def _usable(store: Store, key: Digest) -> bool:
    """Tell whether the layer is there, made from what its id says, and whole by its length.

    Any other file in its place is removed. The frames are checked wherever they are read: when a
    bundle is made of them, and when it is unpacked.

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


def _describe(store: Store, key: Digest, source: Source) -> Layer:
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
    missing: dict[Digest, Source], *, store: Store, target: Target, jobs: int, progress: Progress
) -> None:
    """Build each layer in a process of its own, forked from one prepared server.

    A fresh process for each wheel keeps one wheel's state (interned strings, which marshal's output
    depends on in some Python versions) out of the next one's bytes, and gives its memory back.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    queue = sorted(missing.items(), key=lambda item: item[1].size)
    running: dict[Connection, tuple[BaseProcess, Source]] = {}
    faults: list[StagerError] = []
    done = 0
    scratch = store.scratch("spool")
    try:
        while queue or running:
            while queue and len(running) < jobs:
                _, source = queue.pop()
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=_build_one,
                    args=(source, target, store, scratch, jobs, there),
                )
                with _setting_up():
                    process.start()
                    running[here] = (process, source)
                there.close()
            for connection in wait(list(running)):
                if not isinstance(connection, Connection):
                    continue
                finished, source = running.pop(connection)
                fault = _outcome(connection, finished, source)
                if fault is not None:
                    faults.append(fault)
                    if not isinstance(fault, WheelError):
                        queue.clear()  # no room, or no memory: the others would end alike
                    continue
                done += 1
                progress(f"{source.name} {source.version}".strip(), done, len(missing))
    finally:
        for left, _ in running.values():
            left.kill()
            left.join()
        remove(scratch)
    if faults:
        raise _joined(faults)


@contextmanager
def _setting_up() -> Iterator[None]:
    """Surround the start of a process, and with the first one that of the server.

    Ctrl-C and its like wait until the process is known, to be ended like the others. They are
    blocked in the children for good, by inheritance, as a handler would not be: a terminal sends
    Ctrl-C to all of the group, and each would die with a traceback of its own.

    The main module is a blank one, because multiprocessing runs it again in every child: that is
    the command line here, as much work as a small layer, and elsewhere it is somebody's script.
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


def _outcome(connection: Connection, process: BaseProcess, source: Source) -> StagerError | None:
    """What a finished process reports: None, or the error that stopped it."""
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
    """One error for all of them; what is no wheel's fault goes first, for it stopped the rest."""
    faults = sorted(faults, key=lambda fault: isinstance(fault, WheelError))
    if len(faults) == 1:
        return faults[0]
    lines = [line for fault in faults for line in (fault.message, *fault.context)]
    return type(faults[0])(
        f"{len(faults)} layers cannot be built", hint=faults[0].hint, context=lines
    )


def _build_one(
    source: Source, target: Target, store: Store, scratch: Path, jobs: int, report: Connection
) -> None:
    """Build one layer in a child process; the answer is None or the error that stopped it."""
    end_with_parent()  # which is the server
    final = store.layer(layer_id(source, target))
    partial = scratch / final.name
    fault: StagerError | None = None
    gc.disable()  # this process ends with its layer; compiling is 7 % faster
    try:
        with LayerWriter(scratch, min(jobs, _THREADS)) as writer:
            if source.wheel is not None:
                with compiling(source.wheel, target, scratch, jobs, source.prune) as ahead:
                    add_wheel(writer, source.wheel, target, source.prune, ahead)
            elif source.tree is not None:
                _add_tree(writer, source, target)
            writer.write(partial, origin(source, target))
        # Not synced to the disk, which would cost more than the compression: a layer that a crash
        # of the machine damaged is found by its digests and made again.
        store.open_up(partial)
        partial.replace(final)
    except StagerError as exc:
        fault = exc
    except OSError as exc:
        fault = _failed(source, final, exc)
    with suppress(BrokenPipeError):  # nobody is left to hear it
        report.send(fault)


def _failed(source: Source, final: Path, exc: OSError) -> StagerError:
    if exc.filename is not None and not Path(exc.filename).is_relative_to(final.parents[1]):
        return _changed(source, f"{exc.filename}: {exc.strerror}")
    return cannot_write(final, exc)


def _add_tree(writer: LayerWriter, source: Source, target: Target) -> None:
    """Add the files of a project or asset; a project's modules with their bytecode.

    Raises:
        StagerError: the files are not any more what they were when the layer's id was made.
    """
    tree = source.tree or Tree(files=(), links=(), skipped=())
    compiled = source.kind != "asset" and target.is_host_python
    digests = []
    for file in tree.files:
        path = f"{source.prefix}/{file.path}"
        with file.source.open("rb") as stream:
            if not (compiled and path.endswith(".py")):
                added = writer.add(path, stream, executable=file.mode == 0o755)
            else:
                text = stream.read()
                added = writer.add(path, io.BytesIO(text), executable=file.mode == 0o755)
                bytecode = compile_module(text, path)
                cached = bytecode_path(path, target)
                if bytecode is not None and not excess(cached):
                    writer.add(cached, io.BytesIO(bytecode))
        digests.append(added.sha256.hex())
    for path, goal in tree.links:
        writer.link(f"{source.prefix}/{path}", goal)
    if digest_of(tree, digests) != source.digest:
        raise _changed(source, "files of it have other contents than a moment ago")


def _changed(source: Source, how: str) -> StagerError:
    return StagerError(
        f"{source.kind} {source.name} changed while it was being packed: {how}",
        hint="something else writes there; run the command again when it is done, or leave those "
        "files out with project.exclude",
    )
