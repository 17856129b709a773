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
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bundle.system.processes import signal_at_parent_death

from ..core.errors import StagerError
from ..core.processes import run_with_input
from ..core.values import Target
from .wheel_members import UNREADABLE

_UNCHECKED_HASH = 0b01  # the pyc flag word of PEP 552 for "has a source hash, never check it"

COMPILED = "all but test modules"
"""The modules of a wheel that are compiled (:func:`is_worth_compiling`); part of a layer's id."""

_TEST_MODULE = re.compile(r"(?:^|/)tests?/(?:.*/)?(?:test_[^/]*|[^/]*_test)\.py$")


def is_worth_compiling(path: str) -> bool:
    """Return whether a module of a wheel gets bytecode: all but the test modules of test suites.

    In the reference environment those are more than a quarter of the time that compiling takes, and
    no rank imports them. Helper modules beside them, which packages do import, get bytecode.
    """
    return not _TEST_MODULE.search(path)


def bytecode_path(path: str, target: Target) -> str:
    """Return the path where the target's interpreter looks for a module's bytecode (PEP 3147)."""
    folder, name = posixpath.split(path)
    tag = f"cpython-{target.python.replace('.', '')}"
    return posixpath.join(folder, "__pycache__", f"{name.removesuffix('.py')}.{tag}.pyc")


def compile_module(source: bytes, path: str) -> bytes | None:
    """Return an *unchecked hash-based* pyc (PEP 552), or None if the module does not compile.

    Such a pyc is used whatever the times on the node are; a stale time would recompile every module
    in every rank. The path inside is replaced by the real one when the module is imported.
    """
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
    """Make marshal's output independent of what this process compiled before.

    Python up to 3.11 shares one object for each one-character string, and marshal writes it another
    way once anything has interned it. So all are interned, at once and for good.
    """
    for code in range(256):
        sys.intern(chr(code))


# --- Bytecode for another version of Python, compiled by an interpreter of that version ----------

# It compiles the modules of one layer in one process, which keeps one layer's state out of the next
# one's bytes, as :mod:`.layer_build` does.

Made = dict[str, tuple[bytes, "bytes | None"]]
"""Modules by path: the :func:`importlib.util.source_hash`, and bytecode; None for no Python."""
SETTINGS = "by another process"
"""Part of the id of each layer that was compiled here: its bytes may differ from others'."""
_SECONDS = 900.0
_LIBRARIES = "LD_LIBRARY_PATH"  # where Pythons of environment modules have their own libpython from
# Whatever the version. As for wheels: unchecked (PEP 552), and the characters first, without which
# marshal's output depends on what was compiled before.
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
        """Return the bytecode of a module, None if it does not compile; wait for all of them.

        ``digest`` is the :func:`importlib.util.source_hash` of its source.
        """
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
            bytecode = Path(folder, str(number))
            if bytecode.is_file():
                made[path] = made[path][0], bytecode.read_bytes()
    return CompiledModules(what, made, lambda: made)


# --- Compiling the modules of a large wheel in processes of their own, while it is being read ----

# One process would need as long for the modules of torch as many CPUs need for all the rest of a
# build. A wheel's content alone decides if it is compiled this way, so that the same modules are
# compiled in the same kind of process on every machine: in some Python versions marshal's output
# depends on the other objects in a process.

LARGE = 4 << 20
"""Bytes of source above which a wheel's modules are compiled in parallel: half a second's work."""


class UnreadError(Exception):
    """A module cannot be read."""


def end_with_parent() -> None:
    """Make the kernel kill this child of ``multiprocessing`` when the process that forked it ends.

    A fork server ends with the process that started it: as soon as no process holds the other end
    of a pipe, of which each child gets a copy for children of its own.
    """
    import multiprocessing.forkserver

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
    """Compile the modules of a wheel while the block runs; yield None if it has too few.

    Only bytecode of the running version is made. Half as many processes as ``jobs`` compile, but
    not more than four; with 1, the block begins when they are done.
    """
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
