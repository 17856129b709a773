"""Compiling the modules of a large wheel in processes of their own, while it is being read.

One process would need as long for the modules of torch as many CPUs need for all the rest of a
build. Which wheels are compiled this way is decided by their content alone, so that the same
modules are compiled in the same kind of process on every machine: in some Python versions
marshal's output depends on what else a process holds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, NamedTuple

from ..core.errors import StagerError
from ..core.values import Target
from .bytecode import DIGEST, compile_module, worth_compiling
from .parent_death import end_with_parent
from .prune import left_out
from .wheel_members import DAMAGED

LARGE = 4 << 20
"""Bytes of source from which on a wheel's modules are compiled ahead: half a second's work."""

_UNREADABLE = (*DAMAGED, OSError, RuntimeError, ValueError, KeyError)
"""What reading a wheel raises whose members or names are damaged, gone or encrypted."""


class _UnreadError(Exception):
    """A module cannot be read."""


class _Place(NamedTuple):
    """Where the bytecode of a module is kept."""

    slice: int
    offset: int
    size: int


class Ahead:
    """The bytecode of a wheel's modules, as far as it is there."""

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
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_compile, args=(self._wheel, names, file, there))
            process.start()
            self._running.append((process, here))
            there.close()

    def wait(self) -> None:
        """Wait until all is compiled.

        Raises:
            StagerError: a process was ended.
            OSError: there is no room for what it made.
        """
        for number, (process, connection) in enumerate(self._running):
            try:
                found = connection.recv()
            except EOFError:
                process.join()
                raise StagerError(
                    f"{self._wheel.name}: a process that compiled its modules ended with status "
                    f"{process.exitcode}",
                    hint="status -9 is usually a machine out of memory: free some, or give "
                    "--jobs 1",
                ) from None
            if isinstance(found, OSError):
                raise found
            places, fault = found
            self._places |= {
                name: place and _Place(number, *place) for name, place in places.items()
            }
            self._faults += [fault] if fault else []
        self.stop()

    def take(self, path: str, digest: bytes) -> bytes | None:
        """The bytecode of a module, or None where it does not compile; waits for all of them.

        Args:
            path: the module, one of those that are ``in`` this.
            digest: :func:`importlib.util.source_hash` of its source.

        Raises:
            StagerError: it has been made from another source, as the wheel has changed meanwhile;
                or it has not been made, as the wheel could not be read.
            OSError: there was no room for it.
        """
        if self._running:
            self.wait()
        if path not in self._places:
            raise StagerError(
                f"{self._wheel.name}: {path} could not be compiled",
                hint="run the command again; if it fails again, remove the wheel and build anew",
                context=self._faults,
            )
        place = self._places[path]
        if place is None:
            return None
        data = os.pread(self._files[place.slice].fileno(), place.size, place.offset)
        if data[DIGEST] != digest:
            raise StagerError(
                f"{self._wheel.name}: {path} changed while it was being read",
                hint="something else writes there; run the command again when it is done",
            )
        return data

    def stop(self) -> None:
        """End what still runs."""
        for process, connection in self._running:
            process.kill()
            process.join()
            connection.close()
        self._running.clear()


@contextlib.contextmanager
def compiling(
    wheel: Path, target: Target, scratch: Path, jobs: int, prune: Sequence[str] = ()
) -> Iterator[Ahead | None]:
    """Compile the modules of a wheel while the block runs; None where that is not worth it.

    Args:
        wheel: the wheel file.
        target: whose bytecode; only the running interpreter's can be made.
        scratch: where to keep it for so long: a directory on the store's own disk.
        jobs: how many layers are made at a time. Half as many processes compile, but not more than
            four; with 1, the block begins when they are done.
        prune: what is left out of the wheel, see :mod:`stager.layers.prune`.
    """
    modules = _modules(wheel, prune) if target.is_host_python else {}
    if sum(modules.values()) < LARGE:
        yield None
        return
    slices = _slices(modules, max(1, min(4, jobs // 2)))
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile(dir=scratch)) for _ in slices]
        ahead = Ahead(wheel, list(modules), files)
        opened.callback(ahead.stop)
        ahead.start(slices)
        if jobs == 1:
            ahead.wait()
        yield ahead


def _modules(wheel: Path, prune: Sequence[str]) -> dict[str, int]:
    """The modules of a wheel that are to be compiled, and the length of their sources.

    Empty where the wheel cannot be read: whoever unpacks it says so.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            absent = left_out(archive, prune)
            return {
                member.filename: member.file_size
                for member in archive.infolist()
                if member.filename.endswith(".py")
                and worth_compiling(member.filename)
                and member.filename not in absent
                # What goes elsewhere has another path there.
                and not member.filename.partition("/")[0].endswith(".data")
            }
    except _UNREADABLE:
        return {}


def _slices(modules: dict[str, int], count: int) -> list[list[str]]:
    """About equal amounts of work: the largest module left goes where there is least."""
    slices: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(modules, key=lambda name: (-modules[name], name)):
        least = loads.index(min(loads))
        slices[least].append(name)
        loads[least] += modules[name]
    return slices


def _compile(wheel: Path, names: Sequence[str], file: IO[bytes], report: Connection) -> None:
    """Compile modules in a child process; says where in ``file`` the bytecode of each is."""
    end_with_parent()
    found: dict[str, tuple[int, int] | None] = {}
    fault = ""
    try:
        try:
            for name, source in _sources(wheel, names):
                bytecode = compile_module(source, name)
                found[name] = None if bytecode is None else (file.tell(), len(bytecode))
                file.write(bytecode or b"")
        except _UnreadError as exc:
            fault = str(exc)
        file.flush()
    except OSError as exc:
        report.send(exc)
    else:
        report.send((found, fault))


def _sources(wheel: Path, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """The sources of modules.

    Raises:
        _UnreadError: one cannot be read. Where that is the wheel's fault, whoever unpacks it finds
            it as well, and can tell more.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in names:
                yield name, archive.read(name)
    except (*_UNREADABLE, MemoryError) as exc:
        raise _UnreadError(f"{type(exc).__name__}: {exc}") from exc
