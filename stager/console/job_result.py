"""The end of a job: its result, its logs, the first failure, and the exit code."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from bundle.launch.wrapper import keep_own_frame
from bundle.protocol.counts import format_count
from bundle.protocol.enumerations import Allocation, PhaseName
from bundle.protocol.problem import ProblemCode, format_problem

from ..core.errors import EXIT_INTERRUPTED, EXIT_JOB, EXIT_OK
from ..diagnosis.failure import (
    format_hang,
    format_ranks,
    format_restart,
    format_retry,
    format_state,
    format_variable,
    shorten_paths,
)
from ..jobs.outcome import format_figures, make_verify_result
from ..logs.job_files import format_time
from .events import Events, make_log_dir_option
from .output import Output

if TYPE_CHECKING:
    from bundle.protocol.problem import Problem, ShownProblem

    from ..cleanup import CleanResult
    from ..diagnosis.failure import Diagnosis, Evidence, FirstFailure
    from ..jobs.outcome import Outcome
    from ..logs.job_files import JobFiles
    from ..logs.lines import Line


# --- The logs of a job, and its diagnosis, for a person ------------------------------------------

_SHOWN_VARIABLES = 6
_LAST_LINES = 6  # lines of a failure that are shown at once; the log has the others
_WIDEST = 28
_LONG = 600  # characters of a line that are shown


class JobLogs(Output):
    """The results of ``stager logs`` and ``stager diagnose``."""

    def lines(
        self, lines: Iterator[Line], files: JobFiles | None = None, none: str = "no line matches"
    ) -> None:
        """Show lines of logs, each with its source; as one JSON object with ``--json``."""
        if self.as_json:
            from ..logs.lines import make_merged_lines

            self.emit(make_merged_lines(files.job_id if files else "", lines))
            return
        width, line = 0, None
        for line in lines:
            width = min(max(width, len(line.writer)), _WIDEST)
            self.data(f"{_clock(line)} {line.writer:<{width}} | {line.text}")
        if line is None:
            self.say(none)

    def failure(self, failure: FirstFailure) -> None:
        """Say what went wrong first, with the lines that show it."""
        who = _who(failure) or "the job"
        code = "" if failure.exit_code is None else f" (exit status {failure.exit_code})"
        shown = f"{who} {_did(failure)}{code}: {failure.cause[:_LONG]}"
        if failure.hang:  # its words name the ranks
            shown = format_hang(failure.hang)[:_LONG]
        self._write(f"error: {shown}", "error")
        repeats = len(failure.lines) == 1 and failure.cause in failure.lines[0]
        for line in () if repeats else keep_own_frame(failure.lines, _LAST_LINES):
            self._write(f"  | {_short(line)}")
        if failure.meaning and failure.meaning != failure.cause:
            self._write(f"cause: {failure.meaning}")
        self._write_remedy(failure)

    def _write_remedy(self, failure: FirstFailure) -> None:
        self._write(f"class: {failure.kind}")
        if failure.retry is not None:
            self._write(f"retry: {format_retry(failure)}")
        self._write(f"hint: {failure.hint}", "good")

    def show_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Show the result of ``stager diagnose``."""
        for line in describe_diagnosis(diagnosis):
            self.data(line)

    def show_consequences(self, diagnosis: Diagnosis) -> None:
        """Add what else there is to know, in a line or two, after the first failure."""
        if diagnosis.same_failure:
            self._write(f"the same on {format_ranks(diagnosis.same_failure)}")
        if diagnosis.consequences:
            self._write(f"consequences: {format_ranks(diagnosis.consequences)}")
        if diagnosis.evidence:
            self._write(f"shown by {_place(diagnosis.evidence[0])}")


