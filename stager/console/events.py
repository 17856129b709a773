"""How a job goes: each event of the far side, as a line or two."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bundle.protocol.counts import counted
from bundle.protocol.problem import Problem

from ..slurm import messages
from .output import size
from .reports import Reports

if TYPE_CHECKING:
    from pathlib import Path

    from bundle.protocol.job import Job

_TORCHRUN = re.compile(r"[EWI]\d{4} [\d:.]+ \d+ \S*torch/distributed/")
"""How a line of torchrun's own log begins."""
_NOISE = re.compile(r"\[W\d{4} .*\[c10d\] The hostname of the client socket cannot be retrieved")
"""What c10d says where addresses have no names, and what matters to nobody."""

_NAMED = 8
"""How many nodes are named before it gets too long."""


class Events(Reports):
    """A job in words, while it runs."""

    _action = "verify"
    _launcher_reports = False
    _restarts = 0
    _dry_run = False
    _slurm = False
    _batch = False
    _job_id = ""

    @property
    def _table(self) -> bool:
        """Whether the nodes' facts are shown as a table at the end, and not as a line each."""
        plain = self.as_json or self.verbose or self._dry_run
        return not plain and self._on_terminal

    def submitted(self, report: Mapping[str, Any]) -> None:
        """A batch job that Slurm has taken; what its ranks print is not among its events."""
        self._batch = True
        super().submitted(report)

    def job(self, job: Job, bundle: Path) -> None:
        """What is about to happen, before the first node is touched."""
        self._action, self._restarts = job.action, job.launch.max_restarts
        self._moving = bool(self._restarts or job.launch.elastic)
        self._each = job.launch.nproc_per_node or 1
        self._dry_run, self._slurm, self._job_id = job.dry_run, job.allocation == "slurm", job.id
        if job.allocation == "local":
            nodes = counted(len(job.nodes), "local node")
            self.say(f"job {job.id}: {nodes}, bundle {bundle.name}")
        else:  # its number and nodes come with its first event
            self.say(f"bundle {bundle.name}")
        if job.action == "verify":
            self.say(f"bundle id {job.bundle_id}")

    def talk(self, line: str) -> None:
        """What Slurm's commands say, and whatever else the driver's standard error has."""
        shown = messages.plain(messages.read(line))
        if self.verbose:
            self.say(f"  {line}", "dim")
        elif shown:
            self.say(f"  {shown}")

    def _on_job(self, event: Mapping[str, Any]) -> None:
        nodes = event["nodes"]
        if str(event["job_id"]) != self._job_id and self._slurm:
            many = counted(len(nodes), "node")
            named = ",".join(nodes[:_NAMED]) + (",..." if len(nodes) > _NAMED else "")
            self.say(f"job {event['job_id']}: {many} ({named}), logs: {event['log_dir']}")

    def _on_plan(self, event: Mapping[str, Any]) -> None:
        self.say(f"  {event['why']}")
        if event["bytes"]:
            self.begin("place")
        for group in event["groups"] if self._dry_run or event["bytes"] else ():
            nodes = ",".join(group["nodes"])
            layers = f": {', '.join(group['layers'])}" if self.verbose and group["layers"] else ""
            count = counted(len(group["layers"]), "layer")
            line = f"{nodes} {group['how']} {size(group['bytes'])}, {count}"
            if self._dry_run:
                self.data(line + layers)
            else:
                self.say(f"  {line}{layers}")
        if self._dry_run:
            self.expected(event["forecast"])

    def _on_left_out(self, event: Mapping[str, Any]) -> None:
        for node, problems in event["nodes"].items():
            told = "; ".join(_words(problem).removeprefix(f"{node}: ") for problem in problems)
            self._write(f"warning: {node} is left out: {told}", "warning")

    def _on_collected(self, event: Mapping[str, Any]) -> None:
        files = counted(event["files"], "file")
        self.say(
            f"  {event['node']}: {files}, {size(event['bytes'])}: {event['from']} -> {event['to']}"
        )
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
            first = "the first ranks'" if self._moving else "the first node's"
            shown = "every node's" if self.verbose else first
            text = f"what follows is {shown} output; the logs have all of it"
            self.say(f"  {'the output is in the logs' if self._batch else text}", "dim")

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
        if self._action == "verify" and self._table:
            return
        if self._action == "verify":
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
            elif self._action == "verify" and event.get("phase") == "launch":
                return  # ranks of ours: what they have found is told at the end
            elif self._is_shown(event) and not self._is_launchers(line):
                self.data(line)

    def _is_shown(self, event: Mapping[str, Any]) -> bool:
        """Whether an output event is the first node's: that of the first ranks, where they move.

        Ranks that may be started again are dealt to nodes by torchrun, a node's worth at a time.
        """
        rank = event.get("rank")
        if rank is None or not self._moving:
            return bool(event["head"])
        return int(rank) < self._each

    def _is_launchers(self, line: str) -> bool:
        """Whether a line is torchrun's own; from its word that a rank failed on, all of them are.

        That report fills a screen and names the first failure of its own node, which often is a
        consequence. The log has it; what failed first is said at the end.
        """
        if _NOISE.match(line):
            return True
        if not self._launcher_reports and _TORCHRUN.match(line):
            self._launcher_reports = "failed (exitcode" in line and not self._restarts
            return True
        return self._launcher_reports


def _words(problem: object) -> str:
    """A problem as text, whichever way the event has it."""
    return str(Problem.from_json(problem)) if isinstance(problem, dict) else str(problem)
