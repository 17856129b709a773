"""The processes that make layers, one for each layer."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import source_hash
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

from bundle.format.layer import explain_excess

from ..core.errors import StagerError
from ..core.store import Store, write_error
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
from .tree import Tree, TreeFile, changed_files, digest_tree, quote_path
from .wheel import add_wheel

_THREADS = 4
"""Frames of one layer that are compressed at a time: the largest wheel must neither keep a build
waiting nor fill the memory."""
_LONGEST_FOLDER = 107 - 32


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The settings that all processes of a build share."""

    target: Target
    store: Store
    scratch: Path
    """A directory on the store's own disk for unfinished layers."""
    jobs: int


class LayerProcesses:
    """The processes that build layers, forked from one prepared server.

    A fresh process for each wheel keeps one wheel's state (interned strings, which marshal's output
    depends on in some Python versions) out of the next one's bytes, and gives its memory back.
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

    Signals such as Ctrl-C wait until the process is recorded, to be killed like the others. They
    stay blocked in the children, which inherit the mask but no handler: a terminal sends Ctrl-C to
    the whole group, and each child would die with a traceback of its own.

    The main module is replaced by an empty one, because multiprocessing runs it again in every
    child: here it is the command line, as much work as a small layer, elsewhere a user's script.

    The server's socket lies where its path is short enough.
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
    """Return the temporary directory for the server's socket: the usual one if its path is short.

    A socket's path has at most 107 bytes (unix(7)), of which ``multiprocessing`` needs 32 itself.
    """
    others = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - multiprocessing makes a private one
    for folder in (tempfile.gettempdir(), *others):
        if len(os.fsencode(folder)) <= _LONGEST_FOLDER and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return tempfile.tempdir


def _read_outcome(
    connection: Connection, process: BaseProcess, source: LayerSource
) -> StagerError | None:
    try:
        fault = connection.recv()
    except EOFError:
        process.join()
        fault = StagerError(
            f"the process that made the layer of {source.name} ended with status "
            f"{process.exitcode}",
            hint="status -9 usually means that the machine ran out of memory: free some, or use "
            "--jobs 1",
        )
    process.join()
    connection.close()
    return fault if isinstance(fault, StagerError) else None


def _build_one(source: LayerSource, work: LayerWork, report: Connection) -> None:
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
        fault = _write_error(source, final, exc)
    with suppress(BrokenPipeError):  # the parent is gone
        report.send(fault)


def _write_layer(source: LayerSource, work: LayerWork, path: Path) -> None:
    target = work.target
    threads = min(work.jobs, _THREADS)
    with LayerWriter(work.scratch, threads, sampled=source.sampled) as writer:
        if source.wheel is not None:
            with _compile_wheel(source, source.wheel, work) as modules:
                add_wheel(writer, source.wheel, target, source.prune, modules)
        elif source.tree is not None:
            _require_unchanged(source, _add_tree(writer, source, work))
        writer.write(path, make_origin(source, target))


@contextmanager
def _compile_wheel(
    source: LayerSource, wheel: Path, work: LayerWork
) -> Iterator[CompiledModules | None]:
    """Yield a wheel's bytecode from other processes; None if the unpacking process makes it."""
    if source.compiler is None:
        with compile_in_parallel(wheel, work.target, work.jobs, source.prune) as modules:
            yield modules
        return
    other = None
    with suppress(UnreadError):  # unpacking it reports why
        found = read_sources(wheel, sorted(list_modules(wheel, source.prune)))
        other = compile_elsewhere(source.compiler.program, wheel.name, found, work.scratch)
    yield other


def _write_error(source: LayerSource, final: Path, exc: OSError) -> StagerError:
    if exc.filename is not None and not Path(exc.filename).is_relative_to(final.parents[1]):
        return _changed_error(source, f"{exc.filename}: {exc.strerror}")
    return write_error(final, exc)


def _require_unchanged(source: LayerSource, digests: Sequence[str]) -> None:
    tree = source.tree or Tree(files=(), links=(), skipped=())
    if digest_tree(tree, digests) != source.digest:
        files = ", ".join(map(quote_path, changed_files(tree)))
        raise _changed_error(source, files or "the contents of its files changed")


def _add_tree(writer: LayerWriter, source: LayerSource, work: LayerWork) -> list[str]:
    """Add files, with the bytecode of modules; return each file's digest."""
    tree = source.tree or Tree(files=(), links=(), skipped=())
    digests = []
    compile_file = _compiler_of(source, tree, work)
    for file in tree.files:
        path = f"{source.prefix}/{file.path}"
        is_module = compile_file is not None and path.endswith(".py")
        with _content(source, file, whole=is_module) as stream:
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


def _content(source: LayerSource, file: TreeFile, *, whole: bool) -> BinaryIO:
    """Open a file as it is shipped; ``whole`` reads it now, so that it does not change later."""
    if source.interpreter is not None:
        return io.BytesIO(source.interpreter.content(file))
    return io.BytesIO(file.source.read_bytes()) if whole else file.source.open("rb")


def _compiler_of(
    source: LayerSource, tree: Tree, work: LayerWork
) -> Callable[[TreeFile, bytes], bytes | None] | None:
    """Return what compiles the source of a module; None if nothing does."""
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


def _changed_error(source: LayerSource, how: str) -> StagerError:
    return StagerError(
        f"{source.kind} {source.name} changed while it was being packed: {how}",
        hint="another program is writing there; run the command again when it is done, or leave "
        "those files out with project.exclude",
    )
