"""The times of earlier jobs: kept in the offline root, as rates for the next forecast.

``history.json`` has a version and the last few jobs that sent a bundle to nodes. One that is
damaged, or of another version, counts as none, and the next job begins it anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from bundle.protocol.codec import decode, encode
from bundle.protocol.counts import counted
from bundle.protocol.enumerations import PhaseName
from bundle.protocol.events import (
    FileSent,
    PhaseEnds,
    PlannedGroup,
    Record,
    StagingWork,
    TransferPlan,
)
from bundle.protocol.job import ASSUMED, Rates
from bundle.protocol.messages import UnpackAnswer
from bundle.transfer.forecast import BLOCK, Nodes, a_step, staging
from bundle.transfer.plan import SENT, SHARED

from ..core.errors import StagerError
from ..core.files import text_of
from ..core.store import Store

OnEvent = Callable[[Record], None]

FILE = "history.json"
VERSION = 1
KEPT = 9
"""Jobs that are kept. Forecasts take the median of them, so one that was disturbed does not count.
"""
_ENOUGH_BYTES = 8 * BLOCK
_ENOUGH_FILES = 1_000
"""Less than this says more about the start of a transfer, or of a process, than about its rate."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The times of one job."""

    nodes: int
    """Nodes that were sent something."""
    cpus: int
    """CPUs of each."""
    work: StagingWork
    """The work of each."""
    step: float
    """Seconds of the preflight."""
    stage: float
    """Seconds of the unpacking, the sending included."""
    send: float | None = None
    """Seconds of the sending alone, where that is known."""
    unpack: float | None = None
    """Seconds that the slowest node unpacked for, where that is known."""
    relayed: bool = False
    """True if the nodes passed the bundle on to each other; False if ``sbcast`` sent it."""


@dataclass(frozen=True, kw_only=True)
class Basis:
    """The basis of a forecast."""

    rates: Rates = ASSUMED
    """The assumed or measured speed of the cluster."""
    jobs: int = 0
    """The number of jobs that measured it; 0: it is assumed."""
    nodes: int = 0
    """The most nodes that any of these had."""

    @property
    def text(self) -> str:
        """The same for a person."""
        if not self.jobs:
            return "assumed; a job that sends its bundle measures them"
        return f"measured on {counted(self.jobs, 'job')} of up to {counted(self.nodes, 'node')}"


class JobTimer:
    """The times of a job, as its events come."""

    def __init__(self) -> None:
        self._plan = TransferPlan()
        self._seconds: dict[PhaseName, float] = {}
        self._sent: list[float] = []
        self._unpacked: list[float] = []
        self._disturbed = self._relayed = False

    def take(self, record: Record) -> None:
        """Learn from one event."""
        event = record.event
        if isinstance(event, TransferPlan):
            self._plan = event
        elif isinstance(event, PhaseEnds):
            self._seconds[event.phase] = event.seconds
        elif isinstance(event, FileSent):
            self._sent.append(event.seconds)
            self._relayed = event.relayed
        elif isinstance(event, UnpackAnswer):
            self._take_unpack(event)

    def _take_unpack(self, answer: UnpackAnswer) -> None:
        if not answer.ok:
            self._disturbed = True
        if answer.unpack_seconds is not None:
            self._unpacked.append(answer.unpack_seconds)

    def seen(self) -> Seen | None:
        """Return the times to keep; None where nothing was sent, or not without trouble."""
        group = self._only_group()
        if group is None or group.work is None or self._disturbed or len(self._sent) > 1:
            return None
        if not {PhaseName.PREFLIGHT, PhaseName.UNPACK} <= self._seconds.keys():
            return None
        return Seen(
            nodes=len(group.nodes),
            cpus=self._plan.cpus,
            work=group.work,
            step=self._seconds[PhaseName.PREFLIGHT],
            stage=self._seconds[PhaseName.UNPACK],
            send=self._sent[0] if self._sent else None,
            unpack=max(self._unpacked, default=None),
            relayed=self._relayed,
        )

    def _only_group(self) -> PlannedGroup | None:
        """Return the only group that was sent layers; None if there are more, or one is shared."""
        groups = self._plan.groups
        if any(group.how == SHARED for group in groups):
            return None
        sent = [group for group in groups if group.how in SENT and group.work is not None]
        return sent[0] if len(sent) == 1 else None


@contextmanager
def kept(store: Store, on_event: OnEvent) -> Iterator[OnEvent]:
    """Pass a job's events on, and keep its times once the block has ended well."""
    watch = JobTimer()

    def listen(record: Record) -> None:
        watch.take(record)
        on_event(record)

    yield listen
    seen = watch.seen()
    if seen is not None:
        record(store, seen)


def record(store: Store, seen: Seen) -> bool:
    """Keep the times of a job beside those of the last few, and return whether that was possible.

    Of two jobs that end at the same moment one may be lost. A root that cannot be written is no
    failure of the job.
    """
    jobs = [*read(store), seen][-KEPT:]
    content = {"version": VERSION, "jobs": [encode(job) for job in jobs]}
    try:
        with store.publishing(store.root / FILE) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except StagerError:
        return False
    return True


def read(store: Store) -> tuple[Seen, ...]:
    """Return the jobs that are kept, the newest last; none where they cannot be read."""
    try:
        raw = json.loads(text_of(store.root / FILE))
        if raw["version"] != VERSION:
            return ()
        return tuple(_seen(job) for job in raw["jobs"][-KEPT:])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def basis(jobs: Sequence[Seen], *, one_machine: bool = False) -> Basis:
    """Return the jobs' median rates, or assumed ones; ``one_machine``: all nodes share its CPUs."""
    if not jobs:
        return Basis()
    send, unpack, step = [], [], []
    for job in jobs:
        nodes = Nodes(job.nodes, cpus=job.cpus, sharing=job.nodes if one_machine else 1)
        expected = staging(job.work, nodes, relayed=job.relayed)
        step.append(job.step / a_step(nodes))
        together = max(job.stage - job.step, 0.0) / expected.seconds
        if job.work.sent >= _ENOUGH_BYTES:
            send.append(together if job.send is None else job.send / expected.send)
        if job.work.files >= _ENOUGH_FILES:
            unpack.append(together if job.unpack is None else job.unpack / expected.unpack)
    factors = {"send": _middle(send), "unpack": _middle(unpack), "step": _middle(step)}
    most = max(job.nodes for job in jobs)
    return Basis(rates=ASSUMED.scaled(**factors), jobs=len(jobs), nodes=most)


def known(store: Store) -> Basis:
    """Return what is known about this cluster from earlier jobs."""
    return basis(read(store))


def _middle(factors: Sequence[float]) -> float:
    """Return the median, within what is believable: a clock may have jumped."""
    return min(max(median(factors), 0.01), 100.0) if factors else 1.0


def _seen(raw: object) -> Seen:
    """Return the times of a job; ValueError if a field or a value is invalid."""
    job = decode(Seen, raw)
    if not (job.nodes > 0 and job.cpus > 0 and job.work.sent):
        raise ValueError("nothing was sent")
    for time in (job.step, job.stage, job.send, job.unpack):
        if time is not None and time < 0:
            raise ValueError(f"{time!r} is not a valid time")
    return job
