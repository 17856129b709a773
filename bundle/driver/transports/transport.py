"""The driver's view of the nodes: everything that differs between kinds of allocation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import IO, NamedTuple, Protocol, Union

from ...format.archive import BundleFile
from ...node.node_root import AUTO, AUTO_WITH_MEMORY, ROOT_VARIABLE
from ...protocol.dataclass import dataclass
from ...protocol.events import DriverEvent, Remark
from ...protocol.job import Job
from ...protocol.messages import AgentEvent, AgentRequest
from ...protocol.problem import NodeError, ProblemCode
from ...system import signals
from ...system.processes import Process, Stream

Event = Union[AgentEvent, DriverEvent]  # an event of an agent, or of the driver about agents
OnEvent = Callable[[Event], None]
Requests = Mapping[str, AgentRequest]  # the request of each node's agent
Take = Callable[[IO[bytes]], None]
TOLD_TO_END = (signals.TERMINATED, -signal.SIGTERM)  # for a rank of another node
Retry = Callable[[str], bool]  # by what a command wrote to standard error; it pauses before


class LaunchStopped(NodeError):
    """A launch is to be ended by the driver itself: its ranks are told to end, as by a signal."""


def do_nothing() -> None:
    """Do nothing: what transports call where nothing is to be watched."""


def make_saving_note(job: Job) -> Remark:
    """Return the event that says how long ranks told to end have to save their work."""
    return Remark(f"stopping the ranks: they have {job.launch.grace_seconds} s to save their work")


def list_root_places(job: Job, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return where node roots may be, ``usual`` for ``auto``; none if that differs by node."""
    base = os.environ.get(ROOT_VARIABLE) or job.node_root
    if base in (AUTO, AUTO_WITH_MEMORY):
        return usual
    return () if "$" in base else (base,)


class Ended(NamedTuple):
    """The end of a node's part of a phase, for the case that it gave no answer."""

    problem: ProblemCode
    values: Mapping[str, str]  # of that problem, besides the phase and the log directory
    code: int | None = None  # None where only that of the whole step is known
    unreachable: bool = False  # true if no rank has begun anywhere because none could begin here


@dataclass(frozen=True)
class Transfer:
    """A file on its way to some nodes."""

    source: str
    target: str  # its path on the nodes, for ``sbcast`` and ``ssh``
    size: int
    token: str = field(default="", repr=False)  # of a relay, in hexadecimal digits
    bundle: BundleFile | None = None  # where it is thin, so that ``source`` is not all of it


class Delivery(NamedTuple):
    """The outcome of a transfer, and of the unpacking that goes with it."""

    failed: dict[str, str]
    """The nodes that the file did not reach, and why; under ``""`` what concerns no single node.

    After a relay the other nodes have it; after ``sbcast`` or ``ssh`` none of them has."""
    ended: dict[str, Ended]
    seconds: float | None = 0.0  # None if it did not take place, or was cut short
    settled: frozenset[str] = frozenset()  # nodes that failed or are lost: not to be tried again
    remarks: tuple[str, ...] = ()  # on nodes that were slow or sent damaged bytes


class Transport(Protocol):
    """Runs agents, and brings them files."""

    nodes_here: int = 1
    lost_node: str = ""  # the node that was lost before the job was told to end, as far as is known
    tick: Callable[[], None] = staticmethod(do_nothing)
    """Called about once a second while a phase runs; it may raise :class:`LaunchStopped`."""

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        """Run one phase on all given nodes at once; ``on_event`` is called in this thread."""

    def send_to_ranks(self, line: str) -> None:
        """Send a line to the agents of the phase that runs, without a wait; it may not arrive."""

    def deliver(self, transfer: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        """Run ``unpack`` on the given nodes, and send them a file before they begin."""

    def fetch(self, phase: str, requests: Requests, take: Take) -> None:
        """Run a phase on one node whose agent answers with a stream of bytes; NodeError."""

    def start_fetch(
        self, phase: str, requests: Requests, output: Stream, errors: Stream
    ) -> Process:
        """Start what :meth:`fetch` runs; another phase may be running; NodeError."""

    def find_ending(self) -> str:
        """Return why the allocation ended, ``time-limit`` for example; empty while it stands."""
        return ""

    def hurry(self) -> None:
        """Keep every further wait short: the user wants the job to stop."""
        return

    def close(self) -> None:
        """Release the nodes: nothing more is asked of them."""


class Step(NamedTuple):
    """One command that runs a program on some nodes."""

    phase: str  # the phase of the agents; also the name of the step
    nodes: tuple[str, ...]
    cpus: int
    tasks_per_node: int = 1  # more than one only where Slurm itself starts the ranks
    together: bool = False  # true if the first task that fails takes the others with it
    patience: int = 0  # seconds that tasks may go on after the first has ended; 0: no limit
    image: str | None = None
    mounts: tuple[str, ...] = ()  # paths of the node that the container sees, as pyxis takes them


class StepErrors(Protocol):
    """Reads what the command of a step has written to standard error. Pure functions."""

    def parse_step_faults(self, stderr: str) -> dict[str, Ended]:
        """Return the nodes that a step went wrong on, and how."""

    def parse_failed_tasks(self, stderr: str) -> dict[str, set[int]]:
        """Return each node's tasks that have failed."""

    def general_fault(self, code: int, stderr: str) -> Ended:
        """Return the fault of a node of which nothing was said: that of its whole step."""
