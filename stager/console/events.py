"""The course of a job: each event of the far side, as a line or two."""

from __future__ import annotations

import functools
import os
import re
import shlex
from typing import TYPE_CHECKING

from bundle.driver.findings import shorten_names
from bundle.protocol.counts import format_count, format_size
from bundle.protocol.enumerations import Action, Allocation, PhaseName
from bundle.protocol.events import (
    AttemptBegins,
    CompiledCode,
    Hang,
    JobBegins,
    NodesLeftOut,
    OutputsCollected,
    OutputShown,
    PhaseBegins,
    PlannedGroup,
    RanksSilent,
    Record,
    Remark,
    StrayLines,
    TransferPlan,
)
from bundle.protocol.messages import (
    Answer,
    Lingering,
    PreflightAnswer,
    ProbeAnswer,
    Started,
    UnpackAnswer,
)

from ..core.errors import apply_carriage_returns
from ..logs.job_files import DEFAULT_LOG_DIR
from ..slurm import messages
from .reports import Reports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bundle.protocol.job import Job


_TORCHRUN = re.compile(r"[EWI]\d{4} [\d:.]+ \d+ \S*torch/distributed/")
"""The beginning of a line of torchrun's own log."""
_NOISE = re.compile(r"\[W\d{4} .*\[c10d\] The hostname of the client socket cannot be retrieved")
"""A warning of c10d where addresses have no names, which matters to nobody."""

_LAUNCHERS_BEGIN = ("E", "W", "I", "[W")  # the beginnings of lines that one of these may match
_MAX_NAMED = 8  # nodes that are named in a line
_LONG_LINE = 200  # characters of a rank's last line that are shown


