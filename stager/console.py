"""Everything a person sees: talk on standard error, data on standard output."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .diagnose import FirstFailure
from .errors import EXIT_INTERRUPTED, EXIT_JOB, EXIT_OK, StagerError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress, TaskID

    from bundle.job import Job

    from .verify import Outcome

PHASES = {
    "lock": "Pinning the requirements",
    "wheels": "Fetching the wheels",
    "layers": "Making the layers",
    "bundle": "Writing the bundle",
    "proof": "Proving that nothing is missing offline",
    "preflight": "Looking at the nodes",
    "place": "Placing the bundle",
    "unpack": "Unpacking",
    "probe": "Checking the environment",
    "launch": "Running",
}
_TORCHRUN = re.compile(r"[EWI]\d{4} [\d:.]+ \d+ \S*torch/distributed/")
"""How a line of torchrun's own log begins."""
_STYLES = {"error": "31;1", "warning": "33", "good": "32", "dim": "2", "bold": "1"}


class Console:
    """One command's voice.

    Args of the constructor: ``quiet`` leaves only errors, ``verbose`` adds the output of every
    node, ``as_json`` keeps standard output for one JSON object.
    """

    def __init__(
        self, *, quiet: bool = False, verbose: bool = False, as_json: bool = False
    ) -> None:
        """Look at the terminal once: colour only there, and not under ``NO_COLOR``."""
        self.quiet, self.verbose, self.as_json = quiet, verbose, as_json
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = self._terminal and not os.environ.get("NO_COLOR")
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._action = "verify"
        self._launcher_reports = False
        self._restarts = 0
        if isinstance(sys.stdout, io.TextIOWrapper):  # whatever a rank prints, or a file is named
            sys.stdout.reconfigure(errors="backslashreplace")

    # Talk.

    def say(self, line: str, style: str = "") -> None:
        """Print a line for people."""
        if not self.quiet:
            self._write(line, style)

    def error(self, failure: StagerError) -> None:
        """Print an expected failure: what, the supporting lines, and what to do."""
        self.stop()
        if self.as_json:
            described = {
                "message": failure.message,
                "hint": failure.hint,
                "context": list(failure.context),
            }
            self.emit({"ok": False, "error": described})
        self._write(f"error: {failure.message}", "error")
        for line in failure.context:
            self._write(f"  {line}")
        if failure.hint:
            self._write(f"hint: {failure.hint}", "good")

    def _write(self, line: str, style: str = "") -> None:
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        if style and self._colour:
            line = f"\x1b[{_STYLES[style]}m{line}\x1b[0m"
        print(line, file=sys.stderr, flush=True)

    # Data.

    def emit(self, report: Mapping[str, Any]) -> None:
        """Print the command's JSON object."""
        print(json.dumps({"schema": 1, **report}, indent=2), flush=True)

    def data(self, line: str) -> None:
        """Print a line of a command's result; to standard error while JSON owns standard output."""
        self.stop()
        if self.as_json:
            self.say(line)
        else:
            print(line, flush=True)

    # How a build goes.

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self.stop()
        self.say(PHASES.get(phase, phase), "bold")

    def step(self, what: str, done: int, total: int) -> None:
        """A piece of the phase is done."""
        if self.quiet:
            return
        if not self._terminal:
            self._write(f"  {what} ({done}/{total})" if total else f"  {what}")
            return
        if not total:
            self._write(f"  {what}", "dim")
            return
        if self._progress is None:
            self._start_progress(total)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, description=what)

    def note(self, line: str) -> None:
        """Something the user should know."""
        self.say(f"  {line}")

    def stop(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._task = None, None

    def _start_progress(self, total: int) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("  "),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            console=RichConsole(file=sys.stderr, no_color=not self._colour),
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=total)

    # How a job goes.

    def event(self, event: Mapping[str, Any]) -> None:
        """Show one event of the far side."""
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def _on_begin(self, event: Mapping[str, Any]) -> None:
        if event["phase"] != "place":
            self.begin(str(event["phase"]))
        if event["phase"] == "launch":
            shown = "every node's" if self.verbose else "the first node's"
            self.say(f"  what follows is {shown} output; the logs have all of it", "dim")

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
        if self._action == "verify":
            self.data(line)
        else:  # standard output belongs to the program
            self.say(line)

    def _on_started(self, event: Mapping[str, Any]) -> None:
        if self.verbose:
            self.say(f"  {event['node']} $ {' '.join(event['argv'])}", "dim")

    def _on_output(self, event: Mapping[str, Any]) -> None:
        for line in event["lines"]:
            if self.verbose:
                self.data(f"{event['node']}: {line}")
            elif event["head"] and not self._is_launchers(line):
                self.data(line)

    def _is_launchers(self, line: str) -> bool:
        """Whether a line is torchrun's own; from its word that a rank failed on, all of them are.

        That report fills a screen and names the first failure of its own node, which often is a
        consequence. The log has it; what failed first is said at the end.
        """
        if not self._launcher_reports and _TORCHRUN.match(line):
            self._launcher_reports = "failed (exitcode" in line and not self._restarts
            return True
        return self._launcher_reports

    def failure(self, failure: FirstFailure, log_dir: str) -> None:
        """Say what went wrong first, with the lines that show it."""
        who = failure.node if failure.rank is None else f"{failure.node} rank {failure.rank}"
        code = "" if failure.exit_code is None else f" (exit status {failure.exit_code})"
        self._write(f"error: {who} failed{code}: {failure.cause}", "error")
        for line in failure.lines:
            if failure.cause not in line or len(failure.lines) > 1:  # else it says nothing more
                self._write(f"  | {line}")
        self._write(f"class: {failure.kind}")
        self._write(f"hint: {failure.hint}", "good")
        self._write(f"logs: {log_dir}")

    # How a command ends.

    def built(self, report: Mapping[str, Any]) -> None:
        """The result of ``stager build``."""
        seconds = sum(report["seconds"].values())
        self.say(
            f"{report['packages']} packages, {report['files']} files: "
            f"{_size(report['bundle_bytes'])}, {_size(report['unpacked_bytes'])} unpacked; "
            f"{report['layers_built']} layers made, {report['layers_reused']} reused; "
            f"{seconds:.1f} s",
            "good",
        )
        self.data(report["bundle"])

    def inspected(self, report: Mapping[str, Any]) -> None:
        """The result of ``stager inspect``."""
        self.data(f"{report['name']} {report['id']}")
        self.data(f"Python {report['python']}, {report['platform']}")
        sizes = f"{_size(report['bundle_bytes'])}, {_size(report['unpacked_bytes'])} unpacked"
        self.data(f"{len(report['layers'])} layers, {report['files']} files, {sizes}")
        for layer in sorted(report["layers"], key=lambda layer: -int(layer["bytes"])):
            name = f"{layer['name']} {layer['version']}".strip()
            row = f"{_size(layer['bytes']):>9}  {_size(layer['unpacked_bytes']):>9}"
            self.data(f"  {layer['kind']:8}{name:40}{row}  {layer['files']:>6} files")
        for item in report.get("listing", []):
            self.data(f"{item['sha256'][:16]} {item['size']:>12} {item['path']}")

    def job(self, job: Job, bundle: Path) -> None:
        """What is about to happen, before the first node is touched."""
        self._action, self._restarts = job.action, job.launch.max_restarts
        nodes = "1 local node" if len(job.nodes) == 1 else f"{len(job.nodes)} local nodes"
        self.say(f"job {job.id}: {nodes}, bundle {bundle.name}")

    def verified(self, outcome: Outcome) -> int:
        """The result of ``stager verify``, and its exit code."""
        if outcome.interrupted:
            return self._interrupted(outcome)
        self._log_loss(outcome)
        self._problems(outcome)
        count = len(outcome.job.nodes)
        if outcome.ok:
            who = "the node" if count == 1 else f"all {count} nodes"
            self.say(f"{who} can run it; logs: {outcome.job.log_dir}", "good")
            return EXIT_OK
        bad = ",".join(outcome.problems)
        self._write(f"{len(outcome.problems)} of {count} nodes cannot run it: {bad}", "error")
        return EXIT_JOB

    def ran(self, outcome: Outcome) -> int:
        """The result of ``stager run``, and its exit code."""
        if outcome.interrupted:
            return self._interrupted(outcome)
        self._log_loss(outcome)
        failure = outcome.first_failure
        if failure is not None:
            self._problems(outcome)
            if failure.exit_code is not None:  # else it is one of these problems
                self.failure(failure, outcome.job.log_dir)
            else:
                self._write(f"logs: {outcome.job.log_dir}")
            return EXIT_JOB
        seconds = outcome.result["seconds"]
        spent = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        count = outcome.result["world_size"]
        self.say(f"done: {count} {'rank' if count == 1 else 'ranks'}; {spent}", "good")
        self.say(f"logs: {outcome.job.log_dir}/{outcome.job.name}.{outcome.job.id}.*.out")
        return EXIT_OK

    def _problems(self, outcome: Outcome) -> None:
        """Each problem once, with the nodes that have it."""
        nodes: dict[str, list[str]] = {}
        for node, problems in outcome.problems.items():
            for problem in problems:
                nodes.setdefault(str(problem), []).append(node)
        for text, having in nodes.items():
            self._write(f"error: {','.join(having)}: {text}", "error")

    def _log_loss(self, outcome: Outcome) -> None:
        if lost := outcome.result.get("logs_lost"):
            self._write(f"warning: the logs are not complete: {lost}", "warning")

    def _interrupted(self, outcome: Outcome) -> int:
        self._write(f"interrupted; nothing is left running; logs: {outcome.job.log_dir}", "error")
        return EXIT_INTERRUPTED


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
