"""Which files git would leave out: the patterns of ``.gitignore`` files, without git.

Each pattern becomes one regular expression over bytes, because git compares bytes too: ``?`` stands
for one byte. The outside facts are git's manual (gitignore(5)) and, where that is silent, what git
2.39 does; ``tests/stager/layers/test_ignore.py`` compares the two on generated trees.

Git decides from the top down: what an excluded directory holds is never looked at, so nothing in it
can be taken back. Callers keep to that by not descending into a directory that is left out.
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
    """One line of a ``.gitignore`` that can match something."""

    source: bytes
    """The regular expression that must match all of the name, or all of the path."""
    by_name: bool
    """Whether it is held against the last component alone: it was written without a slash."""
    directories_only: bool
    """Whether it was written with a slash at its end."""
    takes_back: bool
    """Whether it was written with ``!``."""


class Ignore:
    """The patterns of one ``.gitignore``, or of a setting with the same syntax."""

    def __init__(self, lines: Iterable[str | bytes], *, base: str = "") -> None:
        """Read patterns; lines that are empty, comments, or can never match are dropped.

        Args:
            lines: one pattern each, without line ends.
            base: the directory they are relative to, as the paths to be decided name it; empty for
                their common root.
        """
        self._base = os.fsencode(base) + b"/" if base else b""
        parsed = (_parse(os.fsencode(line)) for line in lines)
        patterns = [pattern for pattern in parsed if pattern is not None]
        # The last pattern that matches decides, so they are tried from the end.
        self._patterns = [(item, re.compile(item.source, re.DOTALL)) for item in reversed(patterns)]
        # Most paths match nothing: one expression for all patterns of a kind finds that out.
        self._any_name = _union(item.source for item in patterns if item.by_name)
        self._any_path = _union(item.source for item in patterns if not item.by_name)

    @classmethod
    def from_bytes(cls, content: bytes, *, base: str = "") -> Ignore:
        """Read the content of a ``.gitignore`` that lies in ``base``."""
        lines = content.removeprefix(_BOM).split(b"\n")
        return cls((line.removesuffix(b"\r") for line in lines), base=base)

    def decide(self, path: str, *, is_dir: bool) -> bool | None:
        """What these patterns say about one path.

        Args:
            path: with forward slashes, relative to what ``base`` is relative to.
            is_dir: whether it is a directory; a symbolic link to one is not.

        Returns:
            True to leave it out, False to take it back, None when no pattern speaks of it.
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
    """Whether a path is left out; of several rules the last one that speaks of it decides.

    Args:
        rules: those of the outermost directory first.
        path: as for :meth:`Ignore.decide`; the directories above it must not be excluded.
        is_dir: whether it is a directory.
    """
    for rule in reversed(rules):
        decision = rule.decide(path, is_dir=is_dir)
        if decision is not None:
            return decision
    return False


def anchored(path: str) -> str:
    """The pattern that matches this one path, relative to the patterns' base, and no other."""
    escaped = re.sub(r"([*?\[\\])", r"\\\1", path)
    if escaped.endswith(" "):
        escaped = escaped[:-1] + "\\ "
    return "/" + escaped


def _parse(line: bytes) -> _Pattern | None:
    if line.startswith(b"#"):
        return None
    text = _without_trailing_spaces(line.partition(b"\0")[0])
    takes_back = text.startswith(b"!")
    text = text[takes_back:]
    directories_only = text.endswith(b"/")
    text = text[: len(text) - directories_only]
    by_name = b"/" not in text
    if by_name:
        source = _translate(text, across=True)
    else:
        text = text.removeprefix(b"/")
        # Git compares what comes before the first special character by itself, and what follows as
        # a pattern of its own: so the ** of "a**/b" stands at a beginning and spans directories.
        special = _SPECIAL.search(text)
        start = special.start() if special else len(text)
        rest = _translate(text[start:], across=False)
        source = None if rest is None else re.escape(text[:start]) + rest
    if not source:
        return None
    return _Pattern(
        source=source, by_name=by_name, directories_only=directories_only, takes_back=takes_back
    )


