"""Compressed node lists as Slurm writes them: ``n[01-03,07],login1``.

Read here rather than by ``scontrol show hostnames``, which a container may not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..protocol.problem import NodeError, Problem

MAX_HOSTS = 65536  # MAX_SLURM_NODES in slurm.h is of this order; guards against a typing slip

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_NUMBERED = re.compile(r"([^\[\],\s]*?)(\d+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hostlist(text: str) -> list[str]:
    """Every host name a compressed list stands for, in its order, with zero padding kept.

    Raises:
        NodeError: empty list, unbalanced brackets, a range that is not one, or too many hosts.
    """
    hosts: list[str] = []
    for term in _terms(text):
        names = [""]
        for numbers, literal in _pieces(text, term):
            parts = _numbers(text, numbers) if literal is None else [literal]
            if len(hosts) + len(names) * len(parts) > MAX_HOSTS:
                raise _error(text, f"it stands for more than {MAX_HOSTS} hosts")
            names = [name + part for name in names for part in parts]
        hosts += names
    return hosts


def fold(hosts: Sequence[str]) -> str:
    """Host names as Slurm would write them: ``n[01-03,07],login1``; the reverse of expanding.

    Names are grouped by what stands before their last number, in the order of first appearance.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for host in hosts:
        found = _NUMBERED.fullmatch(host)
        if found is None:
            groups.setdefault((host, 0), [])
            continue
        # Numbers of one width only, as "n[8-10]" would lose the zeros of "n08".
        groups.setdefault((found[1], len(found[2])), []).append(int(found[2]))
    return ",".join(
        _bracketed(prefix, width, sorted(numbers)) for (prefix, width), numbers in groups.items()
    )


def _bracketed(prefix: str, width: int, numbers: Sequence[int]) -> str:
    if not width:
        return prefix
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [
        f"{run[0]:0{width}}" + (f"-{run[-1]:0{width}}" if len(run) > 1 else "") for run in runs
    ]
    alone = len(numbers) == 1
    return prefix + (shown[0] if alone else f"[{','.join(shown)}]")


def matches(pattern: str, host: str) -> bool:
    """Whether a list in this notation holds the host, by its full or its short name."""
    names = expand_hostlist(pattern)
    return host in names or host.partition(".")[0] in names


def _terms(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    depth, term = 0, ""
    for char in text.strip():
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _error(text, "its brackets do not match")
        if char == "," and depth == 0:
            yield term
            term = ""
        else:
            term += char
    if depth:
        raise _error(text, "its brackets do not match")
    yield term


def _pieces(text: str, term: str) -> Iterator[tuple[str, str | None]]:
    """The bracketed and the plain pieces of one term, as (numbers, None) or ("", literal)."""
    if not term or any(char.isspace() for char in term):
        raise _error(text, "it holds an empty name" if not term else "it holds a blank")
    for match in _PIECE.finditer(term):
        yield (match[1], None) if match[2] is None else ("", match[2])


def _numbers(text: str, numbers: str) -> list[str]:
    out: list[str] = []
    for item in numbers.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _error(text, f"{item!r} is neither a number nor a range of numbers")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise _error(text, f"the range {item} runs backwards")
        if int(high) - int(low) >= MAX_HOSTS:
            raise _error(text, f"it stands for more than {MAX_HOSTS} hosts")
        out += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return out


def _error(text: str, why: str) -> NodeError:
    return NodeError(
        Problem(
            what="the node list cannot be read",
            where=repr(text),
            why=why,
            fix="write it as Slurm does, for example n[01-03,07],login1",
        )
    )
