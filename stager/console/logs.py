"""The logs of a job, and its diagnosis, for a person."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bundle.launch.wrapper import keep_own_frame
from bundle.protocol.counts import counted

from ..diagnosis.failure import ranks_in_words, when
from .output import Output

if TYPE_CHECKING:
    from ..diagnosis.failure import Diagnosis, Evidence, FirstFailure
    from ..logs.job_files import JobFiles
    from ..logs.lines import Line

_STAGED = re.compile(
    r"(?<![^\s\"'])[^\s\"']*/envs/[0-9a-f]{64}/(?:lib/python[\d.]+/site-packages/)?"
)
"""The path of an environment on a node, which fills a line and says nothing."""
_LAST_LINES = 6
"""Lines of a failure that are shown at once; the log has the others."""
_WIDEST = 28
_LONG = 600
"""Characters of a line that are shown."""


class JobLogs(Output):
    """The results of ``stager logs`` and ``stager diagnose``."""

    def lines(
        self, lines: Iterator[Line], files: JobFiles | None = None, none: str = "no line matches"
    ) -> None:
        """Show lines of logs, each with its source; as one JSON object with ``--json``."""
        if self.as_json:
            from ..logs.merged_lines import merged_lines

            self.emit(merged_lines(files.job_id if files else "", lines))
            return
        width, line = 0, None
        for line in lines:
            width = min(max(width, len(line.who)), _WIDEST)
            self.data(f"{_clock(line)} {line.who:<{width}} | {line.text}")
        if line is None:
            self.say(none)

    def failure(self, failure: FirstFailure) -> None:
        """Say what went wrong first, with the lines that show it."""
        who = _who(failure) or "the job"
        code = "" if failure.exit_code is None else f" (exit status {failure.exit_code})"
        self._write(f"error: {who} {_did(failure)}{code}: {failure.cause[:_LONG]}", "error")
        for line in _telling_lines(failure):
            self._write(f"  | {_short(line)}")
        if failure.meaning and failure.meaning != failure.cause:
            self._write(f"cause: {failure.meaning}")
        self._write(f"class: {failure.kind}")
        self._write(f"hint: {failure.hint}", "good")

    def diagnosed(self, diagnosis: Diagnosis) -> None:
        """Show the result of ``stager diagnose``."""
        failure = diagnosis.first
        if failure is None:
            self.data(f"{_name(diagnosis)}: {_without_failure(diagnosis)}")
            self._evidence("printed and survived:", diagnosis)
            return
        self.data(_headline(diagnosis, failure))
        self._cause(failure)
        self._evidence("shown by", diagnosis)
        if len(failure.lines) > 1:
            self.data("its last lines:")
            for line in failure.lines:
                self.data(f"  | {_short(line)}")
        self._ranks("missing from the collective:", diagnosis.missing)
        self._ranks("the same on", diagnosis.same_failure)
        self._ranks("consequences:", diagnosis.consequences)

    def _evidence(self, title: str, diagnosis: Diagnosis) -> None:
        for evidence in diagnosis.evidence:
            self.data(f"{title} {_place(evidence)}")
            self.data(f"  {_short(_in_words(evidence, diagnosis.first))}")

    def _cause(self, failure: FirstFailure) -> None:
        self.data(f"class:  {failure.kind}")
        self.data(f"what:   {failure.cause[:_LONG]}")
        if failure.meaning and failure.meaning != failure.cause:
            self.data(f"cause:  {failure.meaning}")
        if failure.hint:
            self.data(f"hint:   {failure.hint}")

    def _ranks(self, title: str, ranks: Sequence[int]) -> None:
        if ranks:
            self.data(f"{title} {ranks_in_words(ranks)}")

    def followed_by(self, diagnosis: Diagnosis) -> None:
        """Add what else there is to know, in a line or two, after the first failure."""
        if diagnosis.same_failure:
            self._write(f"the same on {ranks_in_words(diagnosis.same_failure)}")
        if diagnosis.consequences:
            self._write(f"consequences: {ranks_in_words(diagnosis.consequences)}")
        if diagnosis.evidence:
            self._write(f"shown by {_place(diagnosis.evidence[0])}")


def _clock(line: Line) -> str:
    return time.strftime("%H:%M:%S", time.localtime(line.time)) if line.time else "--:--:--"


def _name(diagnosis: Diagnosis) -> str:
    return f"job {diagnosis.job_id}" if diagnosis.job_id else str(diagnosis.folder)


def _headline(diagnosis: Diagnosis, failure: FirstFailure) -> str:
    at = f" at {when(failure.time)}" if failure.time else ""
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


def _telling_lines(failure: FirstFailure) -> Sequence[str]:
    """Return the last lines of a failure, unless they only repeat its cause."""
    repeats = len(failure.lines) == 1 and failure.cause in failure.lines[0]
    return () if repeats else keep_own_frame(failure.lines, _LAST_LINES)


def _did(failure: FirstFailure) -> str:
    return "left" if failure.exit_code == 0 else "failed"


def _place(line: Evidence) -> str:
    return f"{line.path}:{line.number}"


def _in_words(evidence: Evidence, failure: FirstFailure | None) -> str:
    """Return the line that shows a failure; a problem, which an event has as JSON, in words."""
    problem = None if failure is None else failure.problem
    is_json = evidence.text.startswith('"code": ')
    return str(problem) if is_json and problem is not None else evidence.text


def _short(line: str) -> str:
    """Return a line as it is shown: files of the environment by their names in it."""
    return _STAGED.sub("", line)[:_LONG]


def _without_failure(diagnosis: Diagnosis) -> str:
    if diagnosis.ok:
        return "it ended well"
    if diagnosis.ok is None and diagnosis.job_id:
        logs = counted(diagnosis.read, "log")
        return f"nothing failed as far as its {logs} can tell; it may still be running"
    if diagnosis.interrupted:
        return (
            "it was interrupted (Ctrl-C, a signal, or the command that followed it was ended); "
            "nothing had failed until then"
        )
    return f"nothing shows that the job failed, in {counted(diagnosis.read, 'file')}"
