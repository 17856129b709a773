"""Patterns of ``.gitignore`` files, matched as git does, without git.

Each pattern becomes one regular expression over bytes, because git compares bytes too: ``?`` stands
for one byte. The rules are those of git's manual (gitignore(5)) and, where it is silent, those of
git 2.39; ``tests/stager/layers/test_ignore.py`` compares the two on generated trees.

Git decides from the top down: the content of an excluded directory is never looked at, so nothing
in it can be taken back. Callers must not descend into a directory that is left out.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Ignore", "anchored", "excluded"]

_BOM = b"\xef\xbb\xbf"
_SPECIAL = re.compile(rb"[*?\[\\]")
_SLASH = ord("/")
_CLASSES = {
    name: frozenset(members)
    for name, members in (
        (b"alnum", (string.ascii_letters + string.digits).encode()),
        (b"alpha", string.ascii_letters.encode()),
        (b"blank", b" \t"),
        (b"cntrl", bytes([*range(32), 127])),
        (b"digit", string.digits.encode()),
        (b"graph", bytes(range(33, 127))),
        (b"lower", string.ascii_lowercase.encode()),
        (b"print", bytes(range(32, 127))),
        (b"punct", string.punctuation.encode()),
        (b"space", b" \t\n\r"),  # git's own: without vertical tab and form feed
        (b"upper", string.ascii_uppercase.encode()),
        (b"xdigit", string.hexdigits.encode()),
    )
}


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    source: bytes
    """The regular expression that must match all of the name, or all of the path."""
    by_name: bool
    """True if it is compared with the last component alone: it was written without a slash."""
    directories_only: bool
    """True if it was written with a slash at its end."""
    takes_back: bool
    """True if it was written with ``!``."""


class Ignore:
    """The patterns of one ``.gitignore``, or of a setting with the same syntax."""

    def __init__(self, lines: Iterable[str | bytes], *, base: str = "") -> None:
        """Read pattern lines, without those that can never match; ``base`` is their directory."""
        self._base = os.fsencode(base) + b"/" if base else b""
        self._patterns: list[tuple[_Pattern, re.Pattern[bytes]]] = []
        names: list[bytes] = []
        paths: list[bytes] = []
        for line in lines:
            pattern = _parse(os.fsencode(line))
            if pattern is not None:
                self._patterns.append((pattern, re.compile(pattern.source, re.DOTALL)))
                (names if pattern.by_name else paths).append(pattern.source)
        # The last pattern that matches decides, so they are tried from the end.
        self._patterns.reverse()
        # Most paths match nothing: one expression for all patterns of a kind finds that out.
        self._any_name = _union(names)
        self._any_path = _union(paths)

    @classmethod
    def from_bytes(cls, content: bytes, *, base: str = "") -> Ignore:
        """Read the content of a ``.gitignore`` that lies in ``base``."""
        lines = content.removeprefix(_BOM).split(b"\n")
        return cls((line.removesuffix(b"\r") for line in lines), base=base)

    def decide(self, path: str, *, is_dir: bool) -> bool | None:
        """Decide about one path.

        Args:
            path: with forward slashes, relative to the same root as ``base``.
            is_dir: true for a directory, but not for a symbolic link to one.

        Returns:
            True to leave it out, False to take it back, None if no pattern matches it.
        """
        whole = os.fsencode(path)
        if not whole.startswith(self._base):
            return None
        whole = whole[len(self._base) :]
        name = whole[whole.rfind(b"/") + 1 :]
        if not (self._any_name.fullmatch(name) or self._any_path.fullmatch(whole)):
            return None
        for pattern, regex in self._patterns:
            if pattern.directories_only and not is_dir:
                continue
            if regex.fullmatch(name if pattern.by_name else whole):
                return not pattern.takes_back
        return None


def excluded(rules: Sequence[Ignore], path: str, *, is_dir: bool) -> bool:
    """Return whether the last matching rule excludes a path; its parents must not be excluded."""
    for rule in reversed(rules):
        decision = rule.decide(path, is_dir=is_dir)
        if decision is not None:
            return decision
    return False


def anchored(path: str) -> str:
    """Return the pattern that matches only this path, relative to the patterns' base."""
    escaped = re.sub(r"([*?\[\\])", r"\\\1", path)
    if escaped.endswith(" "):
        escaped = escaped[:-1] + "\\ "
    return "/" + escaped


def _parse(line: bytes) -> _Pattern | None:
    if line.startswith(b"#"):
        return None
    text = _without_trailing_spaces(line.partition(b"\0")[0])
    takes_back = text.startswith(b"!")
    text = text.removeprefix(b"!")
    directories_only = text.endswith(b"/")
    text = text.removesuffix(b"/")
    by_name = b"/" not in text
    source = _translate(text, across=True) if by_name else _translate_path(text)
    if not source:
        return None
    return _Pattern(
        source=source, by_name=by_name, directories_only=directories_only, takes_back=takes_back
    )


