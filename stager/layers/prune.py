"""Leaving files out of a wheel's layer, if the settings say so; :data:`NOTE` counts them.

``headers``: what C and C++ compilers and CMake read, which ``torch.compile`` and Triton need.
``tests``: ``test`` and ``tests`` directories that hold tests and that no other module names.
``PACKAGE:PATTERN``: files of one package.
"""

from __future__ import annotations

import ast
import configparser
import difflib
import functools
import json
import posixpath
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bundle.format.archive import BundleFile
from bundle.format.layer import LayerError, get_packed_index
from bundle.format.manifest import Layer
from bundle.protocol.codec import decode, encode
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import canonical_json
from bundle.protocol.problem import NodeError
from bundle.regex import compile_lazily

from ..config.sections import HEADERS, TESTS
from ..core.errors import ConfigError
from ..core.values import Wheel
from .ignore import Ignore
from .layer_file import LayerTar, decompress_index
from .tree import list_parents

# --- Patterns of ``environment.prune``: ``PACKAGE:PATTERN``, with the pattern as in ``.gitignore``

_INIT = "__init__.py"


def is_pattern(entry: str) -> bool:
    """Return whether an entry of the setting is a pattern, and not a word."""
    return ":" in entry


def select_entries(entries: Iterable[str], package: str) -> tuple[str, ...]:
    """Return the entries that concern a package: its patterns, and all words."""
    own = f"{package}:"
    return tuple(entry for entry in entries if not is_pattern(entry) or entry.startswith(own))


def list_matching(entry: str, paths: Iterable[str]) -> set[str]:
    """Return the files that a pattern leaves out: those it matches, and those below directories."""
    ignore = Ignore([entry.partition(":")[2]])

    @functools.cache
    def is_out(path: str, is_dir: bool) -> bool:
        folder = path.rpartition("/")[0]
        if folder and is_out(folder, True):
            return True
        return ignore.decide(path, is_dir=is_dir) is True

    return {path for path in paths if is_out(path, False)}


def check(entries: Sequence[str], packages: Mapping[str, Sequence[str]]) -> list[str]:
    """Return notes on patterns without an effect."""
    notes, faults = [], []
    for entry in filter(is_pattern, entries):
        quoted, name = f'environment.prune: "{entry}"', entry.partition(":")[0]
        left_out = list_matching(entry, packages.get(name, ()))
        tops = sorted(filter(is_top, left_out))
        if name not in packages:
            near = difflib.get_close_matches(name, list(packages), n=1)
            there = f"; did you mean {near[0]}?" if near else ""
            notes.append(f"{quoted} leaves nothing out: the lock has no package {name}{there}")
        elif not left_out:
            notes.append(f"{quoted} leaves nothing out: no file of {name} matches")
        elif tops:
            faults.append(f"{quoted} leaves out {tops[0]}: {name} could not be imported")
        elif all(map(is_metadata, left_out)):
            faults.append(f"{quoted} names metadata of {name}, which is always kept")
    if faults:
        raise ConfigError(
            faults[0] if len(faults) == 1 else "environment.prune has patterns that are refused",
            hint="name directories in it, as in torch:/torch/test/, or do not require the package",
            context=faults[1:] and faults,
        )
    return notes


def is_metadata(path: str) -> bool:
    """Return whether a file belongs to a package's metadata, which is never left out."""
    return path.partition("/")[0].endswith(".dist-info")


def is_top(path: str) -> bool:
    """Return whether a file makes a package importable: the ``__init__.py`` at its top."""
    folder, _, name = path.partition("/")
    return name == _INIT and bool(folder)


# --- Names of test directories in the modules and entry points of a wheel ------------------------

TEST_FOLDERS = ("test", "tests")

_MENTION = compile_lazily(  # of a test directory, in an import or in the name of a module
    rb"(?:^|[:;])[ \t]*(?:from|import)\b(?:[^\n\\]|\\\n)*\btests?\b"
    rb"|\bimport\s*\([^)]*\btests?\b"
    rb"|[\"'][\w.]*\.tests?\b",
    re.MULTILINE,
)
_DOTTED = compile_lazily(r"[A-Za-z_]\w*(\.\w+)*")
_ENTRY_POINTS = compile_lazily(r"[^/]+\.dist-info/entry_points\.txt")


