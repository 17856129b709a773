"""How a job ends: what became of it, whose fault it is, and the exit code."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bundle.protocol import output
from bundle.protocol.counts import counted

from ..core.errors import EXIT_INTERRUPTED, EXIT_JOB, EXIT_OK
from ..jobs import metrics
from .events import Events
from .logs import Lookings

if TYPE_CHECKING:
    from ..diagnosis.failure import FirstFailure
    from ..jobs.result import Outcome


_NAMED = 8
"""How many losses are told one by one."""


class Console(Events, Lookings):
    """Everything a person sees of one command."""

    def verified(self, outcome: Outcome) -> int:
        """The result of ``stager verify``, and its exit code."""
        if outcome.interrupted:
            return self._interrupted(outcome)
        if self._table and outcome.probes:
            self._show_table(outcome)
        self._show_network(outcome)
        self._log_loss(outcome)
        self._problems(outcome)
        if outcome.ended_by:
            return self._ended(outcome)
        left_out = list(outcome.result.get("left_out", []))
        count = len(outcome.job.nodes)
        if outcome.job.dry_run and outcome.ok:
            self.say("nothing was sent or changed", "good")
            return EXIT_OK
        if outcome.ok:
            who = "the node" if count == 1 else f"all {count} nodes"
            who = f"{count - len(left_out)} of {count} nodes" if left_out else who
            self.say(f"{who} can run it; logs: {outcome.job.log_dir}", "good")
            self._advise(outcome, left_out)
            return EXIT_OK
        bad = list(dict.fromkeys([*outcome.problems, *left_out]))
        self._write(
            f"{len(bad)} of {counted(count, 'node')} cannot run it: {','.join(bad)}", "error"
        )
        self._advise(outcome, bad)
        return EXIT_JOB

    def ran(self, outcome: Outcome) -> int:
        """The result of ``stager run``, and its exit code."""
        if outcome.interrupted:
            code = self._interrupted(outcome)
            self._log_loss(outcome)
            if outcome.first_failure is not None:
                self._write("before that:")
                self._problems(outcome)
                self._first(outcome, outcome.first_failure)
            return code
        self._log_loss(outcome)
        if outcome.ended_by:
            self._problems(outcome)
            return self._ended(outcome)
        failure = outcome.first_failure
        if failure is not None:
            self._problems(outcome)
            if failure.exit_code is None and not outcome.logs_lost:
                self._advise(outcome, [node for node, found in outcome.problems.items() if found])
            self._first(outcome, failure)
            return EXIT_JOB
        if outcome.job.dry_run:
            self.say("nothing was sent, changed or started", "good")
            return EXIT_OK
        seconds = outcome.result["seconds"]
        spent = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        count = outcome.result["world_size"]
        self.say(f"done: {counted(count, 'rank')}; {spent}", "good")
        for one in outcome.trained:
            self.say(metrics.line(one["path"], one["metrics"]), "good")
        for note in outcome.notes:
            self._write(f"note: {note}", "warning")
        self.say(f"logs: {outcome.job.log_dir}/{outcome.job.name}.{outcome.job.id}.*.out")
        self._advise(outcome, list(outcome.result.get("left_out", [])))
        return EXIT_OK

    def swept(self, outcome: Outcome) -> int:
        """What cleaning the nodes came to, and its exit code."""
        if outcome.interrupted:
            return self._interrupted(outcome)
        self._problems(outcome)
        return EXIT_OK if outcome.ok else EXIT_JOB

    def _first(self, outcome: Outcome, failure: FirstFailure) -> None:
        """What failed first, as the logs tell it, and where there is more."""
        job, found = outcome.job, outcome.diagnosis
        if failure.exit_code is not None or failure.rank is not None:  # else one of the problems
            self.failure(failure)
            if found is not None:
                self.followed_by(found)
        from ..logs.files import DEFAULT_LOG_DIR

        usual = Path(job.log_dir) == Path(DEFAULT_LOG_DIR).expanduser()
        option = "" if usual else f" --log-dir {shlex.quote(job.log_dir)}"
        self._write(f"logs: {job.log_dir}")
        self._write(f"more: stager diagnose {job.id}{option}")

    def _ended(self, outcome: Outcome) -> int:
        """Slurm ended the job: why, and what to do."""
        failure = outcome.first_failure
        if failure is not None:
            named = f" ({failure.node})" if failure.node else ""
            self._write(f"error: job {outcome.job.id}: {failure.cause}{named}", "error")
            self._write(f"class: {failure.kind}")
            self._write(f"hint: {failure.hint}", "good")
        self._write(f"logs: {outcome.job.log_dir}")
        return EXIT_JOB

    def _advise(self, outcome: Outcome, bad: list[str]) -> None:
        """The option that leaves nodes out, ready to be copied; not where none would be left."""
        which = "it" if len(bad) == 1 else "them"
        if bad and len(bad) < len(outcome.job.nodes) and outcome.job.allocation == "slurm":
            self._write(f"hint: without {which}: --exclude={','.join(bad)}", "good")

    def _show_table(self, outcome: Outcome) -> None:
        """The nodes' facts, on a terminal."""
        from rich.console import Console as RichConsole

        from ..jobs.result import verify_report
        from .node_table import node_table

        self.stop()
        RichConsole(no_color=not self._colour).print(node_table(verify_report(outcome)["nodes"]))

    def _show_network(self, outcome: Outcome) -> None:
        """What ``--deep`` measured between the nodes, if it did."""
        measured = (outcome.result.get("deep") or {}).get("all_reduce")
        if not measured:
            return
        from .network import lines, pair_table, summary

        if self._table and measured["pairs"]:
            from rich.console import Console as RichConsole

            self.stop()
            RichConsole(no_color=not self._colour).print(pair_table(measured))
        else:
            for line in lines(measured):
                self.data(line)
        for line in summary(measured):
            self.say(line)

    def _problems(self, outcome: Outcome) -> None:
        """Each problem once, with the nodes that have it."""
        nodes: dict[str, list[str]] = {}
        for node, problems in outcome.problems.items():
            for problem in problems:
                if outcome.ended_by and problem.where == f"job {outcome.job.id}":
                    continue  # the end itself, which is told with what to do about it
                # The node's name comes first in any case; without it equal problems meet.
                bare = replace(problem, where="") if problem.where == node else problem
                nodes.setdefault(str(bare), []).append(node)
        for text, having in nodes.items():
            self._write(f"error: {','.join(having)}: {text}", "error")

    def _log_loss(self, outcome: Outcome) -> None:
        """What the logs do not have, unless a problem says it: where nothing else went wrong."""
        if fault := outcome.result.get("logs_fault"):
            self._write(f"warning: the logs are not complete: {fault}", "warning")
        said = {(node, one.what) for node, found in outcome.problems.items() for one in found}
        lost = [one for one in outcome.logs_lost if (one["node"], output.lost(one)) not in said]
        for loss in lost[:_NAMED]:
            self._write(f"warning: {loss['node']}: {output.lost(loss)}", "warning")
        if len(lost) > _NAMED:
            self._write(
                f"warning: and output of {counted(len(lost) - _NAMED, 'more rank')}", "warning"
            )

    def _interrupted(self, outcome: Outcome) -> int:
        self._write(f"interrupted; nothing is left running; logs: {outcome.job.log_dir}", "error")
        return EXIT_INTERRUPTED