def _translate_path(text: bytes) -> bytes | None:
    """Make a regular expression of a pattern with a slash; None if it can never match.

    Git compares what comes before the first special character by itself, and what follows as a
    pattern of its own: so the ** of "a**/b" stands at a beginning and spans directories.
    """
    text = text.removeprefix(b"/")
    special = _SPECIAL.search(text)
    start = special.start() if special else len(text)
    rest = _translate(text[start:], across=False)
    if rest is None:
        return None
    return re.escape(text[:start]) + rest


def _without_trailing_spaces(line: bytes) -> bytes:
    """Cut spaces (not tabs) at the end, up to one that a backslash protects."""
    bare = line.rstrip(b" ")
    backslashes = len(bare) - len(bare.rstrip(b"\\"))
    if backslashes % 2 and len(bare) < len(line):
        return bare + b" "
    return bare


def _translate(text: bytes, *, across: bool) -> bytes | None:
    """Translate a pattern; None if it can never match. ``across``: wildcards match slashes too."""
    parts: list[bytes] = []
    at = 0
    while at < len(text):
        part, at = _next_part(text, at, across=across)
        if part is None:
            return None
        parts.append(part)
    return b"".join(parts)


def _next_part(text: bytes, at: int, *, across: bool) -> tuple[bytes | None, int]:
    char = text[at : at + 1]
    if char == b"*":
        return _stars(text, at, across=across)
    if char == b"?":
        return b"." if across else b"[^/]", at + 1
    if char == b"[":
        return _bracket(text, at + 1, across=across)
    if char == b"\\":
        at += 1
        if at == len(text):
            return None, at
    return re.escape(text[at : at + 1]), at + 1


def _stars(text: bytes, start: int, *, across: bool) -> tuple[bytes, int]:
    """Translate stars: two or more span directories only as a whole component, else act as one."""
    end = start + 1
    while text[end : end + 1] == b"*":
        end += 1
    several = end > start + 1
    opens = start == 0 or text[start - 1] == _SLASH
    if several and opens:
        if text[end : end + 1] == b"/":
            return b"(?:.*/)?", end + 1
        if end == len(text) or text[end : end + 2] == b"\\/":
            return b".*", end
    return b".*" if across else b"[^/]*", end


def _bracket(text: bytes, at: int, *, across: bool) -> tuple[bytes | None, int]:
    """Return the expression for ``[...]`` and the position after it; ``at`` is after the ``[``."""
    reader = _BracketReader(text, at)
    members = reader.read()
    if members is None:
        return None, at
    if not across:
        members -= {_SLASH}
    if not members:
        return None, at
    codes = b"".join(b"\\x%02x" % code for code in sorted(members))
    return b"[%s]" % codes, reader.at


class _BracketReader:
    def __init__(self, text: bytes, at: int) -> None:
        self.text = text
        self.at = at
        self.members: set[int] = set()
        self.low = 0
        """The byte that a "-" would start a range from; 0 for none."""

    def read(self) -> frozenset[int] | None:
        """Return the bytes; None if the bracket is not valid. ``at`` is then behind it."""
        inverted = self._char() in (b"!", b"^")
        if inverted:
            self.at += 1
        first = True
        while first or self._char() != b"]":
            first = False
            if not self._read_item():
                return None
        self.at += 1
        if inverted:
            return frozenset(range(1, 256)) - self.members
        return frozenset(self.members)

    def _read_item(self) -> bool:
        char, following = self._char(), self._char(1)
        if char == b"-" and self.low and following not in (b"", b"]"):
            self.at += 1
            return self._read_range()
        if char == b"[" and following == b":":
            close = self.text.find(b"]", self.at + 2)
            if close < 0:
                return False
            if close > self.at + 2 and self.text[close - 1 : close] == b":":
                return self._read_class(close)
        return self._read_byte()

    def _read_range(self) -> bool:
        high = self._take_byte()
        if high is None:
            return False
        self.members.update(range(self.low, high + 1))
        self.low = 0
        return True

    def _read_class(self, close: int) -> bool:
        members = _CLASSES.get(self.text[self.at + 2 : close - 1])
        if members is None:
            return False
        self.members |= members
        self.low = 0
        self.at = close + 1
        return True

    def _read_byte(self) -> bool:
        byte = self._take_byte()
        if byte is None:
            return False
        self.members.add(byte)
        self.low = byte
        return True

    def _take_byte(self) -> int | None:
        if self._char() == b"\\":
            self.at += 1
        char = self._char()
        if not char:
            return None
        self.at += 1
        return char[0]

    def _char(self, ahead: int = 0) -> bytes:
        start = self.at + ahead
        return self.text[start : start + 1]


def _union(sources: Iterable[bytes]) -> re.Pattern[bytes]:
    joined = b"|".join(b"(?:%s)" % source for source in sources)
    return re.compile(joined or b"(?!)", re.DOTALL)
