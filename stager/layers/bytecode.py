"""Compiling modules at build time, so that no rank ever does."""

from __future__ import annotations

import functools
import importlib.util
import json
import marshal
import os
import posixpath
import re
import struct
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from ..core.errors import StagerError
from ..core.processes import feed
from ..core.values import Target

_UNCHECKED_HASH = 0b01
"""The pyc flag word of PEP 552 for "has a source hash, never check it"."""

DIGEST = slice(8, 16)
"""Place of the source's :func:`importlib.util.source_hash` in a pyc (PEP 552)."""
COMPILED = "all but test modules"
"""The modules of a wheel that are compiled (:func:`worth_compiling`); part of every layer's id."""

_TEST_MODULE = re.compile(r"(?:^|/)tests?/(?:.*/)?(?:test_[^/]*|[^/]*_test)\.py$")


def worth_compiling(path: str) -> bool:
    """Return whether a module of a wheel gets bytecode: all but the test modules of test suites.

    In the reference environment those are a fifth of all modules, and more than a quarter of the
    time that compiling takes; no rank imports them. A rank that does compiles them in memory.
    Helper modules beside them, which packages do import, get bytecode.
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
# one's bytes, as :mod:`.layer_process` does.

SETTINGS = "by another process"
"""Part of the id of each layer that was compiled here: its bytes may differ from others'."""
_SECONDS = 900.0
_LIBRARIES = "LD_LIBRARY_PATH"
"""Where Pythons of environment modules have their own libpython from."""
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


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """An interpreter on this machine that compiles for another version than the running one."""

    program: Path
    """Its program."""
    version: str
    """Its full version, ``3.12.1``."""
    magic: str
    """The first bytes of its bytecode, in hexadecimal digits."""


class Modules(Protocol):
    """Bytecode of modules that is made elsewhere."""

    def __contains__(self, path: str) -> bool:
        """Return whether it is, or will be, here."""

    def take(self, path: str, digest: bytes) -> bytes | None:
        """Return a module's bytecode, None if it does not compile.

        Args:
            path: the module, which must be ``in`` this.
            digest: :func:`importlib.util.source_hash` of its source.
        """


class _Module(NamedTuple):
    digest: bytes
    bytecode: Path


class CompiledByOther:
    """The bytecode that an interpreter of another version has made."""

    def __init__(self, what: str, modules: Mapping[str, _Module]) -> None:
        self._what = what
        self._modules = modules

    def __contains__(self, path: str) -> bool:
        return path in self._modules

    def take(self, path: str, digest: bytes) -> bytes | None:
        """Return a module's bytecode, None if it does not compile.

        Raises:
            StagerError: it was made from another source.
        """
        module = self._modules[path]
        if module.digest != digest:
            raise StagerError(
                f"{self._what}: {path} changed while it was being read",
                hint="another program is writing there; run the command again when it is done",
            )
        return module.bytecode.read_bytes() if module.bytecode.is_file() else None


@contextmanager
def compiled_by(
    compiler: Compiler, what: str, sources: Iterable[tuple[str, bytes]], scratch: Path
) -> Iterator[CompiledByOther]:
    """Compile modules; yield their bytecode, which is removed at the end of the block.

    Raises:
        StagerError: the interpreter fails.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        modules: dict[str, _Module] = {}
        request = []
        for number, (path, source) in enumerate(sources):
            file = Path(folder, f"{number}.py")
            file.write_bytes(source)
            request.append((file, path))
            digest = importlib.util.source_hash(source)
            modules[path] = _Module(digest, Path(folder, str(number)))
        compile_files(compiler.program, request, Path(folder))
        yield CompiledByOther(what, modules)


def compile_files(program: Path, modules: Sequence[tuple[Path, str]], folder: Path) -> None:
    """Let an interpreter compile modules into the files ``0``, ``1``, ... of a folder.

    There is none for a module that does not compile.

    Raises:
        StagerError: the interpreter fails.
    """
    if not modules:
        return
    request = json.dumps([[str(file), path] for file, path in modules])
    # Sets are written in the order of their hashes before Python 3.11.
    variables = {"PYTHONHASHSEED": "0"}
    if _LIBRARIES in os.environ:
        variables[_LIBRARIES] = os.environ[_LIBRARIES]
    argv = [str(program), "-s", "-S", "-c", _COMPILE, str(folder)]
    feed(argv, request, environment=variables, timeout=_SECONDS)
