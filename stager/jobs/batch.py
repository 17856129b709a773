"""Batch jobs: submission, output, and end."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bundle.driver.transports.slurm_text import ENDED_BY_STATE
from bundle.protocol import log_names
from bundle.protocol.enumerations import Ending, PhaseName
from bundle.protocol.events import JobBegins, JobEnds, OutputShown, Record
from bundle.protocol.job import Job
from bundle.system.files import examine_directory

from .. import __version__
from ..building.current_bundle import offline_root
from ..core.errors import JobError, StagerError
from ..core.processes import CommandError, run, run_with_input
from ..core.store import Store
from ..logs.job_files import LogFile, list_job_files
from ..logs.job_record import parse_event
from ..logs.lines import LogReader, read_last_lines
from ..pack.bundle_file import node_program, read_manifest
from ..slurm import messages
from ..slurm.request import make_request
from .driver import OnEvent
from .outcome import Outcome, make_submitted_job
from .preparation import Prepared

OUTPUT_SECONDS = 2.0
"""Time between two looks: the directory may be large, and on a shared file system."""
_BEFORE = re.compile(r"\S+ (?:staged|reused) -> /|NODE \S+ OK -> ")
"""The driver's lines at the head of a log, which were shown as events."""
_SHARED = "Its nodes must see the offline root and --log-dir, or leave out --batch"
_MOST_LINES = 500  # lines of one rank that are shown at a time; of a flood, the last


class BatchOutput:
    """The logs of a job's ranks, read as they grow."""

    def __init__(self, log_dir: Path, job_id: str, *, all_nodes: bool) -> None:
        self._log_dir, self._job_id, self._all_nodes = log_dir, job_id, all_nodes
        self._readers: dict[Path, LogReader] = {}
        self._looked = 0.0

    def more(self, nodes: Sequence[str], *, ended: bool = False) -> Iterator[Record]:
        """Yield new output, as an interactive job shows it; at the end a partial line, too."""
        if not nodes or (time.monotonic() - self._looked < OUTPUT_SECONDS and not ended):
            return
        self._looked = time.monotonic()
        try:
            logs = list_job_files(self._log_dir, self._job_id).logs
        except StagerError:  # a log that cannot be read is named when the job is diagnosed
            return
        for log in logs:
            is_first = log.node == nodes[0]
            if log.own and (is_first or self._all_nodes):
                yield from self._read(log, is_first=is_first, ended=ended)

    def _read(self, log: LogFile, *, is_first: bool, ended: bool) -> Iterator[Record]:
        reader = self._readers.setdefault(log.path, LogReader(log))
        new = (line.text for line in reader.read_rest(whole=not ended))
        lines = [line for line in new if not _BEFORE.match(line)]
        if lines:
            event = OutputShown(
                node=log.node,
                rank=log.rank,
                lines=tuple(lines[-_MOST_LINES:]),
                head=is_first,
                skipped=max(0, len(lines) - _MOST_LINES),
            )
            yield Record(event, job_id=self._job_id, phase=PhaseName.LAUNCH)


# --- Batch jobs: submitting the script, and following the job to its end -------------------------

SUBMIT_SECONDS = 120  # time that Slurm may take to answer; a busy controller needs a minute
POLL_SECONDS = (1.0, 15.0)
"""Time between two questions to the controller: at first, and when the job takes long."""
LOOK_SECONDS = 0.5  # time between two looks at the event log
SILENCE_SECONDS = 600  # time without an answer from the controller after which a wait is given up
LATE_SECONDS = 10  # time that the last events may take to arrive on a slow shared file system


