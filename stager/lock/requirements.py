"""Requirement files in pip's format, read line by line.

The format is the one pip documents ("Requirements File Format"): comments, line continuations,
``${NAME}`` from the environment, nested ``-r`` and ``-c``, index options. :mod:`stager.lock.spec`
decides what to do with a requirement; here a line keeps its text, its file and its number.
"""

from __future__ import annotations

import codecs
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ..config import foreign_files
from ..core.regular_files import bytes_of
from .indexes import Indexes
from .pyproject import PyprojectReader
from .requirement_line import RequirementLine, expand_user, relative
from .uv_project import UvProject

_NEAR = 0.8
"""Similarity of a name that may be meant by another."""
_COMMENT = re.compile(r"(^|\s+)#.*$")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_LINE_OPTIONS = re.compile(r"\s+(--[a-z-]+.*)$")
_SHORT_WITH_VALUE = re.compile(r"-[a-zA-Z][^=]")
_LONG_NAMES = {
    "-r": "--requirement",
    "-c": "--constraint",
    "-e": "--editable",
    "-i": "--index-url",
    "-f": "--find-links",
    "--pypi-url": "--index-url",
}
_WITHOUT_VALUE = ("--no-index", "--pre", "--require-hashes", "--prefer-binary")
_WITHOUT_EFFECT = ("--prefer-binary", "--use-feature")
"""Options that change nothing here."""

_INDEX_OPTIONS: Mapping[str, Callable[[str], Indexes]] = {
    "--index-url": lambda value: Indexes(index_url=value),
    "--extra-index-url": lambda value: Indexes(extra_index_urls=(value,)),
    "--find-links": lambda value: Indexes(find_links=(value,)),
    "--trusted-host": lambda value: Indexes(trusted_hosts=(value,)),
    "--only-binary": lambda value: Indexes(only_binary=tuple(value.split(","))),
    "--no-binary": lambda value: Indexes(no_binary=tuple(value.split(","))),
    "--no-index": lambda _: Indexes(no_index=True),
    "--pre": lambda _: Indexes(pre=True),
}
"""Options about places to look for packages, and the meaning of each value."""

_KNOWN = {*_LONG_NAMES.values(), *_WITHOUT_VALUE, *_WITHOUT_EFFECT, *_INDEX_OPTIONS}
"""Options that are read or have no effect here."""

_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",  # before that of UTF-16, with which it begins
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_CODING = re.compile(rb"\A(?:[^\n]*\n)?[ \t]*#[^\n]*?coding[:=][ \t]*([\w.-]+)")
"""The line that names a file's encoding (PEP 263), one of the first two."""


def refuse_editable(text: str) -> str:
    """Return why an editable requirement is refused, and what to write."""
    if "+" in text.partition("://")[0] and "://" in text:
        remedy = "write it without -e: a wheel of its commit is built"
    else:
        remedy = "ship the code as [project], or name its folder without -e to install it"
    return (
        f"{text} is refused: an editable install points at files on this machine, which the nodes "
        f"do not have; {remedy}"
    )


