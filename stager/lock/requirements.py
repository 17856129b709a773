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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..config import foreign_files
from ..core.files import bytes_of
from .indexes import Indexes
from .requirement_line import RequirementLine, find_path, relative
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
        self.root = root
        self.python = python
        self.lines: list[RequirementLine] = []
        self.indexes = Indexes()
        self.problems: list[str] = []
        self.uv_projects: dict[Path, UvProject] = {}
        """Projects with settings that only uv honours, by their file."""
        self.require_hashes = ""
        """The place that asks for a hash of every file; empty for none."""
        self._seen: set[tuple[Path, bool]] = set()

    def read_file(self, path: Path, *, origin: str, constraint: bool = False) -> None:
        """Read one requirement file and all it includes."""
        path = Path(os.path.normpath(path))
        if (path, constraint) in self._seen:
            return  # so a circle of includes ends
        self._seen.add((path, constraint))
        text = self._text(path, origin)
        if text is None:
            return
        for number, line_text in _logical_lines(text):
            line = RequirementLine(
                text=line_text,
                origin=f"{relative(path, self.root)}:{number}",
                base=path.parent,
                constraint=constraint,
            )
            if line_text.startswith("-"):
                self._read_options(line)
            else:
                self._read_requirement(line)

    def leave_to_uv(self, project: UvProject) -> None:
        """Note a project that uv is to read, with what other entries take of it."""
        earlier = self.uv_projects.get(project.file)
        self.uv_projects[project.file] = earlier.plus(project) if earlier else project

    def _text(self, path: Path, origin: str) -> str | None:
        shown = relative(path, self.root)
        remedy = foreign_files.known(path.name)
        if remedy:
            self.problems.append(f"{origin}: {shown} is not a requirement file; {remedy}")
            return None
        try:
            text = _decode(bytes_of(path))
        except OSError as exc:
            why = f"{exc.strerror}{_near(path)}"
        except (UnicodeError, LookupError) as exc:
            why = (
                f"{exc}; save it as UTF-8, or begin it with the encoding that it has "
                "(# -*- coding: latin-1 -*-)"
            )
        else:
            if "\0" not in text:
                return text
            why = (
                "it has a NUL character, so it is not a text file, or UTF-16 without a mark; save "
                "it as UTF-8"
            )
        self.problems.append(f"{origin}: cannot read {shown}: {why}")
        return None

    def _read_requirement(self, line: RequirementLine) -> None:
        found = _LINE_OPTIONS.search(line.text)
        options = found[1] if found else ""
        text = line.text[: found.start()] if found else line.text
        for word in options.split():
            option = word.partition("=")[0]
            if not option.startswith("--") or option == "--hash":
                continue
            remedy = "build the wheel with it (`pip wheel`), and name that wheel"
            if option in _KNOWN:
                remedy = "write it on a line of its own"
            self.problems.append(
                f"{line.origin}: {option} after a requirement is not supported; {remedy}"
            )
        if "://" not in text:  # those of a URL may be secrets, and the resolvers fill them in
            text = _with_variables(text)
        self.lines.append(replace(line, text=text.strip(), options=options))

    def _read_options(self, line: RequirementLine) -> None:
        try:
            words = shlex.split(line.text, comments=False)
        except ValueError as exc:
            self.problems.append(f"{line.origin}: {exc}")
            return
        while words:
            if not words[0].startswith("-"):
                self.problems.append(f"{line.origin}: {words[0]} belongs on a line of its own")
                return
            name, value = _next_option(words)
            if name not in _KNOWN:
                self.problems.append(f"{line.origin}: the option {name} is not known here")
                return
            if value is None:
                self.problems.append(f"{line.origin}: {name} needs a value")
            else:
                self._apply_option(name, value, line)

    def _apply_option(self, name: str, value: str, line: RequirementLine) -> None:
        if name in ("--requirement", "--constraint"):
            if "://" in value:
                self.problems.append(
                    f"{line.origin}: {value} is on a server; save a copy beside this file"
                )
                return
            path = line.base / _with_variables(value)
            constraint = line.constraint or name == "--constraint"
            self.read_file(path, origin=line.origin, constraint=constraint)
        elif name == "--editable":
            self.problems.append(f"{line.origin}: {refuse_editable(f'-e {value}')}")
        elif name in _INDEX_OPTIONS:
            if name == "--find-links" and "://" not in value and "${" not in value:
                # As in pip, at the file's folder, else at the working directory.
                value = str(find_path(value, (line.base, self.root)))
            self.indexes = self.indexes.plus(_INDEX_OPTIONS[name](value))
        elif name == "--require-hashes":
            self.require_hashes = self.require_hashes or line.origin


def _decode(data: bytes) -> str:
    """Decode a requirement file as pip does: by its byte order mark, or its first lines."""
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
    """Remove the first option of a line; its value is None if missing, "" if it takes none."""
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


def _near(path: Path) -> str:
    try:
        names = [] if path.exists() else [file.name for file in path.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]}?" if near else ""
