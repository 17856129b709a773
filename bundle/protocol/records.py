"""The line that an event becomes, and events read back from lines that may be damaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .answers import AgentEvent
from .codec import decode
from .events import OF_AGENTS, OF_DRIVER, DriverEvent, Event, OutputShown
from .json_values import DecodeError
from .requests import VERSION

_BY_NAME: dict[str, type[DriverEvent] | type[AgentEvent]] = {
    **{kind.event: kind for kind in OF_DRIVER},
    **{kind.event: kind for kind in OF_AGENTS},
}
_LAST_TIME = 1e12
"""No time since the epoch is as late as this."""


@dataclass(frozen=True)
class Record:
    """An event as a line has it."""

    event: Event
    """The event."""
    job_id: str = ""
    """The allocation's id, or one made up for a local job."""
    time: float | None = None
    """Seconds since the epoch, by the driver's clock; None in lines of older versions."""
    phase: str = ""
    """The phase of an agent's event; empty for others."""

    def to_json(self) -> dict[str, object]:
        """Return the line as a JSON object."""
        phase = {"phase": self.phase} if self.phase else {}
        head = {"v": VERSION, "job_id": self.job_id, "time": self.time, **phase}
        return {**head, **self.event.to_json()}


def read_record(raw: object) -> Record | None:
    """Read a line that was decoded from JSON.

    It may be damaged, written by somebody hostile, or of another version: what cannot be used of it
    is left out.

    Returns:
        The event; None for one that has no class here, or whose main fields are damaged.
    """
    if not isinstance(raw, Mapping):
        return None
    name = raw.get("event")
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    event: Event | None
    event = _shown_at_once(raw) if kind is OutputShown else None
    if event is None:
        try:
            event = decode(kind, raw, strict=False)
        except (DecodeError, RecursionError):
            return None
    return Record(event, _text(raw, "job_id"), _time(raw), _text(raw, "phase"))


def _shown_at_once(raw: Mapping[str, object]) -> OutputShown | None:
    """Read output without the codec (a million lines are possible); None if it needs the codec."""
    node, rank = raw.get("node"), raw.get("rank")
    lines, head = raw.get("lines"), raw.get("head")
    if "skipped" in raw:
        return None
    if not isinstance(node, str) or not isinstance(head, bool) or not isinstance(lines, list):
        return None
    if rank is not None and type(rank) is not int:
        return None
    if not all(isinstance(line, str) for line in lines):
        return None
    return OutputShown(node, rank, tuple(lines), head)


def _text(raw: Mapping[str, object], key: str) -> str:
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def _time(raw: Mapping[str, object]) -> float | None:
    value = raw.get("time")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < _LAST_TIME else None
