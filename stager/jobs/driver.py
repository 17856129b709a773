"""The driver of a job, started and followed to its end: behind ``verify`` and ``run``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bundle.protocol import log_names
from bundle.protocol.enumerations import Ending, LogMode
from bundle.protocol.events import PRINTED_ONLY, JobBegins, JobEnds, Record
from bundle.protocol.job import Job
from bundle.system import permissions

from ..building.current_bundle import Listener, offline_root
from ..config.load import Config
from ..core.errors import JobError, StagerError, format_result
from ..core.processes import Streamed, feed_command, follow_command, replace_process
from ..core.store import Store
from ..logs.job_record import parse_event, read_records
from ..pack.bundle_file import ChosenBundle, is_made_here, node_program, open_bundle
from ..pack.node_program import find_compiled_program
from ..slurm import messages
from ..trust import decide_trust
from .job_description import explain_unwritable
from .outcome import Outcome

if TYPE_CHECKING:
    from .outcome import SubmittedJob


class JobListener(Listener, Protocol):
    """Receives the progress of a job, besides that of a build."""

    def warn(self, line: str) -> None:
        """Report something the user must know."""

    def job(self, job: Job, bundle: Path) -> None:
        """Report a job before the first node is touched."""

    def event(self, record: Record) -> None:
        """Report one event of the far side; ``docs/events.md`` lists them."""

    def talk(self, line: str) -> None:
        """Report a line of Slurm's commands, or of the driver's standard error."""

    def submitted(self, job: SubmittedJob) -> None:
        """Report a batch job that Slurm has accepted."""


class SilentListener:
    """A listener that does nothing; a base for those of a few things."""

    def _ignore(self, *_args: Any, **_named: Any) -> None:  # noqa: ANN401
        pass

    begin = step = note = warn = job = event = talk = submitted = _ignore


def run_hook(
    argv: Sequence[str], result: object, warn: Callable[[str], None], seconds: float = 60.0
) -> None:
    """Run a command without a shell, with ``--json``'s result; its failure is only a warning."""
    try:
        feed_command(argv, format_result(result), timeout=seconds)
    except StagerError as exc:
        hint = f"; {exc.hint}" if exc.hint else ""
        warn(f"the on-failure command failed: {exc.message}{hint}")


# --- The driver of a job, started and followed to its end: behind ``verify`` and ``run`` ---------

OnEvent = Callable[[Record], None]
OnTalk = Callable[[str], None]

_DRIVER = "stager-driver "
_TELL_PID = f'echo "{_DRIVER}$$" >&2; exec "$@"'
"""The command that salloc starts: it prints the process id that the driver is going to have."""


class DriverStart(NamedTuple):
    """The command that starts the driver."""

    argv: tuple[str, ...] = ()  # the words before it: ``salloc`` and its options, or nothing
    environment: Mapping[str, str] | None = None  # None for the variables of this process


def run_driver(
    outcome: Outcome, config: Config, start: DriverStart, on_event: OnEvent, on_talk: OnTalk
) -> None:
    """Start the driver and follow it to its end."""
    store = Store(offline_root(config))
    asked = outcome.job.bundle_id
    program = find_compiled_program(node_program(outcome.bundle, store, asked), store)
    driven = _Driven(outcome, on_event, on_talk)
    # Held open while the job waits for nodes, too, so that no cleaning removes the bundle.
    with open_bundle(outcome.bundle, asked), _write_job_file(outcome.job) as file:
        driver = (sys.executable, "-I", "-S", str(program), "drive", str(file))
        ended = driven.run(start, driver)
    if outcome.result is None:
        driven.read_kept_events()
    if ended.interrupted and outcome.end_reason == Ending.CANCELLED:  # by this process
        outcome.result = replace(outcome.end, interrupted=True, ended_by="")
    if outcome.end_reason and messages.is_time_up(driven.output):
        # To the driver it may have looked like scancel.
        outcome.result = replace(outcome.end, ended_by=Ending.TIME_LIMIT)
    if outcome.result is None and ended.interrupted:
        outcome.result = JobEnds(ok=False, interrupted=True)
    if outcome.result is None:
        raise _explain_missing_result(outcome.job, start, ended.returncode, driven.output)


def _explain_missing_result(
    job: Job, start: DriverStart, code: int, output: Sequence[str]
) -> StagerError:
    if start.argv:
        return messages.make_failure(output, code, job.log_dir)
    who = f"job {job.id}" if job.id else "the driver"
    return JobError(
        f"{who} ended without a result (exit status {code})",
        hint=f"see the messages above, and the logs in {job.log_dir}",
        context=output[-15:],
    )


