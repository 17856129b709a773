"""Names of test directories in the modules and entry points of a wheel."""

from __future__ import annotations

import ast
import configparser
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator

TEST_FOLDERS = ("test", "tests")

_MENTION = re.compile(
    rb"(?:^|[:;])[ \t]*(?:from|import)\b(?:[^\n\\]|\\\n)*\btests?\b"
    rb"|\bimport\s*\([^)]*\btests?\b"
    rb"|[\"'][\w.]*\.tests?\b",
    re.MULTILINE,
)
"""The name of a test directory in an import, or in a string that names a module."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_NAMING = (ast.Import, ast.ImportFrom, ast.Constant)
"""Nodes of a syntax tree that can name a module."""
_ENTRY_POINTS = re.compile(r"[^/]+\.dist-info/entry_points\.txt")


def mentions(source: bytes, path: str, parents: Iterable[str]) -> bool:
    """Return whether a module may name a test directory, without parsing it."""
    if b"test" not in source:
        return False
    for parent in parents:
        # From outside of its parent, a directory is named together with its parent.
        if path.startswith(f"{parent}/") or posixpath.basename(parent).encode() in source:
            return bool(_MENTION.search(source))
    return False


def names_used(source: bytes, path: str) -> set[str]:
    """Return the dotted names of test directories in the imports and strings of a module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()  # nothing can import it either
    package = posixpath.dirname(path).replace("/", ".")
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, _NAMING):
            names.update(_names_in(node, package))
    return {name for name in names if not set(TEST_FOLDERS).isdisjoint(name.split("."))}


def _names_in(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(package, node.level, node.module or "")
        for alias in node.names:
            yield f"{base}.{alias.name}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value.lstrip(".")  # with dots as in import_module(".tests", __package__)
        if _DOTTED.fullmatch(name):
            yield name if node.value == name else f"{package}.{name}"


def _absolute(package: str, level: int, module: str) -> str:
    if not level:
        return module
    parts = package.split(".")
    base = parts[: len(parts) - level + 1]
    if module:
        base.append(module)
    return ".".join(base)


def entry_point_modules(archive: zipfile.ZipFile) -> set[str]:
    """Return the modules that a wheel's entry points name."""
    modules: set[str] = set()
    for name in archive.namelist():
        if not _ENTRY_POINTS.fullmatch(name):
            continue
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        try:
            parser.read_string(archive.read(name).decode())
        except (configparser.Error, UnicodeDecodeError, zlib.error, zipfile.BadZipFile):
            continue  # installing the wheel reports what is wrong
        for section in parser.sections():
            modules.update(value.partition(":")[0].strip() for _, value in parser.items(section))
    return modules
