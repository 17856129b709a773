"""Compressed node lists as Slurm writes them: ``n[01-03,07],login1``, also without ``scontrol``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..regex import compile_lazily

MAX_HOSTS = 65536  # MAX_SLURM_NODES in slurm.h is of this order; guards against a typing slip

_BALANCED = compile_lazily(r"[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*")
_TERM = compile_lazily(r"(?:^|,)([^,\[\]]*(?:\[[^\[\]]*\][^,\[\]]*)*)")  # with the comma before it
_PIECE = compile_lazily(r"\[([^\[\]]*)\]|([^\[\],]+)")
_COUNT = compile_lazily(r"(\d+)(?:\(x(\d+)\))?")
_NUMBERED = compile_lazily(r"([^\[\],\s]*?)(\d+)")
_HOST = compile_lazily(r"([A-Za-z0-9._][A-Za-z0-9._-]*@)?[A-Za-z0-9._:%][A-Za-z0-9._:%-]*")
"""A host, or a user there; ``ssh`` would read a name that begins with a dash as an option."""
_RANGE = compile_lazily(r"(\d{1,18})(?:-(\d{1,18}))?")  # Python refuses to read thousands of digits


def expand_hostlist(text: str) -> list[str]:
    """Return every host name in a compressed list, in its order, with zero padding kept."""
    if not _BALANCED.fullmatch(text):
        raise _error(text, "its brackets do not match")
    hosts: list[str] = []
    for term in _TERM.findall(text.strip()):
        choices: list[Sequence[str]] = []
        for choice in _list_choices(text, term):
            choices.append(choice)
            if len(hosts) + math.prod(map(len, choices)) > MAX_HOSTS:
                raise _error(text, f"it stands for more than {MAX_HOSTS} hosts")
        hosts += map("".join, itertools.product(*choices))
    return hosts


def fold_hosts(hosts: Sequence[str]) -> str:
    """Return host names as Slurm would write them, in the order of first appearance."""
    groups: dict[tuple[str, int], list[int]] = {}
    for host in hosts:
        numbered = _NUMBERED.fullmatch(host)
        prefix, digits = numbered.groups() if numbered else (host, "")
        # Numbers of one width only, as "n[8-10]" would lose the zeros of "n08".
        groups.setdefault((prefix, len(digits)), []).append(int(digits or 0))
    return ",".join(
        _fold_numbers(prefix, width, numbers) if width else prefix
        for (prefix, width), numbers in groups.items()
    )


def _fold_numbers(prefix: str, width: int, numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ",".join("-".join(f"{number:0{width}}" for number in run) for run in runs)
    return f"{prefix}{text}" if len(numbers) == 1 else f"{prefix}[{text}]"


def parse_counts(text: str) -> list[int]:
    """Read Slurm's short form of counts: ``4(x3),8`` is 4, 4, 4 and 8; [] if it cannot be read."""
    parts = [_COUNT.fullmatch(part) for part in text.split(",")]
    known = [part for part in parts if part is not None]
    counts = [int(part[1]) for part in known for _ in range(int(part[2] or 1))]
    return counts if len(known) == len(parts) else []


def matches_host(pattern: str, host: str) -> bool:
    """Return True if a list in this notation has the host, by its full or its short name."""
    return not {host, host.partition(".")[0]}.isdisjoint(expand_hostlist(pattern))


def find_invalid_hosts(names: Iterable[str]) -> list[str]:
    """Return the names that cannot be a host's: ``ssh`` or a shell would read them otherwise."""
    # A single colon is before a port; more of them are an address.
    return [name for name in names if not _HOST.fullmatch(name) or name.count(":") == 1]


def _list_choices(text: str, term: str) -> Iterator[list[str]]:
    if term.split() != [term]:
        raise _error(text, f"it holds {'a blank' if term else 'an empty name'}")
    for match in _PIECE.finditer(term):
        numbers, literal = match.groups()
        yield [literal] if numbers is None else _expand_numbers(text, numbers)


def _expand_numbers(text: str, numbers: str) -> list[str]:
    expanded: list[str] = []
    for item in numbers.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _error(text, f"{item!r} is neither a number nor a range of numbers")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise _error(text, f"the range {item} runs backwards")
        if int(high) - int(low) >= MAX_HOSTS:
            raise _error(text, f"it stands for more than {MAX_HOSTS} hosts")
        expanded += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return expanded


def _error(text: str, why: str) -> NodeError:
    return NodeError(Problem(ProblemCode.NODE_LIST_UNREADABLE, repr(text), {"why": why}))


NODE = "STAGER_NODE"  # the name of a host that was reached over ``ssh``, as the user wrote it
_LAUNCH_HOST = "SLURM_LAUNCH_NODE_IPADDR"  # the host that has started a step, see srun(1)
_CONNECTION = "SSH_CONNECTION"  # the client's address and port, then the server's, see ssh(1)


def get_node_name(env: Mapping[str, str]) -> str:
    """Return the name that the driver has for this node; empty outside of a step."""
    return env.get(NODE) or env.get("SLURMD_NODENAME", "")


def get_driver_host(env: Mapping[str, str]) -> str:
    """Return the address of the driver's host as this node sees it; empty if it is not known."""
    return _get_ssh_addresses(env)[0] if NODE in env else env.get(_LAUNCH_HOST, "")


def get_reached_address(env: Mapping[str, str]) -> str:
    """Return the address at which ``ssh`` has reached this host; empty if it has not."""
    return _get_ssh_addresses(env)[1] if NODE in env else ""


def _get_ssh_addresses(env: Mapping[str, str]) -> tuple[str, str]:
    words = env.get(_CONNECTION, "").split()
    return (words[0], words[2]) if len(words) == 4 else ("", "")