def describe_diagnosis(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of a diagnosis."""
    failure = diagnosis.first
    if failure is None:
        yield f"{_name(diagnosis)}: {_describe_no_failure(diagnosis)}"
        yield from map(format_restart, diagnosis.restarts)
        yield from _list_evidence("printed and survived:", diagnosis)
        return
    yield _headline(diagnosis, failure)
    meaning = failure.meaning if failure.meaning != failure.cause else ""
    for title, text in (
        ("class: ", failure.kind),
        ("what:  ", failure.cause[:_LONG]),
        ("cause: ", meaning),
        ("retry: ", format_retry(failure)),
        ("hint:  ", failure.hint),
    ):
        if text:
            yield f"{title} {text}"
    yield from map(format_restart, diagnosis.restarts)
    yield from _list_evidence("shown by", diagnosis)
    if len(failure.lines) > 1:
        yield "its last lines:"
        yield from (f"  | {_short(line)}" for line in failure.lines)
    yield from _list_variables(failure)
    for title, ranks in (
        ("missing from the collective:", diagnosis.missing),
        ("the same on", diagnosis.same_failure),
        ("consequences:", diagnosis.consequences),
    ):
        if ranks:
            yield f"{title} {format_ranks(ranks)}"


def _list_variables(failure: FirstFailure) -> Iterator[str]:
    if state := format_state(failure):
        yield f"its state: {state}"
    room, hidden = _SHOWN_VARIABLES, 0
    for frame in failure.variables:
        if shown := frame.values[:room]:
            yield f"its variables at {_short(frame.place)}:"
            yield from (f"  | {_short(format_variable(variable))}" for variable in shown)
        room -= len(shown)
        hidden += len(frame.values) - len(shown) + frame.more
    if hidden:
        yield f"  and {hidden} more, of which --json has those kept"


def _list_evidence(title: str, diagnosis: Diagnosis) -> Iterator[str]:
    problem = None if diagnosis.first is None else diagnosis.first.problem
    for evidence in diagnosis.evidence:
        is_json = evidence.text.startswith('"code": ')  # an event has a problem so
        yield f"{title} {_place(evidence)}"
        yield f"  {_short(str(problem) if is_json and problem is not None else evidence.text)}"


def _clock(line: Line) -> str:
    return time.strftime("%H:%M:%S", time.localtime(line.time)) if line.time else "--:--:--"


def _name(diagnosis: Diagnosis) -> str:
    return f"job {diagnosis.job_id}" if diagnosis.job_id else str(diagnosis.folder)


def _headline(diagnosis: Diagnosis, failure: FirstFailure) -> str:
    at = f" at {format_time(failure.time)}" if failure.time else ""
    if diagnosis.command:
        return f"`stager {diagnosis.command}` failed{at}, before its job began"
    code = "" if failure.exit_code is None else f", exit status {failure.exit_code}"
    launch = ", before the launch" if diagnosis.before_launch else ""
    who = _who(failure)
    if not who:  # of the job as a whole: cancelled, a time limit
        return f"{_name(diagnosis)} {_did(failure)}{at}{code}{launch}"
    return f"{_name(diagnosis)}: {who} {_did(failure)} first{at}{code}{launch}"


def _who(failure: FirstFailure) -> str:
    rank = "" if failure.rank is None else f"rank {failure.rank}"
    return f"{failure.node or ''} {rank}".strip()


def _did(failure: FirstFailure) -> str:
    if failure.hang:
        return "hung"
    return "left" if failure.exit_code == 0 else "failed"


def _place(line: Evidence) -> str:
    return f"{line.path}:{line.number}"


def _short(line: str) -> str:
    return shorten_paths(line)[:_LONG]


def _describe_no_failure(diagnosis: Diagnosis) -> str:
    if diagnosis.ok:
        return "it ended well"
    if diagnosis.ok is None and diagnosis.job_id:
        logs = format_count(diagnosis.read, "log")
        return f"nothing failed as far as its {logs} can tell; it may still be running"
    if diagnosis.interrupted:
        return "it was interrupted; nothing had failed until then"
    return f"nothing shows that the job failed, in {format_count(diagnosis.read, 'file')}"


# --- The end of a job: its result, the first failure, and the exit code --------------------------

_LOSSES = (
    ProblemCode.OUTPUT_LOST,
    ProblemCode.OUTPUT_NOT_LOGGED,
    ProblemCode.OUTPUT_DISK_FULL,
)
_MAX_NAMED = 8  # losses of output that are listed one by one


class Console(Events, JobLogs):
    """Everything a person sees of one command."""

    def show_verify(self, outcome: Outcome) -> int:
        """Show the result of ``stager verify``, and return its exit code."""
        if outcome.is_interrupted:
            return self._show_interrupted_job(outcome)
        if self._table and outcome.probes:
            from rich.console import Console as RichConsole

            from .tables import make_node_table

            self.stop()
            table = make_node_table(make_verify_result(outcome).nodes)
            RichConsole(no_color=not self._colour).print(table)
        self._show_network(outcome)
        self._log_loss(outcome)
        self._problems(outcome)
        if outcome.end_reason:
            return self._show_end(outcome)
        if not outcome.ok:
            return self._cannot_run(outcome)
        if outcome.job.dry_run:
            self.say("nothing was sent or changed", "good")
            return EXIT_OK
        left_out, count = list(outcome.end.left_out), len(outcome.job.nodes)
        all_of_them = "the node" if count == 1 else f"all {count} nodes"
        who = f"{count - len(left_out)} of {count} nodes" if left_out else all_of_them
        self.say(f"{who} can run it; logs: {outcome.job.log_dir}", "good")
        self._advise(outcome, left_out)
        return EXIT_OK

    def _cannot_run(self, outcome: Outcome) -> int:
        hosts = ",".join(outcome.faulty_hosts)
        if hosts:
            self._write(f"no node is at fault, but {hosts}, where the driver ran", "error")
            return EXIT_JOB
        bad = list(dict.fromkeys([*outcome.problems, *outcome.end.left_out]))
        of = format_count(len(outcome.job.nodes), "node")
        self._write(f"{len(bad)} of {of} cannot run it: {','.join(bad)}", "error")
        self._advise(outcome, bad)
        self._more(outcome)
        return EXIT_JOB

    def show_run(self, outcome: Outcome) -> int:
        """Show the result of ``stager run``, and return its exit code."""
        failure = outcome.first_failure
        if outcome.is_interrupted:
            code = self._show_interrupted_job(outcome)
            self._log_loss(outcome)
            if failure is not None:
                self._write("before that:")
                self._problems(outcome)
                self._first(outcome, failure)
            return code
        self._log_loss(outcome)
        if outcome.end_reason:
            self._problems(outcome)
            return self._show_end(outcome)
        if failure is not None:
            return self._show_failed_run(outcome, failure)
        if outcome.job.dry_run:
            self.say("nothing was sent, changed or started", "good")
        else:
            self._show_success(outcome)
        return EXIT_OK

    def _show_failed_run(self, outcome: Outcome, failure: FirstFailure) -> int:
        self._problems(outcome)
        if failure.exit_code is None and not (outcome.end.logs_lost or failure.hang):
            self._advise(outcome, [node for node, found in outcome.problems.items() if found])
        self._first(outcome, failure)
        return EXIT_JOB

    def _show_success(self, outcome: Outcome) -> None:
        spent = ", ".join(_format_phase_time(outcome, name) for name in outcome.spent)
        self.say(f"done: {format_count(outcome.end.world_size or 0, 'rank')}; {spent}", "good")
        for figures in outcome.figures:
            self.say(format_figures(figures), "good")
        for note in outcome.end.notes or ():
            self._write(f"note: {note}", "warning")
        self.say(f"logs: {outcome.job.log_dir}/{outcome.job.name}.{outcome.job.id}.*.out")
        self._advise(outcome, list(outcome.end.left_out))

    def show_cleaned_nodes(self, result: CleanResult) -> int:
        """Show what went wrong on the nodes in ``stager clean``, and return its exit code."""
        outcome = result.outcome
        if outcome is None:
            return EXIT_OK
        if outcome.is_interrupted:
            return self._show_interrupted_job(outcome)
        self._problems(outcome)
        return EXIT_OK if outcome.ok else EXIT_JOB

    def _first(self, outcome: Outcome, failure: FirstFailure) -> None:
        is_of_ranks = failure.exit_code is not None or failure.rank is not None or failure.hang
        if is_of_ranks:  # else it is one of the problems
            self.failure(failure)
            if outcome.diagnosis is not None:
                self.show_consequences(outcome.diagnosis)
        self._more(outcome)

    def _more(self, outcome: Outcome) -> None:
        job = outcome.job
        self._write(f"logs: {job.log_dir}")
        self._write(f"more: stager diagnose {job.id}{make_log_dir_option(job.log_dir)}")

    def _show_end(self, outcome: Outcome) -> int:
        failure = outcome.first_failure
        if failure is not None:
            node = f" ({failure.node})" if failure.node and not failure.hang else ""
            self._write(f"error: job {outcome.job.id}: {failure.cause}{node}", "error")
            self._write_remedy(failure)
        self._write(f"logs: {outcome.job.log_dir}")
        return EXIT_JOB

    def _advise(self, outcome: Outcome, bad: list[str]) -> None:
        job = outcome.job
        bad = [node for node in bad if node not in outcome.faulty_hosts]
        if job.allocation is not Allocation.LOCAL and 0 < len(bad) < len(job.nodes):
            pronoun = "it" if len(bad) == 1 else "them"
            self._write(f"hint: to leave {pronoun} out: --exclude={','.join(bad)}", "good")

    def _show_network(self, outcome: Outcome) -> None:
        deep = outcome.end.deep
        if deep is None or deep.all_reduce is None:
            return
        from .tables import format_pairs, summarize_network

        self.data_lines(format_pairs(deep.all_reduce))
        for line in summarize_network(deep.all_reduce):
            self.say(line)

    def _problems(self, outcome: Outcome) -> None:
        nodes: dict[ShownProblem, list[str]] = {}
        # The node's name comes first in any case: without it equal problems meet.
        here = [os.uname().nodename] if outcome.job.allocation is Allocation.LOCAL else []
        for node, problem in _each_problem(outcome):
            nodes.setdefault(format_problem(problem, (node, *here)), []).append(node)
        for hint, alike in groupby(nodes, key=lambda fault: fault.hint):
            for fault in alike:
                self._write(f"error: {','.join(nodes[fault])}: {fault.line}", "error")
                for finding in fault.findings:
                    self._write(f"  {finding}")
            if hint:
                self._write(f"hint: {hint}", "good")

    def _log_loss(self, outcome: Outcome) -> None:
        """Show what the logs lack, unless a problem says so: where nothing else went wrong."""
        fault = outcome.end.logs_fault
        if fault:
            self._write(f"warning: the logs are not complete: {fault}", "warning")
        reported = {
            (node, problem.values["source"])
            for node, problems in outcome.problems.items()
            for problem in problems
            if problem.code in _LOSSES
        }
        losses = [(loss.node, str(loss)) for loss in outcome.end.logs_lost]
        unreported = [loss for loss in losses if loss not in reported]
        for node, source in unreported[:_MAX_NAMED]:
            self._write(f"warning: {node}: output of {source} is lost", "warning")
        more = len(unreported) - _MAX_NAMED
        if more > 0:
            self._write(f"warning: and output of {format_count(more, 'more rank')}", "warning")

    def _show_interrupted_job(self, outcome: Outcome) -> int:
        self._write(f"interrupted; nothing is left running; logs: {outcome.job.log_dir}", "error")
        return EXIT_INTERRUPTED


def _format_phase_time(outcome: Outcome, phase: str) -> str:
    name = "plan" if phase == PhaseName.PLACE else phase
    words, ending = f"{name} {outcome.spent[phase]:.1f} s", outcome.end
    if phase != PhaseName.UNPACK or ending.send_seconds is None:
        return words
    parts = [f"sending {ending.send_seconds:.1f} s"]
    if ending.unpack_seconds is not None:
        parts.append(f"unpacking alone {ending.unpack_seconds:.1f} s")
    return f"{words} ({', '.join(parts)})"


def _each_problem(outcome: Outcome) -> list[tuple[str, Problem]]:
    """Return each problem with its node; not an end of the job, nor what follows from others."""
    is_hang = outcome.end.hang is not None
    problems = [
        (node, problem)
        for node, problems in outcome.problems.items()
        for problem in problems
        if not problem.is_end_of_job and not (is_hang and problem.code is ProblemCode.RANKS_HANG)
    ]
    own = [(node, problem) for node, problem in problems if not problem.code.row.follows]
    return own if own or outcome.end.failures else problems