class Events(Reports):
    """The output of a job while it runs."""

    _action = Action.VERIFY
    _launcher_reports = _moving = _dry_run = _slurm = False
    _restarts, _nodes = 0, 1
    _job_id = _log_dir_option = ""
    _answered: frozenset[str] = frozenset()

    @property
    def _table(self) -> bool:
        plain = self.as_json or self.verbose or self._dry_run
        return not plain and self._is_on_terminal

    def job(self, job: Job, bundle: Path) -> None:
        """Show what is about to happen, before the first node is touched."""
        self._nodes = len(job.nodes)
        self._action, self._restarts = job.action, job.launch.max_restarts
        self._moving = bool(self._restarts or job.launch.elastic)
        self._dry_run, self._job_id = job.dry_run, job.id
        self._log_dir_option = make_log_dir_option(job.log_dir)
        self._slurm = job.allocation is Allocation.SLURM
        begin = ""  # the number and the nodes of Slurm's come with its first event
        if job.allocation is Allocation.LOCAL:
            begin = f"job {job.id}: {format_count(len(job.nodes), 'local node')}, "
        elif job.allocation is Allocation.SSH:
            hosts = f"{format_count(len(job.nodes), 'host')} over ssh ({_names(job.nodes)})"
            begin = f"job {job.id}: {hosts}, "
        self.say(f"{begin}bundle {bundle.name}")
        if job.action is Action.VERIFY:
            self.say(f"bundle id {job.bundle_id}")

    def talk(self, line: str) -> None:
        """Show a line of Slurm's commands, or of the driver's standard error."""
        shown = messages.parse_message(line).shown
        if self.verbose:
            self.say(f"  {line}", "dim")
        elif shown:
            self.say(f"  {shown}")

    def event(self, record: Record) -> None:
        """Show one event of the far side."""
        if isinstance(record.event, Answer):
            self._count(self._answered | {record.event.node})
        self._show(record.event, record)

    def _count(self, answered: frozenset[str]) -> None:
        self._answered = answered
        self.progress = f", {len(answered)} of {format_count(self._nodes, 'node')}"

    @functools.singledispatchmethod
    def _show(self, event: object, record: Record) -> None:
        """Show an event; those of classes without a method of their own are not shown."""

    @_show.register(JobBegins)
    def _show_job(self, event: JobBegins, record: Record) -> None:
        self._nodes = len(event.nodes)
        if record.job_id != self._job_id and self._slurm:
            count = format_count(len(event.nodes), "node")
            names = _names(event.nodes)
            self.say(f"job {record.job_id}: {count} ({names}), logs: {event.log_dir}")

    @_show.register(TransferPlan)
    def _show_plan(self, event: TransferPlan, record: Record) -> None:
        self.say(f"  {event.why}")
        if event.bytes:
            self.begin("place")
        for group in event.groups if self._dry_run or event.bytes else ():
            if self._dry_run:
                self.data(self._group(group))
            else:
                self.say(f"  {self._group(group)}")
        if self._dry_run and event.forecast is not None:
            forecast = event.forecast
            self.show_expected_time(forecast.seconds, measured=forecast.measured)

    def _group(self, group: PlannedGroup) -> str:
        names = f": {', '.join(group.layers)}" if self.verbose and group.layers else ""
        sent = f"{format_size(group.bytes)}, {format_count(len(group.layers), 'layer')}"
        return f"{','.join(group.nodes)} {group.how} {sent}{names}"

    @_show.register(NodesLeftOut)
    def _show_left_out(self, event: NodesLeftOut, record: Record) -> None:
        for node, problems in event.nodes.items():
            reasons = "; ".join(problem.removeprefix(f"{node}: ") for problem in problems)
            self._write(f"warning: {node} is left out: {reasons}", "warning")

    @_show.register(OutputsCollected)
    def _show_collected(self, event: OutputsCollected, record: Record) -> None:
        what = f"{format_count(event.files, 'file')}, {format_size(event.bytes)}"
        nodes = shorten_names([event.node, *event.others])
        if event.files:
            self.say(f"  {nodes}: {what}: {event.source} -> {event.target}")
        for name in event.missing:
            self.warn(f"{event.node}: no rank has written {name}, which is named as an output")
        for old, new in event.renamed.items():
            self.say(f"  {old} has files that would be lost; the results of this job are {new}")
        for problem in event.problems:
            self._write(f"warning: {event.node}: {problem}", "warning")

    @_show.register(CompiledCode)
    def _show_compiled_code(self, event: CompiledCode, record: Record) -> None:
        from ..diagnosis.failure import format_compiled_code

        if text := format_compiled_code(event):
            self.note(f"compiled code: {text}")

    @_show.register(Remark)
    def _show_note(self, event: Remark, record: Record) -> None:
        if event.warning:  # that a node's disk lost something matters with -q, too
            self.warn(event.text)
        else:
            self.note(event.text)

    @_show.register(StrayLines)
    def _show_stray(self, event: StrayLines, record: Record) -> None:
        if self.verbose or record.phase == PhaseName.LAUNCH:
            first = next(iter(event.lines), "")
            lines = format_count(event.count, "line")
            self.note(f"{lines} came through srun, but not from an agent; the first: {first}")

    @_show.register(Lingering)
    def _show_lingering(self, event: Lingering, record: Record) -> None:
        from ..diagnosis.failure import describe_lingering

        cause, hint = describe_lingering(event.finished, event.left, event.waits_for)
        self._write(f"warning: {event.node} rank {event.rank}: {cause}; {hint}", "warning")

    @_show.register(RanksSilent)
    def _show_silence(self, event: RanksSilent, record: Record) -> None:
        from ..report.charts import duration

        usual = "" if event.usual is None else f" (longest before: {duration(event.usual)})"
        rank = "the last line" if event.rank is None else f"the last line, of rank {event.rank}"
        line = apply_carriage_returns(event.line)[:_LONG_LINE]
        last = f"; {rank}: {line}" if line else ""
        silence = f"no rank has printed anything for {duration(event.seconds)}"
        self._write(f"warning: {silence}{usual}{last}", "warning")

    @_show.register(Hang)
    def _show_hang(self, event: Hang, record: Record) -> None:
        from ..diagnosis.failure import format_hang

        closing = f"`stager stacks {record.job_id}{self._log_dir_option}` shows where each rank is"
        if event.ended:
            closing = "the job is ended for it (launch.hang-timeout)"
        self._write(f"warning: {format_hang(event)}; {closing}", "warning")

    @_show.register(AttemptBegins)
    def _show_attempt(self, event: AttemptBegins, record: Record) -> None:
        from ..diagnosis.failure import format_restart

        self._nodes = len(event.nodes)
        self._count(frozenset())
        if event.failed is None:
            self.say(f"  {format_restart(event)}")
        else:
            self._write(f"warning: {format_restart(event)}", "warning")

    @_show.register(PhaseBegins)
    def _show_begin(self, event: PhaseBegins, record: Record) -> None:
        if event.phase is not PhaseName.PLACE:
            self.begin(event.phase)
            self._count(frozenset())
        if event.phase is PhaseName.LAUNCH:
            whose = "the first ranks'" if self._moving else "the first node's"
            whose = "every node's" if self.verbose else whose
            self.say(f"  what follows is {whose} output; the logs have all of it", "dim")

    @_show.register(PreflightAnswer)
    def _show_preflight(self, event: PreflightAnswer, record: Record) -> None:
        proj, pkgs = ("ok" if there else "missing" for there in (event.proj, event.pkgs))
        self.say(f"  {event.node} proj={proj} pkgs={pkgs}")

    @_show.register(UnpackAnswer)
    def _show_unpack(self, event: UnpackAnswer, record: Record) -> None:
        if event.ok and event.path:
            how = "already there" if event.reused else "staged"
            folder, _, bundle_id = event.path.rpartition("/")
            shown = event.path if self.verbose else f"{folder}/{bundle_id[:12]}..."
            self.say(f"  {event.node} {how} -> {shown}")

    @_show.register(ProbeAnswer)
    def _show_probe(self, event: ProbeAnswer, record: Record) -> None:
        line = event.line or f"NODE {event.node} FAILED"
        if self._action is not Action.VERIFY:  # standard output belongs to the program
            self.say(line)
        elif not self._table:
            self.data(line)

    @_show.register(Started)
    def _show_started(self, event: Started, record: Record) -> None:
        if self.verbose:
            command = " ".join(event.argv) or "(the same command)"
            self.say(f"  {event.node} $ {command}", "dim")

    @_show.register(OutputShown)
    def _show_output(self, event: OutputShown, record: Record) -> None:
        if self.verbose:
            self._note_skipped(event)
            who = event.node if event.rank is None else f"{event.node} {event.rank}"
            self.data_lines([f"{who}: {apply_carriage_returns(line)}" for line in event.lines])
        elif self._action is Action.VERIFY and record.phase == PhaseName.LAUNCH:
            return  # the ranks of the check: their result is shown at the end
        elif event.head:
            self._note_skipped(event)
            self.data_lines([*map(apply_carriage_returns, self._drop_launcher_lines(event.lines))])

    def _note_skipped(self, event: OutputShown) -> None:
        if event.skipped:
            lines = format_count(event.skipped, "line")
            self.note(f"{lines} not shown: the reader did not keep up; the logs have all of it")

    def _drop_launcher_lines(self, lines: Sequence[str]) -> Sequence[str]:
        begins = (line.startswith(_LAUNCHERS_BEGIN) for line in lines)
        if not self._launcher_reports and not any(begins):
            return lines
        return [line for line in lines if not self._is_launcher_line(line)]

    def _is_launcher_line(self, line: str) -> bool:
        """Return whether a line is torchrun's own, as all are once it reports a failed rank."""
        if _NOISE.match(line):
            return True
        if not self._launcher_reports and _TORCHRUN.match(line):
            self._launcher_reports = "failed (exitcode" in line and not self._restarts
            return True
        return self._launcher_reports


def make_log_dir_option(log_dir: str) -> str:
    """Return the option with which a command finds a job's logs, after a blank; empty for none."""
    is_default = log_dir == os.path.expanduser(DEFAULT_LOG_DIR)  # noqa: PTH111 - never raises
    return "" if is_default else f" --log-dir {shlex.quote(log_dir)}"


def _names(nodes: Sequence[str]) -> str:
    return ",".join(nodes[:_MAX_NAMED]) + (",..." if len(nodes) > _MAX_NAMED else "")
