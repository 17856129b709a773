"""Making layers: one for each wheel, the project, the trainer and each asset; several at a time."""

from __future__ import annotations

import gc
import io
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import source_hash
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bundle.format.layer import HEAD_PREFIX, LayerError, explain_excess, head_summary, read_origin
from bundle.format.manifest import Layer
from bundle.protocol.digest import Digest

from ..core.errors import StagerError, WheelError
from ..core.files import open_regular
from ..core.store import Store, remove, write_error
from ..core.values import Target
from .bytecode import (
    CompiledModules,
    UnreadError,
    bytecode_path,
    compile_elsewhere,
    compile_in_parallel,
    compile_module,
    end_with_parent,
    list_modules,
    read_sources,
)
from .layer_file import LayerWriter
from .source import LayerSource, layer_id, make_origin
from .tree import Tree, TreeFile, digest_tree, list_changed_files, quote_path
from .wheel import add_wheel

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # the layer's name, layers done, layers to make


class MadeLayers(NamedTuple):
    """All layers of a bundle, in the order of the sources, each once."""

    layers: tuple[Layer, ...]  # their files lie in the store under their ids
    built: int
    reused: int
    notes: tuple[str, ...]


def make_layers(
    sources: Sequence[LayerSource],
    *,
    store: Store,
    target: Target,
    jobs: int,
    progress: Progress = lambda name, done, total: None,
) -> MadeLayers:
    """Make every layer that is not in the store yet. The store's lock must be held."""
    ids = {layer_id(source, target): source for source in sources}
    missing = {key: source for key, source in ids.items() if not is_stored(store, key)}
    if missing:
        # A spool holds a layer unpacked; there are only `jobs` at a time.
        spools = sorted(map(_estimate_spool, missing.values()), reverse=True)[:jobs]
        room = sum(source.size for source in missing.values()) * 3 // 2 + sum(spools)
        store.require_space(room, "the layers")
        with store.scratch("spool") as scratch:
            work = LayerWork(target=target, store=store, scratch=scratch, jobs=jobs)
            _build_all([*missing.values()], work, progress)
    notes: tuple[str, ...] = ()
    if not (target.is_host_python or any(source.compiler for source in sources)):
        here = Target.from_host().python
        notes = (
            f"no bytecode is included: there is no Python {target.python} here to compile it, and "
            f"{here}, which runs this, cannot; the first imports on each node take about twice as "
            f"long. Install one (uv python install {target.python}) to avoid that",
        )
    return MadeLayers(
        layers=tuple(_describe(store, key, source) for key, source in ids.items()),
        built=len(missing),
        reused=len(ids) - len(missing),
        notes=notes,
    )


