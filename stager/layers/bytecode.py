"""Compiling modules at build time, so that no rank ever does."""

from __future__ import annotations

import functools
import importlib.util
import json
import marshal
import os
import posixpath
import re
import signal
import struct
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from bundle.system.processes import signal_at_parent_death

from ..core.errors import StagerError
from ..core.processes import run_with_input
from ..core.values import Target
from .wheel_members import UNREADABLE

_UNCHECKED_HASH = 0b01  # the pyc flag word of PEP 552 for "has a source hash, never check it"

COMPILED = "all but test modules"  # see :func:`is_worth_compiling`; part of a layer's id

_TEST_MODULE = re.compile(r"(?:^|/)tests?/(?:.*/)?(?:test_[^/]*|[^/]*_test)\.py$")


def is_worth_compiling(path: str) -> bool:
    """Return whether a module gets bytecode; test modules take a quarter of the time."""
    return not _TEST_MODULE.search(path)


def bytecode_path(path: str, target: Target) -> str:
    """Return the path where the target's interpreter looks for a module's bytecode (PEP 3147)."""
    folder, name = posixpath.split(path)
    tag = f"cpython-{target.python.replace('.', '')}"
    return posixpath.join(folder, "__pycache__", f"{name.removesuffix('.py')}.{tag}.pyc")


