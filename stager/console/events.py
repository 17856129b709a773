"""The course of a job: each event of the far side, as a line or two."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bundle.protocol.counts import counted, sized
from bundle.protocol.problem import Problem
from bundle.protocol.words import Action, Allocation

from ..slurm import messages
from .reports import Reports

if TYPE_CHECKING:
    from pathlib import Path

    from bundle.protocol.job import Job

    from ..jobs.summary import SubmittedJob

_TORCHRUN = re.compile(r"[EWI]\d{4} [\d:.]+ \d+ \S*torch/distributed/")
"""The beginning of a line of torchrun's own log."""
_NOISE = re.compile(r"\[W\d{4} .*\[c10d\] The hostname of the client socket cannot be retrieved")
"""A warning of c10d where addresses have no names, which matters to nobody."""

_MAX_NAMED = 8
"""Nodes that are named in a line."""


class Events(Reports):
    """The output of a job while it runs."""

    _action = Action.VERIFY
    _launcher_reports = False
    _restarts = 0
    _dry_run = False
    _slurm = False
    _batch = False
    _job_id = ""

    @property
    def _table(self) -> bool:
        """Return whether the facts of the nodes are shown as one table at the end."""
        plain = self.as_json or self.verbose or self._dry_run
        return not plain and self._on_terminal

    def submitted(self, job: SubmittedJob) -> None:
        """Show a batch job that Slurm has accepted; its events are without the output of ranks."""
        self._batch = True
        super().submitted(job)

    def job(self, job: Job, bundle: Path) -> None:
        """Show what is about to happen, before the first node is touched."""
        self._action, self._restarts = job.action, job.launch.max_restarts
        self._moving = bool(self._restarts or job.launch.elastic)
        self._each = job.launch.nproc_per_node or 1
        self._dry_run, self._slurm, self._job_id = (
            job.dry_run,
            job.allocation is Allocation.SLURM,
            job.id,
        )
        if job.allocation is Allocation.LOCAL:
            nodes = counted(len(job.nodes), "local node")
            self.say(f"job {job.id}: {nodes}, bundle {bundle.name}")
        else:  # its number and nodes come with its first event
            self.say(f"bundle {bundle.name}")
        if job.action is Action.VERIFY:
            self.say(f"bundle id {job.bundle_id}")

    def talk(self, line: str) -> None:
        """Show a line of Slurm's commands, or of the driver's standard error."""
        shown = messages.plain(messages.read(line))
        if self.verbose:
            self.say(f"  {line}", "dim")
        elif shown:
            self.say(f"  {shown}")

    def _on_job(self, event: Mapping[str, Any]) -> None:
        nodes = event["nodes"]
        if str(event["job_id"]) != self._job_id and self._slurm:
            count = counted(len(nodes), "node")
            more = ",..." if len(nodes) > _MAX_NAMED else ""
            names = ",".join(nodes[:_MAX_NAMED]) + more
            self.say(f"job {event['job_id']}: {count} ({names}), logs: {event['log_dir']}")

    def _on_plan(self, event: Mapping[str, Any]) -> None:
        self.say(f"  {event['why']}")
        if event["bytes"]:
            self.begin("place")
        if self._dry_run:
            for group in event["groups"]:
                self.data(self._group(group))
            self.expected(event["forecast"])
        elif event["bytes"]:
            for group in event["groups"]:
                self.say(f"  {self._group(group)}")

    def _group(self, group: Mapping[str, Any]) -> str:
        """Return a line about nodes that are sent the same layers."""
        layers = group["layers"]
        names = f": {', '.join(layers)}" if self.verbose and layers else ""
        sent = f"{sized(group['bytes'])}, {counted(len(layers), 'layer')}"
        return f"{','.join(group['nodes'])} {group['how']} {sent}{names}"

    def _on_left_out(self, event: Mapping[str, Any]) -> None:
        for node, problems in event["nodes"].items():
            reasons = "; ".join(_words(problem).removeprefix(f"{node}: ") for problem in problems)
            self._write(f"warning: {node} is left out: {reasons}", "warning")

    def _on_collected(self, event: Mapping[str, Any]) -> None:
        what = f"{counted(event['files'], 'file')}, {sized(event['bytes'])}"
        self.say(f"  {event['node']}: {what}: {event['from']} -> {event['to']}")
        for old, new in event.get("renamed", {}).items():
            self.say(f"  {old} was there already; this one is {new}")
        for problem in event.get("problems", []):
            self._write(f"warning: {event['node']}: {_words(problem)}", "warning")

    def _on_note(self, event: Mapping[str, Any]) -> None:
        if event.get("warning"):  # that a node's disk lost something matters with -q, too
            self.warn(str(event["text"]))
        else:
            self.note(str(event["text"]))

    def _on_stray(self, event: Mapping[str, Any]) -> None:
        if self.verbose or event["phase"] == "launch":
            first = next(iter(event["lines"]), "")
            lines = counted(event["count"], "line")
            self.note(f"{lines} came through srun from no agent; the first: {first}")

    def _on_lingering(self, event: Mapping[str, Any]) -> None:
        from ..diagnosis.wording import lingering_in_words

        finished, left = event["finished"], event.get("left")
        cause, hint = lingering_in_words(finished, left, event["waits_for"])
        self._write(f"warning: {event['node']} rank {event['rank']}: {cause}; {hint}", "warning")

    def event(self, event: Mapping[str, Any]) -> None:
        """Show one event of the far side."""
        handler = getattr(self, f"_on_{str(event['event']).replace('-', '_')}", None)
        if handler is not None:
            handler(event)

    def _on_begin(self, event: Mapping[str, Any]) -> None:
        if event["phase"] != "place":
            self.begin(str(event["phase"]))
        if event["phase"] == "launch":
            self.say(f"  {self._output_shown()}", "dim")

    def _output_shown(self) -> str:
        """Return a line about the ranks whose output is shown."""
        if self._batch:
            return "the output is in the logs"
        if self.verbose:
            whose = "every node's"
        elif self._moving:
            whose = "the first ranks'"
        else:
            whose = "the first node's"
        return f"what follows is {whose} output; the logs have all of it"

    def _on_preflight(self, event: Mapping[str, Any]) -> None:
        words = [f"{key}={'ok' if event.get(key) else 'missing'}" for key in ("proj", "pkgs")]
        self.say(f"  {event['node']} {' '.join(words)}")

    def _on_unpack(self, event: Mapping[str, Any]) -> None:
        if event["ok"]:
            how = "already there" if event["reused"] else "staged"
            path = str(event["path"])
            folder, _, bundle_id = path.rpartition("/")
            shown = path if self.verbose else f"{folder}/{bundle_id[:12]}..."
            self.say(f"  {event['node']} {how} -> {shown}")

    def _on_probe(self, event: Mapping[str, Any]) -> None:
        line = str(event.get("line", f"NODE {event['node']} FAILED"))
        if self._action is Action.VERIFY and self._table:
            return
        if self._action is Action.VERIFY:
            self.data(line)
        else:  # standard output belongs to the program
            self.say(line)

    def _on_started(self, event: Mapping[str, Any]) -> None:
        if self.verbose:
            self.say(f"  {event['node']} $ {' '.join(event['argv'])}", "dim")

    def _on_output(self, event: Mapping[str, Any]) -> None:
        rank = event.get("rank")
        who = event["node"] if rank is None else f"{event['node']} {rank}"
        for line in event["lines"]:
            if self.verbose:
                self.data(f"{who}: {line}")
            elif self._action is Action.VERIFY and event.get("phase") == "launch":
                return  # the ranks of the check: their result is shown at the end
            elif self._is_shown(event) and not self._is_launchers(line):
                self.data(line)

    def _is_shown(self, event: Mapping[str, Any]) -> bool:
        """Return whether an output event comes from the first node, or else the first ranks.

        Ranks that may be started again move: torchrun assigns them to nodes, a node's worth each.
        """
        rank = event.get("rank")
        if rank is None or not self._moving:
            return bool(event["head"])
        return int(rank) < self._each

    def _is_launchers(self, line: str) -> bool:
        """Return whether a line is torchrun's own, as all are once it reports that a rank failed.

        That report fills a screen and names the first failure of its own node, which often is a
        consequence. The log has it; what failed first is shown at the end.
        """
        if _NOISE.match(line):
            return True
        if not self._launcher_reports and _TORCHRUN.match(line):
            self._launcher_reports = "failed (exitcode" in line and not self._restarts
            return True
        return self._launcher_reports


def _words(problem: object) -> str:
    """Return a problem as text, in whichever form the event has it."""
    return str(Problem.from_json(problem)) if isinstance(problem, dict) else str(problem)
