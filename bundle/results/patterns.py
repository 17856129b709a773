"""The outputs of a job as its author writes them: paths and patterns below the run directory.

``*``, ``?`` and ``[...]`` match within one name, ``**`` stands for any number of directories, and
``.`` for everything. A name that begins with a dot is matched only by a pattern that does too, so
nobody asks for ``.ssh`` by accident. Both sides read patterns with the same code: the node to find
what is to be sent, home to refuse what nobody asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

_MAGIC = frozenset("*?[")


def split(output: str) -> tuple[str, ...] | None:
    """The parts of an output's path or pattern, none for everything.

    None if it could stand for something outside of the directory.
    """
    if not output or "\0" in output or output.startswith("/") or ".." in output.split("/"):
        return None
    parts = tuple(part for part in output.split("/") if part not in ("", "."))
    # What "**" at the end stands for lies in what "*" stands for.
    return (*parts[:-1], "*") if parts[-1:] == ("**",) else parts


def wanted(name: str, outputs: Sequence[str]) -> bool:
    """Whether a path is one that one of the outputs stands for."""
    for output in outputs:
        pattern = split(output)
        if pattern is None:
            continue
        parts = name.split("/")
        if parts == list(pattern) or (not pattern and len(parts) == 1):
            return True
        states = _passing({0}, pattern)
        for part in parts:
            states = _passing(set(_steps(states, pattern, part)), pattern)
        if len(pattern) in states:
            return True
    return False


def expand(base: str, pattern: tuple[str, ...]) -> set[str]:
    """The paths below ``base`` that a pattern stands for; a name that exists stands for itself."""
    if not pattern:
        return set(_listing(base, ""))
    plain = "/".join(pattern)
    if os.path.lexists(os.path.join(base, plain)):
        return {plain}
    places = {""}
    for part in pattern:
        if part == "**":
            places = {below for place in places for below in _folders(base, place)}
        elif _MAGIC.isdisjoint(part):
            joined = {f"{place}{part}/" for place in places}
            places = {one for one in joined if os.path.lexists(os.path.join(base, one[:-1]))}
        else:
            places = {
                f"{place}{name}/"
                for place in places
                for name in _listing(base, place)
                if _fits(name, part)
            }
    return {place[:-1] for place in places}


def above(name: str) -> Iterator[str]:
    """The directories that a path lies in, from the outermost."""
    parts = name.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _folders(base: str, place: str) -> Iterator[str]:
    """A directory and all below it, without links and what is hidden; each ends with a slash."""
    waiting = [place]
    while waiting:
        place = waiting.pop()
        yield place
        for name in _listing(base, place):
            path = os.path.join(base, place, name)
            if not name.startswith(".") and os.path.isdir(path) and not os.path.islink(path):
                waiting.append(f"{place}{name}/")


def _listing(base: str, place: str) -> list[str]:
    try:
        return os.listdir(os.path.join(base, place))
    except OSError:  # not a directory, or closed: nothing in it can be an output
        return []


def _fits(name: str, part: str) -> bool:
    """Whether a name matches a part of a pattern; what is hidden is only found by a dot."""
    return (part.startswith(".") or not name.startswith(".")) and fnmatchcase(name, part)


def _passing(states: set[int], pattern: tuple[str, ...]) -> set[int]:
    """Places in a pattern, with those behind each ``**``, which may stand for nothing."""
    for place, part in enumerate(pattern):  # in order, so that several in a row are passed at once
        if part == "**" and place in states:
            states.add(place + 1)
    return states


def _steps(states: Iterable[int], pattern: tuple[str, ...], name: str) -> Iterator[int]:
    """Places in a pattern that one more part of a path leads to."""
    for state in states:
        if state < len(pattern) and pattern[state] == "**":
            if not name.startswith("."):
                yield state
        elif state < len(pattern) and _fits(name, pattern[state]):
            yield state + 1
