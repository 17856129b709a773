"""Compiling modules at build time, so that no rank ever does."""

from __future__ import annotations

import functools
import importlib.util
import marshal
import posixpath
import re
import struct
import sys
import warnings

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