def _may_name_tests(source: bytes, path: str, parents: Iterable[str]) -> bool:
    # From outside of its parent, a directory is named together with its parent.
    is_near = b"test" in source and any(
        path.startswith(f"{parent}/") or posixpath.basename(parent).encode() in source
        for parent in parents
    )
    return is_near and bool(_MENTION.search(source))


def _list_named_tests(source: bytes, path: str) -> set[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()  # nothing can import it either
    package = posixpath.dirname(path).replace("/", ".")
    names: set[str] = set()
    for node in ast.walk(tree):
        names.update(_list_names(node, package))
    return {name for name in names if not set(TEST_FOLDERS).isdisjoint(name.split("."))}


def _list_names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".") if node.level else []
        base = [*parts[: len(parts) - node.level + 1], *filter(None, [node.module])]
        yield from (".".join([*base, alias.name]) for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value.lstrip(".")  # with dots as in import_module(".tests", __package__)
        if _DOTTED.fullmatch(name):
            yield name if node.value == name else f"{package}.{name}"


def _entry_point_modules(archive: zipfile.ZipFile) -> set[str]:
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


RULES = 1  # counted up when other files are left out: part of the layers' ids
NOTE = "pruned.json"  # a file in ``.dist-info`` that says how much is left out

_FOR_COMPILERS = (".h", ".hh", ".hpp", ".hxx", ".cuh", ".cmake", ".a")
_LOADED = (".py", ".so", ".pth")
_TEST_FILE = compile_lazily(r"(test_[^/]*|[^/]*_tests?)(\.py)?")  # or a compiled test program
_TEST_PROGRAM = compile_lazily(r".+/bin/test_[^/.]+")


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """Amount of what was left out."""

    words: tuple[str, ...] = field(metadata={"json": "what"})  # kinds of files, and patterns
    files: int
    size: int = field(metadata={"json": "bytes"})


class _Members(NamedTuple):
    site: dict[str, str]  # paths are relative to ``site-packages``
    headers: dict[str, str]
    data: dict[str, str]
    scripts: dict[str, str]


def list_effective_entries(wheel: Path, words: Sequence[str]) -> tuple[str, ...]:
    """Return the entries that may leave something out, judged by names: part of the layer's id."""
    if not words:
        return ()
    members = _read_members(wheel)
    site = members.site

    def can_apply(word: str) -> bool:
        if is_pattern(word):
            return bool(list_matching(word, site))
        if word == HEADERS:
            return bool(_headers(members))
        return bool(_test_folders(site)) or any(map(_TEST_PROGRAM.fullmatch, site))

    return tuple(filter(can_apply, sorted(set(words))))


def notes_on_patterns(wheels: Sequence[Wheel], entries: Sequence[str]) -> list[str]:
    """Return notes on patterns of the setting that leave nothing out."""
    absent = {wheel.name for wheel in wheels if not wheel.path.exists()}
    entries = [entry for entry in entries if entry.partition(":")[0] not in absent]
    named = {entry.partition(":")[0] for entry in entries if is_pattern(entry)}
    sites = {str(wheel.name): list[str]() for wheel in wheels}
    for wheel in wheels:
        if wheel.name in named:  # reading the others would take a while
            sites[wheel.name] += _read_members(wheel.path, metadata=True).site
    return check(entries, sites)


def _read_members(wheel: Path, *, metadata: bool = False) -> _Members:
    """Return the files of a wheel; none of an unsound one: installing it reports why."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return _members(archive, metadata=metadata)
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return _Members({}, {}, {}, {})


def list_left_out(archive: zipfile.ZipFile, words: Sequence[str]) -> frozenset[str]:
    """Return the names of the members of a wheel that are not to be installed."""
    if not words:
        return frozenset()
    members = _members(archive)
    site = members.site
    names: set[str] = set()
    for word in filter(is_pattern, words):
        names |= {site[path] for path in list_matching(word, site)}
    if HEADERS in words:
        names |= _headers(members)
    if TESTS in words:
        folders = _find_unneeded_folders(archive, site)
        names |= {
            name
            for path, name in site.items()
            if _TEST_PROGRAM.fullmatch(path) or _is_within(path, folders)
        }
    return frozenset(names)


def encode_note(archive: zipfile.ZipFile, names: Iterable[str], words: Sequence[str]) -> bytes:
    """Return the content of the note about members that were left out."""
    sizes = [archive.getinfo(name).file_size for name in names]
    pruned = Pruned(words=tuple(words), files=len(sizes), size=sum(sizes))
    return canonical_json(encode(pruned))


def sum_notes(bundle: BundleFile) -> Pruned:
    """Return the sum of all notes in a bundle; a layer with a damaged index adds nothing."""
    notes: list[Pruned] = []
    for layer in bundle.manifest.layers:
        with suppress(NodeError):  # reported when the files of that layer are asked for
            notes += _notes(bundle, layer) if layer.kind == "wheel" else ()
    return Pruned(
        words=tuple(sorted({word for note in notes for word in note.words})),
        files=sum(note.files for note in notes),
        size=sum(note.size for note in notes),
    )


def _notes(bundle: BundleFile, layer: Layer) -> Iterator[Pruned]:
    head = bundle.head(layer)
    with bundle.turn_into_damage(LayerError):
        # Most layers have no note, and parsing their index is not worth the time.
        if NOTE.encode() not in decompress_index(get_packed_index(head)):
            return
    index = bundle.index(layer, head, decompress_index)
    tar = LayerTar(
        index,
        bundle.offset(layer.member),
        lambda place, frame: bundle.frame(place, frame.size, frame.sha256),
    )
    for entry in index.files:
        if posixpath.basename(entry.path) == NOTE and ".dist-info/" in entry.path:
            with bundle.turn_into_damage(LayerError):
                note = tar.file(entry, 0, entry.size)
            with suppress(ValueError, KeyError, TypeError):  # a wheel's own file of that name
                yield decode(Pruned, json.loads(note))


def _members(archive: zipfile.ZipFile, *, metadata: bool = False) -> _Members:
    members = _Members({}, {}, {}, {})
    schemes = {"purelib": members.site, "platlib": members.site, **members._asdict()}
    for name in archive.namelist():
        first, _, rest = name.partition("/")
        if name.endswith("/") or (is_metadata(name) and not metadata):
            continue
        scheme, path = "site", name
        if first.endswith(".data"):
            scheme, _, path = rest.partition("/")
        schemes.get(scheme, {})[path] = name  # installing the wheel refuses any other scheme
    return members


def _headers(members: _Members) -> set[str]:
    """Return what only compilers read: not ``include`` directories from which Python loads."""
    above = {path: {*_list_parent_folders(path, ("include",))} for path in chain(*members)}
    loaded = (folders for path, folders in above.items() if path.endswith(_LOADED))
    trees = set().union(*above.values()).difference(*loaded)
    return set(members.headers.values()) | {
        name
        for path, name in (*members.site.items(), *members.data.items())
        if path.endswith(_FOR_COMPILERS) or _is_within(path, trees)
    }


def _test_folders(site: Iterable[str]) -> set[str]:
    folders: set[str] = set()
    for path in site:
        if _TEST_FILE.fullmatch(posixpath.basename(path)):
            folders.update(_list_parent_folders(path, TEST_FOLDERS))
    # A directory at the top is a package of its own.
    return {folder for folder in folders if "/" in folder}


def _find_unneeded_folders(archive: zipfile.ZipFile, site: Mapping[str, str]) -> set[str]:
    """Return the test directories that nothing which stays installed imports or names."""
    folders = _test_folders(site)
    parents = {posixpath.dirname(folder) for folder in folders}

    @functools.cache
    def references(path: str) -> set[str]:
        source = archive.read(site[path])
        return _list_named_tests(source, path) if _may_name_tests(source, path, parents) else set()

    entry_points = _entry_point_modules(archive)
    while True:
        names = set(entry_points)
        for path in site:
            if path.endswith(".py") and not _is_within(path, folders):
                names |= references(path)
        needed = folders & _find_test_folders(names)
        if not needed:
            return folders
        folders -= needed


def _find_test_folders(modules: Iterable[str]) -> set[str]:
    paths = (name.replace(".", "/") + "/" for name in modules)
    return {above for path in paths for above in _list_parent_folders(path, TEST_FOLDERS)}


def _list_parent_folders(path: str, names: Sequence[str]) -> Iterator[str]:
    return (folder for folder in list_parents(path) if posixpath.basename(folder) in names)


def _is_within(path: str, folders: Collection[str]) -> bool:
    return any(folder in folders for folder in list_parents(path))