class _Driven:
    """A running driver; ``output`` has its lines, and Slurm's, that are not events."""

    def __init__(self, outcome: Outcome, on_event: OnEvent, on_talk: OnTalk) -> None:
        self.output: list[str] = []
        self._outcome, self._on_event, self._on_talk = outcome, on_event, on_talk
        self._pid: int | None = None
        self._kept = 0  # events of this job that have come and that its driver keeps, too

    def run(self, start: DriverStart, driver: Sequence[str]) -> Streamed:
        """Start the driver, once Slurm's controller answers, and follow it."""
        follow = partial(follow_command, on_talk=self.talk, environment=start.environment)
        if not start.argv:
            return follow(driver, self.take, pass_on=os.kill)
        from bundle.driver.transports.slurm import ControllerWait

        wait = ControllerWait(
            lambda remark: self._on_event(Record(remark)), fault=messages.find_unsent_reason
        )
        while True:
            self.output.clear()
            words = [*start.argv, "sh", "-c", _TELL_PID, "stager", *driver]
            ended = follow(words, self.take, end_it=self.end, pass_on=self.forward)
            if ended.interrupted or ended.returncode == 0 or self._pid is not None:
                return ended
            try:
                if not wait.may_retry("\n".join(self.output)):
                    return ended
            except KeyboardInterrupt:
                return ended._replace(interrupted=True)

    def take(self, line: str) -> None:
        if record := parse_event(line):
            self._take(record)
        else:
            self.output.append(line)

    def _take(self, record: Record) -> None:
        self._kept += not isinstance(record.event, PRINTED_ONLY)
        self._outcome.take(record)
        self._on_event(record)

    def read_kept_events(self) -> None:
        """Read events that only the file has: a stopped terminal, or a kill, loses some."""
        job = self._outcome.job
        if not self._kept:  # it has not begun: what is in a file is an older job's
            return
        attempt: list[Record] = []
        for record in read_records(Path(job.log_dir) / log_names.make_events_name(job.id)):
            if isinstance(record.event, JobBegins):  # also of another job in the same allocation
                attempt.clear()
            attempt.append(record)
        for record in attempt[self._kept :]:
            self._take(record)

    def talk(self, line: str) -> None:
        if line.startswith(_DRIVER):
            self._pid = int(line.removeprefix(_DRIVER))
            return
        self.output.append(line)
        self._on_talk(line)

    def forward(self, salloc: int, number: int) -> None:
        """Pass a signal to the driver; before it runs there are no ranks to signal."""
        if self._pid is not None:
            os.kill(self._pid, number)

    def end(self, salloc: int) -> None:
        """Interrupt the driver: a signal to salloc would release the nodes before it has ended."""
        os.kill(self._pid or salloc, signal.SIGINT if self._pid else signal.SIGTERM)


@contextmanager
def _write_job_file(job: Job) -> Iterator[Path]:
    """Write the job, whose command may contain secrets, to a private file while the driver runs."""
    file = Path(job.log_dir) / f".job.{os.getpid()}.{time.time_ns()}.json"
    try:
        with open(
            file, "x", encoding="utf-8", opener=permissions.make_opener(LogMode.PRIVATE)
        ) as handle:
            handle.write(json.dumps(job.to_json(), indent=1) + "\n")
    except OSError as exc:
        file.unlink(missing_ok=True)
        raise explain_unwritable(Path(job.log_dir), exc) from exc
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def execute(config: Config, bundle: ChosenBundle, command: Sequence[str]) -> None:
    """Become a command in the environment of a bundle, unpacked on this machine if need be."""
    replace_process(make_exec_argv(config, bundle, command))


def make_exec_argv(config: Config, bundle: ChosenBundle, command: Sequence[str]) -> list[str]:
    """Return the command that becomes another one in the environment of a bundle."""
    store = Store(offline_root(config))
    decide_trust(config, store, bundle.path, bundle.id)
    program = node_program(bundle.path, store, bundle.id)
    hint = getattr(sys, "_base_executable", sys.executable)
    argv = [sys.executable, "-I", "-S", str(program), "exec", "--python", hint, "--id", bundle.id]
    if is_made_here(store, bundle.path, bundle.id):
        argv.append("--trusted")
    return [*argv, str(bundle.path), config.cluster.node_root, "--", *command]
