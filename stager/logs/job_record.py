"""The record of a job: the events of its last attempt; and the command that failed before it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from time import time
from typing import TypeVar

from bundle.protocol.codec import AnyText, decode, encode
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import LogMode, PhaseName
from bundle.protocol.events import (
    PRINTED_ONLY,
    AttemptBegins,
    CompiledCode,
    JobBegins,
    JobEnds,
    NodesLeftOut,
    PhaseBegins,
    Record,
    TransferPlan,
    read_record,
)
from bundle.protocol.messages import ProbeAnswer
from bundle.protocol.problem import Problem
from bundle.system import permissions

from ..core.errors import StagerError
from ..core.files import open_regular, replace_file
from . import job_files

_Kind = TypeVar("_Kind")


@dataclass(kw_only=True)
class JobRecord:
    """The last attempt of a job, fed event by event: live, or from its file."""

    records: list[Record] = field(default_factory=list)
    """The events of the attempt, without the output of ranks."""
    attempts: int = 0
    """Times that it has begun: more than one where Slurm put it into the queue again."""
    result: JobEnds | None = None
    """The last event; None for a job that runs, or whose driver was killed."""

    def take(self, record: Record) -> None:
        """Add an event."""
        event = record.event
        if isinstance(event, PRINTED_ONLY):
            return
        if isinstance(event, JobBegins):
            self.records, self.result = [], None
            self.attempts += 1
        elif isinstance(event, JobEnds):
            self.result = event
        self.records.append(record)

    def find_events(self, kind: type[_Kind]) -> list[_Kind]:
        """Return the events of a class, in order."""
        return [record.event for record in self.records if isinstance(record.event, kind)]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes, in order: those of the last start of the ranks, where that may be others."""
        starts = [event.nodes for event in self.find_events(AttemptBegins)[-1:]]
        return next(iter((*starts, *(event.nodes for event in self.find_events(JobBegins)))), ())

    @property
    def restarts(self) -> tuple[AttemptBegins, ...]:
        """The further starts of the ranks in one allocation, with the failures before them."""
        return tuple(event for event in self.find_events(AttemptBegins) if event.failed)

    @property
    def compiled_code(self) -> tuple[CompiledCode, ...]:
        """What it has compiled, and what it had of earlier jobs."""
        return tuple(self.find_events(CompiledCode))

    @property
    def cluster(self) -> str:
        """The name of its cluster; empty where that is unknown, or it is not Slurm's."""
        return next((event.cluster for event in self.find_events(JobBegins)), "")

    @property
    def begun(self) -> float | None:
        """The first time of an event, in seconds since the epoch; None where no event has one."""
        return next((record.time for record in self.records if record.time is not None), None)

    @property
    def end_time(self) -> float | None:
        """The time of the result; None where there is none, or it has no time."""
        ends = (one.time for one in reversed(self.records) if isinstance(one.event, JobEnds))
        return next(ends, None)

    @property
    def has_launched(self) -> bool:
        """True if ranks were started."""
        return any(event.phase is PhaseName.LAUNCH for event in self.find_events(PhaseBegins))

    @property
    def left_out(self) -> Mapping[str, tuple[Problem, ...]]:
        """The problems of nodes that it went on without."""
        problems: dict[str, tuple[Problem, ...]] = {}
        for event in self.find_events(NodesLeftOut):
            problems |= event.problems
        return problems

    @property
    def probes(self) -> Mapping[str, ProbeAnswer]:
        """Each node's last answer to the probe."""
        return {event.node: event for event in self.find_events(ProbeAnswer)}

    @property
    def plan(self) -> TransferPlan | None:
        """The plan of the transfer, with the reason; None where there was none."""
        last = self.result.plan if self.result else None
        return next(reversed(self.find_events(TransferPlan)), last)


def read_events(path: Path) -> JobRecord:
    """Return what the file of a job's events has; nothing if there is no such file."""
    job = JobRecord()
    for record in read_records(path):
        job.take(record)
    return job


def read_records(path: Path) -> Iterator[Record]:
    """Yield every event of a file; skip a line that is none, as a killed driver leaves."""
    with suppress(OSError), open_regular(path) as handle:
        yield from filter(None, map(parse_event, handle))


def parse_event(line: str | bytes) -> Record | None:
    """Read a line of a driver; None for one that is no event."""
    try:
        return read_record(json.loads(line))
    except (ValueError, RecursionError):
        return None


# --- The last command that failed before its job began: such a job leaves no files of its own ----

# Without a note about it, `stager diagnose` would report an older job.

NAME = ".refused.json"


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A command that failed before its job began."""

    command: str
    time: float  # when it failed, in seconds since the epoch
    message: AnyText
    hint: AnyText
    context: tuple[AnyText, ...]
    project: AnyText = ""
    """The project's settings file, or the folder where there is none; empty if unknown."""


@contextmanager
def note_refused_command(log_dir: Path, command: str, project: Path) -> Iterator[None]:
    """Leave a note if the block fails and no job has written anything meanwhile."""
    started = time()
    try:
        yield
    except StagerError as exc:
        if log_dir.is_dir() and job_files.find_newest_change(log_dir) < started:
            note = Refused(
                command=command,
                time=time(),
                message=exc.message,
                hint=exc.hint,
                context=tuple(exc.context),
                project=str(project),
            )
            opener = permissions.make_opener(LogMode.PRIVATE)
            # The failure itself must be shown.
            with suppress(OSError), replace_file(log_dir / NAME, opener) as file:
                file.write(json.dumps(encode(note)).encode() + b"\n")
        raise


def find_refused(log_dir: Path, project: Path) -> Refused | None:
    """Return the last such command of a project; None where a job has begun since it."""
    path = log_dir / NAME
    try:
        with open_regular(path) as handle:
            raw = json.load(handle)
        if path.stat().st_mtime < job_files.find_newest_change(log_dir):
            return None
        refusal = decode(Refused, raw)
    except (OSError, ValueError, RecursionError):
        return None
    return refusal if refusal.project in ("", str(project)) else None
