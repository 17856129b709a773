"""Leaving out of a wheel's layer what only tests or compilers need, where the settings say so.

``headers``
    What C and C++ compilers and CMake read: ``include`` directories, headers, CMake files and
    static libraries wherever they lie. A program that compiles at run time needs them: PyTorch's
    Inductor (``torch.compile``), Triton, extensions built on first use.

``tests``
    Directories called ``test`` or ``tests`` inside a package that do hold tests, and compiled test
    programs in its ``bin``. One that any other module of the wheel imports or names stays, whatever
    it is called; ``numpy.testing`` and its like are no tests.

What was left out is counted in a small file beside the installed RECORD, see :data:`NOTE`.
"""

from __future__ import annotations

import ast
import configparser
import json
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.format.archive import BundleFile
from bundle.format.layer import Entry, Index, LayerError, packed_index
from bundle.format.manifest import Layer
from bundle.protocol.digest import canonical_json
from bundle.protocol.problem import NodeError

from ..config.environment import HEADERS, PRUNABLE, TESTS
from .layer_file import decompress_index

RULES = 1
"""Counted up when other files are left out than before: part of the ids of the layers concerned."""
NOTE = "pruned.json"
"""Name of a file in ``.dist-info`` that says how much of the wheel is not there."""

_FOR_COMPILERS = (".h", ".hh", ".hpp", ".hxx", ".cuh", ".cmake", ".a")
_LOADED = (".py", ".so", ".pth")
_TEST_FOLDERS = ("test", "tests")
_TEST_FILE = re.compile(r"(test_[^/]*|[^/]*_tests?)(\.py)?")
"""A test module, or a compiled test program."""
_TEST_PROGRAM = re.compile(r".+/bin/test_[^/.]+")
_MENTION = re.compile(
    rb"(?:^|[:;])[ \t]*(?:from|import)\b(?:[^\n\\]|\\\n)*\btests?\b"
    rb"|\bimport\s*\([^)]*\btests?\b"
    rb"|[\"'][\w.]*\.tests?\b",
    re.MULTILINE,
)
"""How the name of a test directory stands in an import, and in a string that names a module."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """How much was left out."""

    words: tuple[str, ...]
    """Of which kinds, as the settings name them."""
    files: int
    """How many files of wheels, bytecode not counted."""
    size: int
    """Their lengths in bytes together."""

    def to_json(self) -> dict[str, Any]:
        """As it is written in a note, and shown by ``--json``."""
        return {"what": list(self.words), "files": self.files, "bytes": self.size}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Pruned:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: it did not write that.
        """
        words = tuple(word for word in PRUNABLE if word in raw["what"])
        return cls(words=words, files=int(raw["files"]), size=int(raw["bytes"]))


@dataclass(frozen=True)
class _Member:
    """One file of a wheel."""

    name: str
    """Its name in the archive."""
    path: str
    """Where it is installed, relative to ``site-packages`` or to another scheme's place."""
    scheme: str
    """``site``, ``headers``, ``data`` or ``scripts``."""


def concerned(wheel: Path, words: Sequence[str]) -> tuple[str, ...]:
    """Those of the words that may leave something out of a wheel, judged by names alone.

    They decide the layer's id, so a wheel that has neither keeps the id it has without pruning.
    """
    if not words:
        return ()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = list(_members(archive))
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return ()  # unsound; installing it will say why
    found = {HEADERS: bool(_headers(members)), TESTS: bool(_candidates(members))}
    found[TESTS] = found[TESTS] or bool(_programs(members))
    return tuple(word for word in sorted(set(words)) if found[word])


def left_out(archive: zipfile.ZipFile, words: Sequence[str]) -> frozenset[str]:
    """The names of the members of a wheel that are not to be installed.

    Args:
        archive: the wheel.
        words: what to leave out, see the top of this module.
    """
    if not words:
        return frozenset()
    members = list(_members(archive))
    paths: set[str] = set()
    if HEADERS in words:
        paths |= _headers(members)
    if TESTS in words:
        paths |= _programs(members)
        folders = _unneeded(archive, members)
        paths |= {m.name for m in members if m.scheme == "site" and _within(m.path, folders)}
    return frozenset(paths)


def note(archive: zipfile.ZipFile, names: Iterable[str], words: Sequence[str]) -> bytes:
    """The content of the note about members that were left out."""
    sizes = [archive.getinfo(name).file_size for name in names]
    pruned = Pruned(words=tuple(words), files=len(sizes), size=sum(sizes))
    return canonical_json(pruned.to_json())


def noted(bundle: BundleFile) -> Pruned:
    """What all notes in a bundle add up to; a layer whose index is damaged adds nothing."""
    words: set[str] = set()
    files = size = 0
    for layer in bundle.manifest.layers:
        with suppress(NodeError):  # told to whoever asks for the files of that layer
            for found in _notes(bundle, layer) if layer.kind == "wheel" else ():
                words.update(found.words)
                files, size = files + found.files, size + found.size
    return Pruned(words=tuple(sorted(words)), files=files, size=size)


def _notes(bundle: BundleFile, layer: Layer) -> Iterator[Pruned]:
    head = bundle.head(layer)
    with bundle.refusing(LayerError):
        # The index of a layer without a note, as most are, is not worth being taken apart.
        if NOTE.encode() not in decompress_index(packed_index(head)):
            return
    index = bundle.index(layer, head, decompress_index)
    for entry in index.files:
        if posixpath.basename(entry.path) == NOTE and ".dist-info/" in entry.path:
            with suppress(ValueError, KeyError, TypeError):  # a wheel's own file of that name
                yield Pruned.from_json(json.loads(_content(bundle, layer, index, entry)))