class Submission(NamedTuple):
    """A batch job that only has to be submitted."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    script: str


class Submitted(NamedTuple):
    """A batch job that Slurm has accepted."""

    job_id: str
    cluster: str = ""
    older: os.stat_result | None = None  # another job's event log of this number; None for none

    def ask(self, *argv: str) -> str:
        """Return what a command says of the job."""
        where = [f"--clusters={self.cluster}"] if self.cluster else []
        return run([argv[0], *where, *argv[1:]], timeout=SUBMIT_SECONDS).stdout


def make_submission(
    prepared: Prepared, env: Mapping[str, str], *, requeue: bool = False, embed: bool | None = None
) -> Submission:
    """Return the batch script of a job, and the command that would submit it.

    ``embed`` puts the node program into the script; None: where nodes may not see the bundle.
    """
    from ..slurm import batch_script

    config, bundle, job = prepared.config, prepared.bundle, prepared.job
    if embed is None:
        embed = not examine_directory(str(bundle)).shared
    asked = make_request(config, env, job.bundle_id)
    facts = batch_script.ScriptFacts(
        job=replace(job, cpus_per_task=asked.cpus_per_task),
        program=node_program(bundle, Store(offline_root(config)), job.bundle_id).read_bytes(),
        bundle_bytes=read_manifest(bundle).size,
        request=asked,
        version=__version__,
        requeue=requeue,
        embed=embed,
    )
    return Submission(
        argv=tuple(batch_script.make_submit_argv(facts)),
        environment=batch_script.make_submit_environment(env, job.launch.pass_env),
        script=batch_script.batch_script(facts),
    )


def submit(submission: Submission, on_event: OnEvent, log_dir: Path) -> Submitted:
    """Hand the script to Slurm; again only where Slurm has certainly not received it before."""
    from bundle.driver.transports.slurm import ControllerWait

    older = {path.name: path.stat() for path in log_dir.glob(log_names.make_events_name("*"))}
    wait = ControllerWait(
        lambda remark: on_event(Record(remark)), fault=messages.find_unsent_reason
    )
    while True:
        try:
            argv, environment, script = submission
            done = run_with_input(argv, script, environment=environment, timeout=SUBMIT_SECONDS)
            break
        except CommandError as exc:
            # Slurm may have received the script of one that took too long and was killed.
            killed = exc.timed_out or exc.completed.returncode < 0
            if killed or not wait.may_retry(exc.completed.stderr):
                raise _explain_refusal(exc) from exc
    found = re.search(r"(?:^|\s)(\d+)(?:;(\S+))?\s*$", done.stdout)
    if found is None:
        raise StagerError(
            f"sbatch did not report the job's number: {done.stdout.strip()[:200]!r}",
            hint="`squeue --me` shows whether the job exists",
        )
    number, cluster = found.groups("")
    return Submitted(number, cluster, older.get(log_names.make_events_name(number)))


def _explain_refusal(exc: CommandError) -> StagerError:
    lines = exc.completed.stderr.splitlines()
    said = map(messages.parse_message, lines)
    errors = [message.text for message in said if message.kind == "error"]
    return messages.make_no_cluster_error(lines) or StagerError(
        f"Slurm rejected the batch job: {'; '.join(errors) or exc.message}",
        hint=messages.find_hint(" ".join(lines)),
        context=[] if errors else exc.context,
    )


def follow(
    submitted: Submitted,
    outcome: Outcome,
    on_event: OnEvent,
    note: Callable[[str], None],
    *,
    all_nodes: bool = False,
) -> None:
    """Wait for the job's end, and pass on what arrives; an interrupt ends only the wait."""
    log_dir = Path(outcome.job.log_dir)
    log = log_dir / log_names.make_events_name(submitted.job_id)
    events = _EventLog(log, submitted.older, outcome.job.bundle_id)
    output = BatchOutput(log_dir, submitted.job_id, all_nodes=all_nodes)

    def look() -> None:
        for record in events.more():
            if isinstance(record.event, JobEnds):
                for last in output.more(outcome.job.nodes, ended=True):
                    on_event(last)
            outcome.take(record)
            on_event(record)
        for shown in output.more(outcome.job.nodes):
            on_event(shown)

    try:
        _wait(submitted, look, note)
    except KeyboardInterrupt:
        note(f"job {submitted.job_id} keeps running; scancel {submitted.job_id} ends it")
        raise
    deadline = time.monotonic() + LATE_SECONDS
    look()  # whatever the clock says: this process may not have run for a while
    while outcome.result is None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        look()
    if not outcome.ok:
        _explain_end(submitted, outcome)