def compile_module(source: bytes, path: str) -> bytes | None:
    """Return an unchecked hash-based pyc (PEP 552): times on a node do not count; None for none."""
    _intern_characters()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = compile(source, path, "exec", dont_inherit=True, optimize=0)
        body = marshal.dumps(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # templates, Python 2 files, too much nesting; pip leaves these alone too
    header = importlib.util.MAGIC_NUMBER + struct.pack("<I", _UNCHECKED_HASH)
    return header + importlib.util.source_hash(source) + body


@functools.cache
def _intern_characters() -> None:
    """Make marshal's output independent of earlier work: up to 3.11, interning shows."""
    for code in range(256):
        sys.intern(chr(code))


# --- Bytecode for another version of Python: one process of that version compiles one layer ------

Made = dict[str, tuple[bytes, "bytes | None"]]  # :func:`importlib.util.source_hash`, bytecode
SETTINGS = "by another process"  # part of a layer's id: its bytes may differ from others'
_SECONDS = 900.0
_LIBRARIES = "LD_LIBRARY_PATH"  # where Pythons of environment modules have their own libpython from
# For any version; see :func:`compile_module`.
_COMPILE = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import json, py_compile, warnings
warnings.simplefilter("ignore")
for code in range(256):
    sys.intern(chr(code))
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
for number, (source, path) in enumerate(json.load(sys.stdin)):
    try:
        py_compile.compile(source, "%s/%d" % (sys.argv[1], number), path, True, 0, mode)
    except (py_compile.PyCompileError, ValueError, RecursionError, MemoryError):
        pass
"""


class Compiler(NamedTuple):
    """An interpreter on this machine that compiles for another version than the running one."""

    program: Path
    version: str  # its full version, ``3.12.1``
    magic: str  # the first bytes of its bytecode, in hexadecimal digits


class CompiledModules:
    """The bytecode of a layer's modules, which other processes make or have made."""

    def __init__(self, what: str, paths: Collection[str], collect: Callable[[], Made]) -> None:
        self._what = what
        self._paths = frozenset(paths)
        self._collect = functools.cache(collect)

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def take(self, path: str, digest: bytes) -> bytes | None:
        """Return a module's bytecode, None if it does not compile; ``digest``: source_hash."""
        made_from, bytecode = self._collect()[path]
        if made_from != digest:
            raise StagerError(
                f"{self._what}: {path} changed while it was being read",
                hint="another program is writing there; run the command again when it is done",
            )
        return bytecode


def compile_elsewhere(
    program: Path, what: str, sources: Iterable[tuple[str, bytes]], scratch: Path
) -> CompiledModules:
    """Let an interpreter compile modules, given by their paths and sources."""
    # Sets are written in the order of their hashes before Python 3.11.
    variables = {"PYTHONHASHSEED": "0"}
    if _LIBRARIES in os.environ:
        variables[_LIBRARIES] = os.environ[_LIBRARIES]
    made: Made = {}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        request = []
        for number, (path, source) in enumerate(sources):
            file = Path(folder, f"{number}.py")
            file.write_bytes(source)
            request.append((str(file), path))
            made[path] = importlib.util.source_hash(source), None
        if request:
            argv = [str(program), "-s", "-S", "-c", _COMPILE, folder]
            run_with_input(argv, json.dumps(request), environment=variables, timeout=_SECONDS)
        for number, (_, path) in enumerate(request):
            with suppress(FileNotFoundError):
                made[path] = made[path][0], Path(folder, str(number)).read_bytes()
    return CompiledModules(what, made, lambda: made)


# --- Compiling the modules of a large wheel in processes of their own, while it is being read ----

# A wheel's content alone decides if it is compiled this way: in some Python versions marshal's
# output depends on the other objects in a process.

LARGE = 4 << 20  # bytes of source from which a wheel is compiled in parallel


class UnreadError(Exception):
    """A module cannot be read."""


def end_with_parent() -> None:
    """Make the kernel kill this child of multiprocessing when the process that forked it ends."""
    import multiprocessing.forkserver

    # A fork server ends when no process holds this end of a pipe, which each child has a copy of.
    server = multiprocessing.forkserver._forkserver
    handle = getattr(server, "_forkserver_alive_fd", None)
    if handle is not None:
        os.close(handle)
        setattr(server, "_forkserver_alive_fd", None)  # noqa: B010 - unknown to its stubs
    signal_at_parent_death(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # it ended before the line above


@contextmanager
def compile_in_parallel(
    wheel: Path, target: Target, jobs: int, prune: Sequence[str] = ()
) -> Iterator[CompiledModules | None]:
    """Compile a wheel's modules while the block runs, before it with one job; None for too few."""
    modules = list_modules(wheel, prune) if target.is_host_python else {}
    if sum(modules.values()) < LARGE:
        yield None
        return
    import multiprocessing
    from concurrent import futures

    slices = _split_evenly(modules, max(1, min(4, jobs // 2)))
    fork = multiprocessing.get_context("fork")
    with futures.ProcessPoolExecutor(len(slices), fork, initializer=end_with_parent) as pool:
        parts = [pool.submit(_compile, wheel, names) for names in slices]

        def collect() -> Made:
            made: Made = {}
            try:
                for part in parts:
                    made |= part.result()
            except futures.process.BrokenProcessPool:
                raise StagerError(
                    f"{wheel.name}: a process that compiled its modules was killed",
                    hint="usually the machine ran out of memory: free some, or use --jobs 1",
                ) from None
            except UnreadError as exc:
                raise StagerError(
                    f"{wheel.name}: its modules could not be compiled: {exc}",
                    hint="run the command again; if it fails again, remove the wheel",
                ) from None
            return made

        try:
            if jobs == 1:
                pool.shutdown()
            yield CompiledModules(wheel.name, modules, collect)
        except BaseException:
            for child in multiprocessing.active_children():
                child.kill()
            raise


def list_modules(wheel: Path, prune: Sequence[str]) -> dict[str, int]:
    """Return the modules of a wheel to compile, with the lengths of their sources; {} if unread."""
    from .prune import list_left_out  # not before: a job's start compiles, and prunes nothing

    try:
        with zipfile.ZipFile(wheel) as archive:
            skipped = list_left_out(archive, prune)
            sizes = {member.filename: member.file_size for member in archive.infolist()}
    except UNREADABLE:
        return {}
    return {
        name: size
        for name, size in sizes.items()
        if name.endswith(".py")
        and is_worth_compiling(name)
        and not name.partition("/")[0].endswith(".data")
        and name not in skipped
    }


def _split_evenly(modules: dict[str, int], count: int) -> list[list[str]]:
    slices: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(modules, key=lambda name: (-modules[name], name)):
        least = loads.index(min(loads))
        slices[least].append(name)
        loads[least] += modules[name]
    return slices


def _compile(wheel: Path, names: Sequence[str]) -> Made:
    return {
        name: (importlib.util.source_hash(source), compile_module(source, name))
        for name, source in read_sources(wheel, names)
    }


def read_sources(wheel: Path, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the sources of modules; UnreadError if one cannot be read."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in names:
                yield name, archive.read(name)
    except (*UNREADABLE, MemoryError) as exc:
        raise UnreadError(f"{type(exc).__name__}: {exc}") from exc
