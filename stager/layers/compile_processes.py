"""Processes of a build that must not outlive it."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, NamedTuple

from bundle.system.processes import signal_at_parent_death

from ..core.errors import StagerError
from ..core.values import Target
from .bytecode import DIGEST, compile_module, worth_compiling
from .prune import left_out
from .wheel_members import UNREADABLE


def end_with_parent() -> None:
    """Make the kernel kill this child of ``multiprocessing`` when the process that forked it ends.

    A fork server ends with the process that started it: as soon as no process holds the other end
    of a pipe, of which each child gets a copy for children of its own.
    """
    server = multiprocessing.forkserver._forkserver
    handle = getattr(server, "_forkserver_alive_fd", None)
    if handle is not None:
        os.close(handle)
        setattr(server, "_forkserver_alive_fd", None)  # noqa: B010 - unknown to its stubs
    signal_at_parent_death(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # it ended before the line above


# --- Compiling the modules of a large wheel in processes of their own, while it is being read ----

# One process would need as long for the modules of torch as many CPUs need for all the rest of a
# build. A wheel's content alone decides if it is compiled this way, so that the same modules are
# compiled in the same kind of process on every machine: in some Python versions marshal's output
# depends on the other objects in a process.

LARGE = 4 << 20
"""Bytes of source above which a wheel's modules are compiled in parallel: half a second's work."""


class UnreadError(Exception):
    """A module cannot be read."""


class _Place(NamedTuple):
    slice: int
    offset: int
    size: int


class CompiledModules:
    """The bytecode of a wheel's modules, which processes may still be making."""

    def __init__(self, wheel: Path, names: Sequence[str], files: Sequence[IO[bytes]]) -> None:
        self._wheel = wheel
        self._names = frozenset(names)
        self._files = files
        self._running: list[tuple[ForkProcess, Connection]] = []
        self._places: dict[str, _Place | None] = {}
        self._faults: list[str] = []

    def __contains__(self, path: str) -> bool:
        return path in self._names

    def start(self, slices: Sequence[Sequence[str]]) -> None:
        """Start a process for each slice of the modules."""
        context = multiprocessing.get_context("fork")
        for names, file in zip(slices, self._files, strict=True):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_compile, args=(self._wheel, names, file, sender))
            process.start()
            self._running.append((process, receiver))
            sender.close()

    def wait(self) -> None:
        """Wait until all is compiled.

        Raises:
            StagerError: a process was killed.
            OSError: there is no room for the bytecode.
        """
        for number, (process, connection) in enumerate(self._running):
            try:
                result = connection.recv()
            except EOFError:
                process.join()
                raise StagerError(
                    f"{self._wheel.name}: a process that compiled its modules ended with status "
                    f"{process.exitcode}",
                    hint="status -9 usually means that the machine ran out of memory: free "
                    "some, or use --jobs 1",
                ) from None
            if isinstance(result, OSError):
                raise result
            places, fault = result
            for name, place in places.items():
                self._places[name] = _Place(number, *place) if place else None
            if fault:
                self._faults.append(fault)
        self.stop()

    def take(self, path: str, digest: bytes) -> bytes | None:
        """Return the bytecode of a module, None if it does not compile; wait for all of them.

        Raises:
            StagerError: it was made from another source, since the wheel has changed since;
                or it was not made, since the wheel could not be read.
            OSError: there was no room for it.
        """
        if self._running:
            self.wait()
        if path not in self._places:
            raise StagerError(
                f"{self._wheel.name}: {path} could not be compiled",
                hint="run the command again; if it fails again, remove the wheel and build again",
                context=self._faults,
            )
        place = self._places[path]
        if place is None:
            return None
        data = os.pread(self._files[place.slice].fileno(), place.size, place.offset)
        if data[DIGEST] != digest:
            raise StagerError(
                f"{self._wheel.name}: {path} changed while it was being read",
                hint="another program is writing there; run the command again when it is done",
            )
        return data

    def stop(self) -> None:
        """Kill the processes that still run."""
        for process, connection in self._running:
            process.kill()
            process.join()
            connection.close()
        self._running.clear()


@contextlib.contextmanager
def compiling(
    wheel: Path, target: Target, scratch: Path, jobs: int, prune: Sequence[str] = ()
) -> Iterator[CompiledModules | None]:
    """Compile the modules of a wheel while the block runs; yield None if it has too few.

    Args:
        wheel: the wheel file.
        target: the interpreter; only bytecode of the running one can be made.
        scratch: a directory on the store's own disk for temporary files.
        jobs: number of layers made at a time. Half as many processes compile, but not more than
            four; with 1, the block begins when they are done.
        prune: the kinds of files left out of the wheel, see :mod:`stager.layers.prune`.
    """
    modules = modules_of(wheel, prune) if target.is_host_python else {}
    if sum(modules.values()) < LARGE:
        yield None
        return
    slices = _slices(modules, max(1, min(4, jobs // 2)))
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=scratch)) for _ in slices]
        compiled = CompiledModules(wheel, list(modules), files)
        stack.callback(compiled.stop)
        compiled.start(slices)
        if jobs == 1:
            compiled.wait()
        yield compiled


def modules_of(wheel: Path, prune: Sequence[str]) -> dict[str, int]:
    """Return the modules of a wheel to compile, and the length of their sources.

    Empty if the wheel cannot be read; unpacking it reports why.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            skipped = left_out(archive, prune)
            return {
                member.filename: member.file_size
                for member in archive.infolist()
                if _is_compiled(member.filename) and member.filename not in skipped
            }
    except UNREADABLE:
        return {}


def _is_compiled(name: str) -> bool:
    if not name.endswith(".py") or not worth_compiling(name):
        return False
    return not name.partition("/")[0].endswith(".data")


def _slices(modules: dict[str, int], count: int) -> list[list[str]]:
    slices: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(modules, key=lambda name: (-modules[name], name)):
        least = loads.index(min(loads))
        slices[least].append(name)
        loads[least] += modules[name]
    return slices


def _compile(wheel: Path, names: Sequence[str], file: IO[bytes], report: Connection) -> None:
    end_with_parent()
    places: dict[str, tuple[int, int] | None] = {}
    fault = ""
    try:
        try:
            for name, source in sources_of(wheel, names):
                bytecode = compile_module(source, name)
                places[name] = None if bytecode is None else (file.tell(), len(bytecode))
                file.write(bytecode or b"")
        except UnreadError as exc:
            fault = str(exc)
        file.flush()
    except OSError as exc:
        report.send(exc)
    else:
        report.send((places, fault))


def sources_of(wheel: Path, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the sources of modules.

    Raises:
        UnreadError: one cannot be read. If the wheel is damaged, unpacking it fails as well, with
            a better message.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in names:
                yield name, archive.read(name)
    except (*UNREADABLE, MemoryError) as exc:
        raise UnreadError(f"{type(exc).__name__}: {exc}") from exc