def _estimate_spool(source: LayerSource) -> int:
    if source.wheel is None:
        return source.size
    try:
        with zipfile.ZipFile(source.wheel) as archive:
            members = [(member.filename, member.file_size) for member in archive.infolist()]
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return source.size  # it is refused with a message of its own
    return sum(size * 5 // 2 if name.endswith(".py") else size for name, size in members)


def is_stored(store: Store, key: Digest) -> bool:
    """Return whether the store has the layer, whole by its length; remove another in its place."""
    path = store.layer(key)
    try:
        with open_regular(path) as handle:
            prefix = handle.read(HEAD_PREFIX)
            summary = head_summary(prefix)
            made_from = read_origin(prefix + handle.read(summary.origin_size))
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
    log.warning("the stored layer %s is damaged or is a different layer: making it again", key)
    remove(path)
    return False


def _describe(store: Store, key: Digest, source: LayerSource) -> Layer:
    with open_regular(store.layer(key)) as handle:
        summary = head_summary(handle.read(HEAD_PREFIX))
        handle.seek(0)
        head = handle.read(summary.head_size)
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


def _build_all(missing: Sequence[LayerSource], work: LayerWork, progress: Progress) -> None:
    queue = sorted(missing, key=lambda source: source.size)
    faults: list[StagerError] = []
    done = 0
    with LayerProcesses(work) as builders:
        while queue or builders.running:
            while queue and len(builders.running) < work.jobs:
                builders.start(queue.pop())
            for source, fault in builders.wait():
                if fault is None:
                    done += 1
                    progress(f"{source.name} {source.version}".strip(), done, len(missing))
                    continue
                faults.append(fault)
                if not isinstance(fault, WheelError):
                    queue.clear()  # no room, or no memory: the others would end alike
    if faults:
        raise _join_faults(faults)


def _join_faults(faults: list[StagerError]) -> StagerError:
    """Return one error for all; a fault that is no wheel's comes first: it stopped the rest."""
    faults = sorted(faults, key=lambda fault: isinstance(fault, WheelError))
    if len(faults) == 1:
        return faults[0]
    lines = [line for fault in faults for line in (fault.message, *fault.context)]
    many = f"{len(faults)} layers cannot be built"
    return type(faults[0])(many, hint=faults[0].hint, context=lines)


# --- The processes that make layers, one for each layer ------------------------------------------

_THREADS = 4  # frames of a layer compressed at a time: the memory is not to fill
_LONGEST_FOLDER = 107 - 32


class LayerWork(NamedTuple):
    """The settings that all processes of a build share."""

    target: Target
    store: Store
    scratch: Path  # a directory on the store's own disk for unfinished layers
    jobs: int


class LayerProcesses:
    """The processes that build layers, forked from one prepared server.

    A fresh one for each keeps interned strings, which marshal's output depends on, out of the next.
    """

    def __init__(self, work: LayerWork) -> None:
        self._work = work
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self.running: dict[Connection, tuple[BaseProcess, LayerSource]] = {}

    def __enter__(self) -> LayerProcesses:
        return self

    def __exit__(self, *raised: object) -> None:
        for process, _ in self.running.values():
            process.kill()
            process.join()

    def start(self, source: LayerSource) -> None:
        """Start a process for one layer."""
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_build_one, args=(source, self._work, sender))
        with _prepare_start():
            process.start()
            self.running[receiver] = (process, source)
        sender.close()

    def wait(self) -> Iterator[tuple[LayerSource, StagerError | None]]:
        """Wait for a process to end; yield the outcome of each that has ended."""
        for connection in wait(list(self.running)):
            if isinstance(connection, Connection):
                process, source = self.running.pop(connection)
                yield source, _read_outcome(connection, process, source)


@contextmanager
def _prepare_start() -> Iterator[None]:
    """Surround the start of a process, and with the first one that of the server.

    Signals such as Ctrl-C wait until the process is recorded, to be killed like the others, and
    stay blocked in the children, which a terminal signals, too. Each child runs the main module
    again, which may be a user's script.
    """
    resource_tracker.ensure_running()  # starting it lets those signals through again
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    main, temporary = sys.modules["__main__"], tempfile.tempdir
    sys.modules["__main__"] = types.ModuleType("__main__")
    tempfile.tempdir = _find_folder_for_socket()
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        tempfile.tempdir = temporary
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _find_folder_for_socket() -> str | None:
    """A socket's path has at most 107 bytes (unix(7)); ``multiprocessing`` needs 32 of them."""
    others = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - multiprocessing makes a private one
    for folder in (tempfile.gettempdir(), *others):
        if len(os.fsencode(folder)) <= _LONGEST_FOLDER and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return tempfile.tempdir


def _read_outcome(
    connection: Connection, process: BaseProcess, source: LayerSource
) -> StagerError | None:
    fault: StagerError | None
    try:
        fault = connection.recv()
    except EOFError:
        process.join()
        fault = StagerError(
            f"the process for the layer of {source.name} ended with status {process.exitcode}",
            hint="status -9 usually means too little memory: free some, or use --jobs 1",
        )
    process.join()
    connection.close()
    return fault