class RequirementReader:
    """Collects the contents of a set of requirement files; collects problems, too."""

    def __init__(self, root: Path, python: str) -> None:
        """Start empty.

        Args:
            root: the folder that file names in messages are relative to.
            python: the environment's Python, ``major.minor``.
        """
        self.root = root
        self.python = python
        self.requirements: list[RequirementLine] = []
        self.constraints: list[RequirementLine] = []
        self.indexes = Indexes()
        self.sources: dict[Path, None] = {}
        """The files that were read, in order."""
        self.problems: list[str] = []
        self.uv_projects: list[UvProject] = []
        self.require_hashes = ""
        """The place that asks for a hash of every file; empty for none."""
        self._seen: set[tuple[Path, bool]] = set()

    def read_file(self, path: Path, *, origin: str, constraint: bool = False) -> None:
        """Read one requirement file and all it includes.

        Args:
            path: the file.
            origin: where it was named, for the message that it is missing.
            constraint: true if its lines limit versions only.
        """
        path = Path(os.path.normpath(path))
        if (path, constraint) in self._seen:
            return  # so a circle of includes ends
        self._seen.add((path, constraint))
        text = self._text(path, origin)
        if text is None:
            return
        self.sources[path] = None
        for number, line in _logical_lines(text):
            line_origin = f"{relative(path, self.root)}:{number}"
            if line.startswith("-"):
                self._read_options(line, line_origin, path.parent, constraint=constraint)
            else:
                self._read_requirement(line, line_origin, path.parent, constraint=constraint)

    def read_project(self, project: UvProject, *, origin: str) -> None:
        """Read the dependencies in a ``pyproject.toml``, or in a script's block (PEP 723)."""
        reader = PyprojectReader(project, self.root, self.python)
        if project.is_script:
            reader.read_script()
        if project.is_script or reader.read(origin=origin):
            self.sources[project.file] = None
        self.requirements += reader.lines
        self.problems += reader.problems
        if reader.uv_project:
            self.uv_projects.append(reader.uv_project)

    def add(self, line: RequirementLine, *, constraint: bool) -> None:
        """Take one line as a requirement or as a constraint."""
        if constraint:
            self.constraints.append(line)
        else:
            self.requirements.append(line)

    def _text(self, path: Path, origin: str) -> str | None:
        """Return the text of a file; None, with a problem, if it cannot be used."""
        shown = relative(path, self.root)
        remedy = foreign_files.known(path.name)
        if remedy:
            self.problems.append(f"{origin}: {shown} is not a requirement file; {remedy}")
            return None
        try:
            text = _decode(bytes_of(path))
        except OSError as exc:
            self.problems.append(f"{origin}: cannot read {shown}: {exc.strerror}{_near(path)}")
        except (UnicodeError, LookupError) as exc:
            self.problems.append(
                f"{origin}: cannot read {shown}: {exc}; save it as UTF-8, or begin it with the "
                "encoding that it has (# -*- coding: latin-1 -*-)"
            )
        else:
            if "\0" not in text:
                return text
            self.problems.append(
                f"{origin}: {shown} has a NUL character, so it is not a text file, or UTF-16 "
                "without a mark; save it as UTF-8"
            )
        return None

    def _read_requirement(self, line: str, origin: str, folder: Path, *, constraint: bool) -> None:
        options = _LINE_OPTIONS.search(line)
        if options:
            line = line[: options.start()]
            self._refuse_options(options[1], origin)
        if "://" not in line:  # those of a URL may be secrets, and the resolvers fill them in
            line = _with_variables(line)
        requirement = RequirementLine(
            text=line.strip(), origin=origin, base=folder, options=options[1] if options else ""
        )
        self.add(requirement, constraint=constraint)

    def _read_options(self, line: str, origin: str, folder: Path, *, constraint: bool) -> None:
        """Read a line of options."""
        try:
            words = shlex.split(line, comments=False)
        except ValueError as exc:
            self.problems.append(f"{origin}: {exc}")
            return
        while words:
            if not words[0].startswith("-"):
                self.problems.append(f"{origin}: {words[0]} belongs on a line of its own")
                return
            name, value = _next_option(words)
            if name not in _KNOWN:
                self.problems.append(f"{origin}: the option {name} is not known here")
                return
            if value is None:
                self.problems.append(f"{origin}: {name} needs a value")
            elif name in ("--requirement", "--constraint"):
                self._include(value, origin, folder, constraint or name == "--constraint")
            else:
                self._apply_option(name, value, origin, folder)

    def _apply_option(self, name: str, value: str, origin: str, folder: Path) -> None:
        if name == "--editable":
            self.problems.append(f"{origin}: {refuse_editable(f'-e {value}')}")
        elif name in _INDEX_OPTIONS:
            if name == "--find-links":
                value = _find_links(value, (folder, self.root))
            self.indexes = self.indexes.plus(_INDEX_OPTIONS[name](value))
        elif name == "--require-hashes":
            self.require_hashes = self.require_hashes or origin

    def _include(self, name: str, origin: str, folder: Path, constraint: bool) -> None:
        """Read a file that ``-r`` or ``-c`` names."""
        if "://" in name:
            self.problems.append(f"{origin}: {name} is on a server; save a copy beside this file")
            return
        self.read_file(folder / _with_variables(name), origin=origin, constraint=constraint)

    def _refuse_options(self, options: str, origin: str) -> None:
        """Refuse options behind a requirement other than its hashes: they would be lost."""
        for word in options.split():
            option = word.partition("=")[0]
            if not option.startswith("--") or option == "--hash":
                continue
            remedy = "build the wheel with it (`pip wheel`), and name that wheel"
            if option in _KNOWN:
                remedy = "write it on a line of its own"
            self.problems.append(
                f"{origin}: {option} after a requirement is not supported; {remedy}"
            )


def _decode(data: bytes) -> str:
    """Return a requirement file's text, decoded as pip does it: by its mark, or its first lines.

    Raises:
        UnicodeError: it is not in that encoding.
        LookupError: nobody knows that encoding.
    """
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            return data[len(mark) if encoding == "utf-8" else 0 :].decode(encoding)
    named = _CODING.match(data)
    return data.decode(named[1].decode("ascii") if named else "utf-8")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with continuations joined and comments removed, with their first line's number.

    As in pip, a comment line ends a continuation, and a comment must follow white space.
    """
    pending: list[str] = []
    start = 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        if not pending:
            start = number
        is_comment = raw.lstrip().startswith("#")
        if raw.endswith("\\") and not is_comment:
            pending.append(raw[:-1])
            continue
        if not is_comment:
            pending.append(raw)
        line = _COMMENT.sub("", "".join(pending)).strip()
        pending = []
        if line:
            yield start, line


def _next_option(words: list[str]) -> tuple[str, str | None]:
    """Take one option off the front of a line; its value is None if it is missing."""
    word = words.pop(0)
    name, equals, value = word.partition("=")
    if _SHORT_WITH_VALUE.match(word) and not word.startswith("--"):
        name, equals, value = word[:2], "=", word[2:].removeprefix("=")
    name = _LONG_NAMES.get(name, name)
    if name in _WITHOUT_VALUE:
        return name, ""
    if equals:
        return name, value
    if not words:
        return name, None
    return name, words.pop(0)


def _with_variables(text: str) -> str:
    """Fill in ``${NAME}`` from the environment, in pip's notation only; unset names stay."""
    return _VARIABLE.sub(lambda match: os.environ.get(match[1], match[0]), text)


def _find_links(value: str, bases: Sequence[Path]) -> str:
    """Return a ``--find-links`` place; a relative folder is made absolute for every reader.

    As in pip, it starts at the file's folder, or where there is none at the working directory.
    """
    if "://" in value or "${" in value:
        return value
    places = [Path(os.path.normpath(base / expand_user(value))) for base in bases]
    return str(next((place for place in places if place.exists()), places[0]))


def _near(path: Path) -> str:
    """Return the question whether another file was meant; empty where none has a name like it."""
    try:
        names = [] if path.exists() else [file.name for file in path.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]}?" if near else ""