def _explain_end(submitted: Submitted, outcome: Outcome) -> None:
    try:  # scontrol knows an ended job for some minutes
        printed = submitted.ask("scontrol", "--oneliner", "show", "job", submitted.job_id)
    except CommandError:
        printed = ""
    facts = dict(re.findall(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)", printed))
    if outcome.result is None:
        raise _explain_missing_result(submitted, outcome.job, facts)
    ended_by = ENDED_BY_STATE.get(facts.get("JobState", ""))
    # The driver had to guess before the job was over; but of a cancelled one it knows more.
    if outcome.end_reason and ended_by and ended_by != Ending.CANCELLED:
        outcome.result = replace(outcome.end, ended_by=ended_by)


def _wait(submitted: Submitted, look: Callable[[], None], note: Callable[[str], None]) -> None:
    pause, told = POLL_SECONDS[0], ""
    asked = heard = time.monotonic()
    while True:
        time.sleep(LOOK_SECONDS)
        look()
        if time.monotonic() - asked < pause:
            continue
        asked, pause = time.monotonic(), min(pause * 1.3, POLL_SECONDS[1])
        state = _query_state(submitted)
        if state is not None:
            heard = asked
        elif asked - heard > SILENCE_SECONDS:
            raise StagerError(
                f"Slurm has not answered for {SILENCE_SECONDS // 60} minutes",
                hint=f"job {submitted.job_id} may still run: `squeue --jobs={submitted.job_id}`",
            )
        if state == "":
            return
        if state and state != told:
            told = state
            note(f"job {submitted.job_id}: {state}")


def _query_state(submitted: Submitted) -> str | None:
    try:
        printed = submitted.ask(
            "squeue", "--noheader", f"--jobs={submitted.job_id}", "--format=%T %r"
        )
    except CommandError as exc:
        return "" if "Invalid job id" in exc.completed.stderr else None
    lines = [line for line in printed.splitlines() if not line.startswith("CLUSTER:")]
    state, _, reason = (lines[0] if lines else "").strip().partition(" ")
    waits = state == "PENDING" and reason not in ("None", "")
    return f"{state.lower()} ({reason})" if waits else state.lower()


def _explain_missing_result(submitted: Submitted, job: Job, facts: Mapping[str, str]) -> JobError:
    what = f"job {submitted.job_id} left no result"
    _, said, why = facts.get("Comment", "").partition("stager: ")
    if said:  # its script puts there what it cannot write to a log
        why, _, hint = why.partition("; ")
        return JobError(f"{what}: {why}", hint=hint)
    state = facts.get("JobState", "").lower().replace("_", " ") or "gone from the queue"
    reason, code = facts.get("Reason", "None"), facts.get("ExitCode", "0:0").split(":")[0]
    status = "" if code == "0" else f"exit status {code}"
    words = filter(None, [state, "" if reason == "None" else reason, status])
    log = make_submitted_job(job, submitted.job_id).log
    where = f"its log is {log}" + ("" if log.exists() else f" on the node it ran on. {_SHARED}")
    return JobError(f"{what}: {', '.join(words)}", hint=where, context=read_last_lines(log, 15))


class _EventLog:
    """The driver's growing event log, without what an older job of the same number wrote."""

    def __init__(self, path: Path, older: os.stat_result | None, bundle_id: str) -> None:
        self._path, self._bundle_id = path, bundle_id
        self._offset = older.st_size if older else 0
        self._inode = older.st_ino if older else None
        self._is_ours = older is None

    def more(self) -> list[Record]:
        """Return the new events, without a line that is still being written."""
        try:
            with self._path.open("rb") as handle:
                inode = os.fstat(handle.fileno()).st_ino
                self._offset = self._offset if self._inode in (None, inode) else 0
                self._inode = inode
                handle.seek(self._offset)
                data = handle.read()
        except OSError:  # not there yet
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = (parse_event(line) for line in whole.splitlines())
        return [record for record in records if record is not None and self._is_own_record(record)]

    def _is_own_record(self, record: Record) -> bool:
        if isinstance(record.event, JobBegins):
            self._is_ours = record.event.bundle_id in ("", self._bundle_id)
        return self._is_ours
