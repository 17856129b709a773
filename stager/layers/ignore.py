"""Patterns of ``.gitignore`` files, except classes such as ``[[:alpha:]]``."""

from __future__ import annotations

import codecs
import os
import re
import warnings
from collections.abc import Iterable, Sequence


class Ignore:
    """The patterns of one ``.gitignore``, or of a setting with the same syntax."""

    def __init__(self, lines: Iterable[str], *, base: str = "") -> None:
        """Read pattern lines, without those that can never match; ``base`` is their directory."""
        self._base = f"{base}/" if base else ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # a [ in a set is one
            # The last pattern that matches decides, so they are tried from the end.
            self._patterns = list(filter(None, map(_parse, lines)))[::-1]
            # Most paths match nothing: one expression for all of them finds that out.
            sources = (re.sub(r"\?P<\w+>", "?:", one[0].pattern) for one in self._patterns)
            self._any = re.compile("|".join(sources) or "(?!)", re.DOTALL)

    @classmethod
    def from_bytes(cls, content: bytes, *, base: str = "") -> Ignore:
        """Read the content of a ``.gitignore`` that lies in ``base``."""
        lines = os.fsdecode(content.removeprefix(codecs.BOM_UTF8)).split("\n")
        return cls((line.removesuffix("\r") for line in lines), base=base)

    def decide(self, path: str, *, is_dir: bool) -> bool | None:
        """Return True to leave a path out, False to take it back, None if nothing matches."""
        inner = path.removeprefix(self._base)
        if (self._base and inner == path) or not self._any.search(inner):
            return None
        for regex, directories_only, leaves_out in self._patterns:
            match = regex.search(inner) if is_dir or not directories_only else None
            # The group stands for a directory above, which was decided about by itself.
            if match and not match.groupdict().get("ps_d"):
                return leaves_out
        return None


def is_excluded(rules: Sequence[Ignore], path: str, *, is_dir: bool) -> bool:
    """Return whether the last matching rule excludes a path; its parents must not be excluded."""
    for rule in reversed(rules):
        decision = rule.decide(path, is_dir=is_dir)
        if decision is not None:
            return decision
    return False


def anchor(path: str) -> str:
    """Return the pattern that matches only this path, relative to the patterns' base."""
    escaped = re.sub(r"([*?\[\\])", r"\\\1", path)
    if escaped.endswith(" "):
        escaped = escaped[:-1] + "\\ "
    return "/" + escaped


def _parse(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    """Return what a line matches, whether directories only, and False for a line with ``!``."""
    from pathspec.patterns.gitignore.base import GitIgnorePatternError
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

    text = re.sub(r"(?<!\\) +$", "", line)
    try:
        source, leaves_out = GitIgnoreSpecPattern.pattern_to_regex(text.removesuffix("/"))
        if source is None or leaves_out is None:
            return None
        source = source.replace("[^", "[^/")  # as in git, no set matches a slash
        return re.compile(source, re.DOTALL), text.endswith("/"), leaves_out
    except (GitIgnorePatternError, re.error):  # git takes it for one that matches nothing
        return None
