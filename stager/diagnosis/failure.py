"""The values of a diagnosis, and their wording."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from pathlib import Path

from bundle.driver.findings import shorten_names
from bundle.protocol.counts import format_count, format_size
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import FailureClass, Retry
from bundle.protocol.events import AttemptBegins, CompiledCode, Hang
from bundle.protocol.messages import FrameVariables, Variable
from bundle.protocol.problem import Problem

from ..catalogue.catalogue import CatalogueMatch


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A line of a log that shows what happened."""

    path: Path = field(metadata={"json": "file"})
    number: int = field(metadata={"json": "line"})  # the line's number, from 1
    text: str


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """The failure that the others follow from."""

    node: str
    rank: int | None = None  # the rank; None for the failure of a node, or of no known rank
    exit_code: int | None = None
    """The rank's exit status, negative for a signal; None where no rank had started."""
    kind: FailureClass = field(metadata={"json": "class"})
    cause: str
    hint: str
    lines: tuple[str, ...] = ()
    meaning: str = ""  # the same in words, where the catalogue has them
    time: float | None = None  # the time, in seconds since the epoch; None if unknown
    entry: str = field(default="", metadata={"json": None})
    """The catalogue's entry that explains it; empty for none."""
    problem: Problem | None = field(default=None, metadata={"json": None})
    """The far side's problem that it is; None for a failure of another kind."""
    retry: Retry | None = None  # whether the job may succeed if it is run again as it is
    retry_reason: str = ""  # the reason for that
    hang: Hang | None = None
    """The driver's verdict on silent ranks that it is; None for a failure of another kind."""
    variables: tuple[FrameVariables, ...] = ()
    """The variables of the last frames of the user's own code, the innermost frame first."""
    step: dict[str, int | float] = field(default_factory=dict)
    """The numbers of steps and epochs that the rank was in, by the names of their variables."""
    seeds: dict[str, str] = field(default_factory=dict)  # the seeds of its random numbers

    def explain(self, known: CatalogueMatch) -> FirstFailure:
        """Return it with the class, the meaning and the advice that the catalogue knows."""
        entry = known.entry
        meaning, hint = entry.explain(known.groups)
        return replace(
            self, kind=entry.kind, meaning=meaning, hint=hint or self.hint, entry=entry.name
        )


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The outcome of a job, and its reason: the result of ``stager diagnose``."""

    ok: bool | None  # whether the job ended well; None if unknown
    job_id: str  # the job; empty where files have no number
    folder: Path = field(metadata={"json": "log_dir"})
    first: FirstFailure | None = field(metadata={"json": "first_failure"})
    entry: str = ""
    evidence: tuple[Evidence, ...] = ()
    same_failure: tuple[int, ...] = field(default=(), metadata={"json": "alike"})
    """Ranks that failed by themselves with the same error."""
    consequences: tuple[int, ...] = ()
    missing: tuple[int, ...] = field(default=(), metadata={"json": "missing_ranks"})
    """For a hang: ranks that did not reach the collective that the others waited in."""
    restarts: tuple[AttemptBegins, ...] = ()
    """The further starts of the ranks in one allocation, with the failures before them."""
    read: int = field(default=0, metadata={"json": "files_read"})
    before_launch: bool = False
    """Whether it failed before any rank was started, though ranks were to be started."""
    interrupted: bool = field(default=False, metadata={"json": None})
    command: str = field(default="", metadata={"json": None})
    """The command that failed before it had a job; empty where there was one."""


# --- The wording of files, of ranks, and of ranks that run for too long --------------------------

_ENVIRONMENT = re.compile(
    r"(?<![^\s\"'])[^\s\"']*/envs/[0-9a-f]{64}/(?:lib/python[\d.]+/site-packages/)?"
)
"""The path of an environment on a node, which fills a line and says nothing."""
_NODE_ROOT = re.compile(r"^.*/stager-\d+/(?:jobs/[^/]+\.work/)?")


def shorten_paths(text: str) -> str:
    """Return a text with files of an environment by their names in it: ``project/train.py``."""
    return _ENVIRONMENT.sub("", text)


def name_file(path: str, folders: Iterable[str] = ()) -> str:
    """Return a path as it is in the project, a package or a folder: the same on each node."""
    path = _NODE_ROOT.sub("", shorten_paths(path).removeprefix("project/"))
    for folder in filter(None, folders):
        path = path.removeprefix(f"{folder}/")
    return path


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as ``ranks 0-3,7``, a single one as ``rank 7``; empty for none."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    if not ranges:
        return ""
    shown = ",".join("-".join(map(str, ends)) for ends in ranges)
    return f"rank {shown}" if shown.isdigit() else f"ranks {shown}"


def is_certain_hang(hang: Hang) -> bool:
    """Return whether silent ranks hang: none of them may be at work, and it is known where."""
    return hang.certain and hang.kind != "unknown"


def format_hang(hang: Hang) -> str:
    """Return the verdict on silent ranks in words."""
    return f"the ranks {'hang' if is_certain_hang(hang) else 'may hang'}: {hang.text}"


def format_retry(failure: FirstFailure) -> str:
    """Return in words whether to run again; empty if that is not known."""
    if failure.retry is None:
        return ""
    return f"{failure.retry}: {failure.retry_reason}"


def format_restart(event: AttemptBegins) -> str:
    """Return what failed before another start of the ranks, and what was done."""
    failed = event.failed
    if failed is None:
        return f"spare nodes: {shorten_names(event.spares)}"
    far = f", at {failed.progress}" if failed.progress else ""
    left_out = f"; {shorten_names(event.left_out)} left out" if event.left_out else ""
    again = f"started again after {event.seconds:.1f} s"
    return f"attempt {failed.number}: {failed.cause}{far}{left_out}; {again}"


def format_compiled_code(event: CompiledCode) -> str:
    """Return what a job has compiled, and what it has gained from earlier ones; may be empty."""
    parts = []
    if event.used_from:
        kernels = format_count(event.used_kernels, "kernel")
        parts.append(f"{format_size(event.used_bytes)} of earlier jobs ({kernels})")
    if event.new_bytes:
        kernels = f" ({format_count(event.new_kernels, 'kernel')})" if event.new_kernels else ""
        parts.append(f"{format_size(event.new_bytes)} kept for later jobs{kernels}")
    if event.first_step is not None and event.first_step_before is not None:
        before = f"{event.first_step_before:.1f} s without compiled code"
        parts.append(f"first step after {event.first_step:.1f} s ({before})")
    return "; ".join(parts)


def format_state(failure: FirstFailure) -> str:
    """Return the steps and the seeds of a rank that failed; empty where none are known."""
    pairs = [*failure.step.items(), *((f"seed of {name}", v) for name, v in failure.seeds.items())]
    return ", ".join(f"{name} {value}" for name, value in pairs)


def format_variable(variable: Variable) -> str:
    """Return a variable as ``data: list [1, 2, 3]``."""
    return f"{variable.name}: {variable.type} {variable.text}".rstrip()


def describe_lingering(
    finished: float | None, left: float | None, waits_for: Sequence[str]
) -> tuple[str, str]:
    """Return cause and hint for a rank whose process goes on for too long."""
    if finished is None and left is None:
        cause = "it goes on though other ranks of its node have ended"
        return cause, "see what only this rank does at the end, and whom it waits for there"
    if finished is None:
        cause = "it has left its process group and goes on, and others may wait for it there"
        return cause, "call destroy_process_group on every rank, after all that they do together"
    what = "its exit handlers do not come to an end"
    hint = "see what is registered with atexit, and what open libraries do as they are closed"
    if waits_for:
        what = f"it waits for {', '.join(waits_for)}"
        hint = "end such threads and processes before the program ends, or make them daemons"
    return f"its program has ended, but its process goes on: {what}", hint
