"""Bytecode for another version of Python, compiled by an interpreter of that version.

It compiles the modules of one layer in one process, which keeps one layer's state out of the next
one's bytes, as :mod:`.layer_process` does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from ..core.errors import StagerError
from ..core.processes import feed

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