def _without_trailing_spaces(line: bytes) -> bytes:
    """Cut spaces (not tabs) at the end, up to one that a backslash protects."""
    bare = line.rstrip(b" ")
    backslashes = len(bare) - len(bare.rstrip(b"\\"))
    if backslashes % 2 and len(bare) < len(line):
        return bare + b" "
    return bare


def _translate(text: bytes, *, across: bool) -> bytes | None:
    """Make a regular expression of a pattern, or return None if it can never match.

    Args:
        text: the pattern.
        across: whether wildcards match slashes too; they may for a bare name, which has none.
    """
    one, many = (b".", b".*") if across else (b"[^/]", b"[^/]*")
    parts: list[bytes] = []
    at = 0
    while at < len(text):
        here = text[at : at + 1]
        at += 1
        if here == b"*":
            end = at
            while text[end : end + 1] == b"*":
                end += 1
            piece, at = (many, end) if end == at else _stars(text, at - 1, end, many)
            parts.append(piece)
        elif here == b"?":
            parts.append(one)
        elif here == b"[":
            found = _bracket(text, at)
            if found is None:
                return None
            members, at = found
            members -= frozenset() if across else {_SLASH}
            if not members:
                return None
            parts.append(b"[%s]" % b"".join(b"\\x%02x" % code for code in sorted(members)))
        elif here == b"\\":
            if at == len(text):
                return None
            parts.append(re.escape(text[at : at + 1]))
            at += 1
        else:
            parts.append(re.escape(here))
    return b"".join(parts)


def _stars(text: bytes, start: int, end: int, many: bytes) -> tuple[bytes, int]:
    """The expression for two or more stars, ``text[start:end]``, and where to go on reading.

    They span directories only as a whole component; elsewhere they mean what one star means.
    """
    opens = start == 0 or text[start - 1] == _SLASH
    if opens and text[end : end + 1] == b"/":
        return b"(?:.*/)?", end + 1
    if opens and (end == len(text) or text[end : end + 2] == b"\\/"):
        return b".*", end
    return many, end


def _bracket(text: bytes, at: int) -> tuple[frozenset[int], int] | None:
    """Read ``[...]``: the bytes it stands for, and where it ends; None if it does not.

    Args:
        text: the whole pattern.
        at: just behind the opening bracket.
    """
    inverted = text[at : at + 1] in (b"!", b"^")
    at += inverted
    members: set[int] = set()
    low = 0  # what a "-" that comes next would be a range from; 0 for nothing
    first = True
    while first or text[at : at + 1] != b"]":
        first = False
        char = text[at : at + 1]
        follows = text[at + 1 : at + 2]
        in_range = char == b"-" and low and follows not in (b"", b"]")
        if in_range:
            at += 1
            char = follows
        elif char == b"[" and follows == b":":
            close = text.find(b"]", at + 2)
            if close < 0:
                return None
            if close > at + 2 and text[close - 1 : close] == b":":
                named = _CLASSES.get(text[at + 2 : close - 1])
                if named is None:
                    return None
                members |= named
                low, at = 0, close + 1
                continue
        if char == b"\\":
            at += 1
            char = text[at : at + 1]
        if not char:
            return None
        members.update(range(low, char[0] + 1) if in_range else char)
        low = 0 if in_range else char[0]
        at += 1
    chosen = frozenset(range(1, 256)) - members if inverted else frozenset(members)
    return chosen, at + 1


def _union(sources: Iterable[bytes]) -> re.Pattern[bytes]:
    """One expression that matches whatever any of them does; none of them: nothing."""
    joined = b"|".join(b"(?:%s)" % source for source in sources)
    return re.compile(joined or b"(?!)", re.DOTALL)
