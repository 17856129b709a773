"""How the driver reaches the nodes: all that differs between kinds of allocation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Protocol

from ...protocol.job import Job
from ...system import files

OnEvent = Callable[[dict[str, Any]], None]
Requests = Mapping[str, Mapping[str, Any]]
"""What each node's agent is asked."""


def saving_note(job: Job) -> dict[str, Any]:
    """The event that says what ranks do which have been told to end: until then nothing is seen."""
    seconds = job.launch.grace_seconds
    text = f"told to end: the ranks have {seconds} s to save what they have"
    return {"v": 1, "event": "note", "text": text}


def mounts(job: Job) -> tuple[str, ...]:
    """What a container sees: the place of the node root, and what the user named."""
    base = os.environ.get(files.ROOT_VARIABLE) or job.node_root
    if base == "auto":
        base = "/tmp"  # noqa: S108 - its usual place
    own = [] if "$" in base else [f"{base}:{base}"]  # else it is another one on each node
    return (*own, *job.launch.container_mounts)


@dataclass(frozen=True)
class Ended:
    """How a node's part of a phase ended, for the case that it gave no answer."""

    code: int
    """Exit status; negative for a signal."""
    why: str
    """The same in words, with what is known besides."""
    fix: str = ""
    """What to do about it; empty where only the log can tell."""
    unreachable: bool = False
    """Whether no rank has begun anywhere because none could here."""


@dataclass(frozen=True)
class Transfer:
    """A file on its way to some nodes."""

    source: str
    """Its path where the driver runs."""
    target: str
    """Its path on the nodes."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Delivery:
    """What became of a parcel, and of what was to be done with it."""

    failed: dict[str, str]
    """The nodes that it did not reach, and why; under ``""`` what concerns no single node."""
    ended: dict[str, Ended]
    """How each node's part ended, for the case that it gave no answer."""
    seconds: float = 0.0
    """How long the sending took."""


class Transport(Protocol):
    """Runs agents, and brings them files."""

    nodes_here: int
    """How many nodes share one machine."""

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        """Run one phase on the given nodes at the same time.

        Args:
            phase: one of :data:`bundle.agent.agent.PHASES`.
            requests: what each node's agent is asked.
            on_event: called, in this thread, with each event of each node.
        """

    def deliver(self, parcel: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        """Run ``unpack`` on the given nodes, and send them a file before they begin.

        Where the file did not reach some node, no node has unpacked anything, nor kept a part of
        the file.
        """

    def fetch(self, phase: str, requests: Requests, take: Callable[[IO[bytes]], None]) -> None:
        """Run a phase on one node whose agent answers with a stream of bytes.

        Raises:
            NodeError: what ``take`` raises, or that the agent cannot be started.
        """

    def ended_by(self) -> str:
        """Why the allocation ended, ``time-limit`` for example; empty while it stands."""

    def hurry(self) -> None:
        """Wait for nobody for long from now on: the user has asked for the end."""

    def close(self) -> None:
        """Let go of the nodes: there is nothing more to ask."""
