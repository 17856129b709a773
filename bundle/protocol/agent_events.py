"""The lines of agents, as their driver reads them: each is an event, or else output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from . import output
from .answers import AgentEvent, Answer
from .codec import decode
from .enumerations import PhaseName
from .events import OF_AGENTS, OutputShown
from .json_values import DecodeError
from .requests import VERSION

_KINDS: Mapping[str, type[AgentEvent]] = {
    kind.event: kind for kind in OF_AGENTS if kind is not OutputShown
}


@dataclass(frozen=True)
class RankOutput(AgentEvent):
    """Output of a rank, of the launcher, or of an agent itself."""

    event: ClassVar[str] = "output"

    rank: int | None = None
    """The rank; None for the launcher, or the agent itself."""
    data: bytes = b""
    """The bytes."""
    of_ranks: bool = False
    """True if a rank or the launcher wrote it; only that is counted by agents."""


def answer_class(phase: str) -> type[Answer]:
    """Return the class of the answers to a phase."""
    kind = _KINDS.get(phase, Answer)
    return kind if issubclass(kind, Answer) else Answer


def read_agent_line(line: bytes, node: str, phase: str) -> AgentEvent:
    """Read a line that an agent has written, without its end.

    Returns:
        The event; a line that is none, such as a traceback's, is the agent's own output.
    """
    try:
        return _event(line, node, phase)
    except (KeyError, RecursionError, TypeError, ValueError):  # a DecodeError is a ValueError
        return RankOutput(node, data=line + b"\n")


def _event(line: bytes, node: str, phase: str) -> AgentEvent:
    raw = json.loads(line)
    if not isinstance(raw, dict) or raw.pop("v", None) != VERSION:
        raise DecodeError("v", "it is no event of this version")
    name = raw.pop("event")
    if name == RankOutput.event:
        rank = raw["rank"]
        if rank is not None and type(rank) is not int:
            raise DecodeError("rank", "it is not a whole number")
        return RankOutput(node, rank, output.decoded(raw), of_ranks=True)
    kind = _KINDS[phase if name == PhaseName.SESSION else name]
    return _decoded(kind, {**raw, "node": node})


def _decoded(kind: type[AgentEvent], raw: Mapping[str, object]) -> AgentEvent:
    """Read the fields of an event; those of a failed answer may be few."""
    has_failed = issubclass(kind, Answer) and raw.get("ok") is False
    return decode(kind, raw, strict=not has_failed)