def _content(bundle: BundleFile, layer: Layer, index: Index, entry: Entry) -> bytes:
    """The bytes of one file of a layer, from the frames it lies in."""
    offset, start, content = bundle.frames_start(layer), 0, b""
    for frame in index.frames:
        end = start + frame.unpacked_size
        if start < entry.offset + entry.size and end > entry.offset:
            with bundle.refusing(LayerError):
                data = decompress_index(bundle.frame(offset, frame.size, frame.sha256))
            content += data[max(entry.offset - start, 0) : entry.offset + entry.size - start]
        offset, start = offset + frame.size, end
    return content


def _members(archive: zipfile.ZipFile) -> Iterator[_Member]:
    """The files of a wheel with their places; its metadata is not among them."""
    for name in archive.namelist():
        first, _, rest = name.partition("/")
        if name.endswith("/") or first.endswith(".dist-info"):
            continue
        if not first.endswith(".data"):
            yield _Member(name, name, "site")
            continue
        scheme, _, path = rest.partition("/")
        yield _Member(name, path, "site" if scheme in ("purelib", "platlib") else scheme)


def _headers(members: Sequence[_Member]) -> set[str]:
    """What only compilers read, by name."""
    trees: dict[str, bool] = {}
    for member in members:
        for tree in _above(member.path, ("include",)):
            trees[tree] = trees.get(tree, True) and not member.path.endswith(_LOADED)
    only = frozenset(tree for tree, unloaded in trees.items() if unloaded)
    return {
        member.name
        for member in members
        if member.scheme == "headers"
        or (
            member.scheme in ("site", "data")
            and (member.path.endswith(_FOR_COMPILERS) or _within(member.path, only))
        )
    }


def _programs(members: Sequence[_Member]) -> set[str]:
    """Compiled test programs that lie beside the programs of a package."""
    return {
        member.name
        for member in members
        if member.scheme == "site" and _TEST_PROGRAM.fullmatch(member.path)
    }


def _candidates(members: Sequence[_Member]) -> frozenset[str]:
    """Directories in packages that are called after tests and hold some."""
    return frozenset(
        folder
        for member in members
        if member.scheme == "site" and _TEST_FILE.fullmatch(posixpath.basename(member.path))
        for folder in _above(member.path, _TEST_FOLDERS)
        if "/" in folder  # one at the top is a package of its own
    )


def _unneeded(archive: zipfile.ZipFile, members: Sequence[_Member]) -> frozenset[str]:
    """The test directories that nothing which stays installed imports or names.

    What a directory that stays imports stays as well, so this goes on until no more is found.
    """
    folders = _candidates(members)
    modules = [m for m in members if m.scheme == "site" and m.path.endswith(".py")]
    entry_points = _entry_points(archive)
    parents = {posixpath.dirname(folder) for folder in folders}
    used: dict[str, set[str]] = {}
    while True:
        needed = _reached(entry_points, folders)
        for member in modules:
            if _within(member.path, folders):
                continue
            if member.name not in used:
                source = archive.read(member.name)
                may = _may_use(source, member.path, parents)
                used[member.name] = _names_used(source, member.path) if may else set()
            needed |= _reached(used[member.name], folders)
        if not needed:
            return folders
        folders -= needed


def _reached(names: Iterable[str], folders: frozenset[str]) -> set[str]:
    """The directories in which dotted names lead."""
    return {
        folder
        for name in names
        for folder in _above(name.replace(".", "/") + "/", _TEST_FOLDERS)
        if folder in folders
    }


def _may_use(source: bytes, path: str, parents: Iterable[str]) -> bool:
    """Whether a module may import or name a test directory; most need not be parsed to know.

    Args:
        source: the module.
        path: where it is installed.
        parents: the directories that test directories lie in.
    """
    if b"test" not in source:
        return False
    # From outside of its parent, a directory can be reached by a name with its parent's only.
    return any(
        path.startswith(f"{parent}/") or posixpath.basename(parent).encode() in source
        for parent in parents
    ) and bool(_MENTION.search(source))


def _names_used(source: bytes, path: str) -> set[str]:
    """Dotted names that lead to test directories, in the imports and strings of a module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()  # nothing can import it either
    found: set[str] = set()
    package = posixpath.dirname(path).replace("/", ".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(package, node.level, node.module or "")
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.lstrip(".")  # with dots as in import_module(".tests", __package__)
            if _DOTTED.fullmatch(name):
                found.add(name if node.value == name else f"{package}.{name}")
    return {name for name in found if not set(_TEST_FOLDERS).isdisjoint(name.split("."))}


def _absolute(package: str, level: int, module: str) -> str:
    """What ``from <level dots><module>`` means in a module of a package."""
    if not level:
        return module
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def _entry_points(archive: zipfile.ZipFile) -> set[str]:
    """The modules that a wheel's entry points name."""
    found: set[str] = set()
    for name in archive.namelist():
        if not re.fullmatch(r"[^/]+\.dist-info/entry_points\.txt", name):
            continue
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        try:
            parser.read_string(archive.read(name).decode())
        except (configparser.Error, UnicodeDecodeError, zlib.error, zipfile.BadZipFile):
            continue  # installing it will say what is wrong
        for section in parser.sections():
            found.update(value.partition(":")[0].strip() for _, value in parser.items(section))
    return found


def _above(path: str, names: Sequence[str]) -> Iterator[str]:
    """The directories that a file lies in whose own names are among these."""
    parts = path.split("/")[:-1]
    for count, part in enumerate(parts, start=1):
        if part in names:
            yield "/".join(parts[:count])


def _within(path: str, folders: frozenset[str]) -> bool:
    """Whether a file lies in one of some directories."""
    parts = path.split("/")[:-1]
    return any("/".join(parts[:count]) in folders for count in range(1, len(parts) + 1))