def _build_one(source: LayerSource, work: LayerWork, report: Connection) -> None:
    end_with_parent()  # which is the server
    final = work.store.layer(layer_id(source, work.target))
    fault: StagerError | None = None
    gc.disable()  # this process ends with its layer; compiling is 7 % faster
    try:
        partial = work.scratch / final.name
        _write_layer(source, work, partial)
        # Not synced, which costs more than compressing: digests show what a crash has damaged.
        work.store.open_up(partial)
        partial.replace(final)
    except StagerError as exc:
        fault = exc
    except OSError as exc:
        if exc.filename is None or Path(exc.filename).is_relative_to(final.parents[1]):
            fault = write_error(final, exc)
        else:
            fault = _make_changed_error(source, f"{exc.filename}: {exc.strerror}")
    with suppress(BrokenPipeError):  # the parent is gone
        report.send(fault)


def _write_layer(source: LayerSource, work: LayerWork, path: Path) -> None:
    target = work.target
    threads = min(work.jobs, _THREADS)
    with LayerWriter(work.scratch, threads, sampled=source.is_sampled) as writer:
        if source.wheel is not None:
            with _compile_wheel(source, source.wheel, work) as modules:
                add_wheel(writer, source.wheel, target, source.prune, modules)
        elif source.tree is not None:
            tree, digests = source.tree, _add_tree(writer, source, source.tree, work)
            if digest_tree(tree, digests) != source.digest:
                files = ", ".join(map(quote_path, list_changed_files(tree)))
                raise _make_changed_error(source, files or "the contents of its files changed")
        writer.write(path, make_origin(source, target))


@contextmanager
def _compile_wheel(
    source: LayerSource, wheel: Path, work: LayerWork
) -> Iterator[CompiledModules | None]:
    modules = None
    if source.compiler is None:
        with compile_in_parallel(wheel, work.target, work.jobs, source.prune) as modules:
            yield modules
        return
    with suppress(UnreadError):  # unpacking it reports why
        found = read_sources(wheel, sorted(list_modules(wheel, source.prune)))
        modules = compile_elsewhere(source.compiler.program, wheel.name, found, work.scratch)
    yield modules


def _add_tree(writer: LayerWriter, source: LayerSource, tree: Tree, work: LayerWork) -> list[str]:
    digests = []
    compile_file = _make_compile_function(source, tree, work)
    for file in tree.files:
        path = f"{source.prefix}/{file.path}"
        is_module = compile_file is not None and path.endswith(".py")
        with _open_content(source, file, whole=is_module) as stream:
            _, digest = writer.add(path, stream, executable=file.mode == 0o755)
            digests.append(digest.hex())
            if compile_file is None or not is_module:
                continue
            stream.seek(0)
            bytecode, cached = compile_file(file, stream.read()), bytecode_path(path, work.target)
        if bytecode is not None and not explain_excess(cached):
            writer.add(cached, io.BytesIO(bytecode))
    for path, goal in tree.links:
        writer.link(f"{source.prefix}/{path}", goal)
    return digests


def _open_content(source: LayerSource, file: TreeFile, *, whole: bool) -> BinaryIO:
    """Open a file as it is shipped; ``whole`` reads it now, so that it does not change later."""
    if source.interpreter is not None:
        return io.BytesIO(source.interpreter.content(file))
    return io.BytesIO(file.source.read_bytes()) if whole else file.source.open("rb")


def _make_compile_function(
    source: LayerSource, tree: Tree, work: LayerWork
) -> Callable[[TreeFile, bytes], bytes | None] | None:
    if source.kind == "asset":
        return None
    program = source.compiler.program if source.compiler else None
    prefix = f"{source.prefix}/"
    if source.interpreter is not None:  # it compiles itself, wherever it will lie
        program, prefix = source.interpreter.program, ""
    if program is None:
        if not work.target.is_host_python:
            return None
        return lambda file, text: compile_module(text, prefix + file.path)
    modules = [file for file in tree.files if file.path.endswith(".py")]
    texts = ((prefix + file.path, file.source.read_bytes()) for file in modules)
    other = compile_elsewhere(program, source.name, texts, work.scratch)
    return lambda file, text: other.take(prefix + file.path, source_hash(text))


def _make_changed_error(source: LayerSource, how: str) -> StagerError:
    return StagerError(
        f"{source.kind} {source.name} changed while it was being packed: {how}",
        hint="another program is writing there; wait for it, or use project.exclude",
    )
