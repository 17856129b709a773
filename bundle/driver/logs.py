"""The files of one job under the log directory, all written by the driver.

``order.<jobid>.tsv`` says when which log grew: a line for each piece that was appended, with the
time in seconds since the epoch on the driver's clock, the node, the task and the piece's bytes.
"""

from __future__ import annotations

import collections
import errno
import json
import os
import re
import stat
import time
from contextlib import suppress
from typing import IO

from ..protocol import log_names
from ..protocol.enumerations import Allocation
from ..protocol.events import JobBegins, Record, read_record
from ..protocol.job import Job, redact_job
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files, permissions, processes, signals
from ..system.own_program import read_source
from .transports.slurm_text import parse_submit_time

_ASK_SECONDS = 30.0
CLOCK_SECONDS = 60.0  # seconds by which the clocks of two hosts may differ


def cluster_name(job: Job) -> str:
    """Return the name of the job's cluster; empty where it is not Slurm's."""
    return os.environ.get("SLURM_CLUSTER_NAME", "") if job.allocation is Allocation.SLURM else ""


def move_older_files(job: Job) -> str:
    """Move the files of another job of this number to a folder; return it, empty for none.

    Slurm's numbers begin anew when it is set up again, and clusters may share a log directory.
    """
    if job.allocation is not Allocation.SLURM or job.attempt:
        return ""
    last = _last_begin(os.path.join(job.log_dir, log_names.make_events_name(job.id)))
    if last is None or not _is_of_another(last, job):
        return ""
    begun = time.strftime("%Y%m%d-%H%M%S", time.localtime(last.time or 0))
    folder = os.path.join(job.log_dir, f"older-{job.id}-{begun}")
    permissions.make_folder(folder, job.log_mode)
    own = [os.fstat(descriptor) for descriptor in (1, 2)]  # Slurm has begun the batch log
    for name in filter(_match_names(job.id).fullmatch, os.listdir(job.log_dir)):
        path = os.path.join(job.log_dir, name)
        if not any(os.path.samestat(os.lstat(path), one) for one in own):
            os.rename(path, os.path.join(folder, name))
    return folder


def _match_names(job_id: str) -> re.Pattern[str]:
    fixed = (
        *(log_names.make_events_name, log_names.make_order_name, log_names.make_preflight_name),
        *(log_names.make_job_name, log_names.make_wrapper_name, log_names.make_stacks_name),
        log_names.make_stacks_request_name,
    )
    names = [re.escape(make_name(job_id)) for make_name in fixed]
    return re.compile("|".join((*names, rf".+\.{re.escape(job_id)}\.(?:batch|.+\.\d+)\.out")))


def _last_begin(events: str) -> Record | None:
    last = None
    with suppress(OSError), open(events, "rb") as lines:
        for line in lines:
            if b'"event": "job"' in line:
                with suppress(ValueError, RecursionError):
                    last = read_record(json.loads(line)) or last
    return last


def _is_of_another(last: Record, job: Job) -> bool:
    """Return whether events are those of another job; one allocation may run several."""
    cluster, begun = cluster_name(job), last.event
    if cluster and isinstance(begun, JobBegins) and begun.cluster not in ("", cluster):
        return True
    env = {name: value for name, value in os.environ.items() if name != "SLURM_TIME_FORMAT"}
    try:
        argv = ["scontrol", "--oneliner", "show", "job", job.id]
        shown = processes.run(argv, timeout=_ASK_SECONDS, env=env).stdout
    except processes.ProcessError:
        return False
    return (last.time or 0.0) + CLOCK_SECONDS < (parse_submit_time(shown) or 0.0)


_FEWEST, _MOST = 8, 1 << 14  # open files; half of what a process may open

PieceWriter = tuple["str | int | None", ...]
"""The writer of a piece; a line that one has not ended yet is not joined with another's."""
DRIVER: PieceWriter = ("driver",)
_CUT: PieceWriter = ("cut",)  # nobody: nothing belongs to a line that a full disk cut


def format_attempt_mark(number: int) -> str:
    """Return the line of a log below which another attempt of the same job begins."""
    return f"{log_names.ATTEMPT_MARK}{number}: the ranks are started again\n"


class Logs:
    """Files by name; they are appended to, so a job that is started again goes on in them."""

    def __init__(self, job: Job) -> None:
        self.fault = ""  # the reason why something could not be kept
        self.disk_full = False  # true if that reason is a full disk
        self.lost = collections.Counter[tuple[str, int]]()  # bytes not kept, by node and task
        self._job = job
        self._files: collections.OrderedDict[str, IO[bytes]] = collections.OrderedDict()
        self._begun: set[str] = set()
        self._most_open = min(_MOST, max(_FEWEST, processes.get_open_file_limit() // 2))
        self._unended: dict[str, PieceWriter] = {}
        self._request: tuple[int, ...] = ()  # the file that last asked for stacks
        self._answered: tuple[int, ...] = ()  # it may not be possible to remove that one
        try:
            permissions.make_folder(job.log_dir, job.log_mode)
            self.older = move_older_files(job)  # their folder; empty for none
            self._open(log_names.make_events_name(job.id))
        except OSError as exc:
            values = {"why": files.error_text(exc)}
            problem = Problem(ProblemCode.LOG_DIR_UNWRITABLE, job.log_dir, values)
            raise NodeError(problem) from exc
        self._copy(log_names.make_wrapper_name(job.id), read_source("launch.wrapper"))
        text = json.dumps(redact_job(job).to_json(), indent=1)
        self._copy(log_names.make_job_name(job.id), text.encode() + b"\n")

    def event(self, line: str) -> None:
        """Keep one event."""
        self._append(log_names.make_events_name(self._job.id), line.encode() + b"\n")

    def output(self, node: str, task: int, data: bytes, writer: PieceWriter) -> None:
        """Append to a task's log, ``<jobname>.<jobid>.<node>.<task>.out``, and to the order."""
        name = self._log(node, task)
        size = len(data)
        is_unended = name in self._unended
        if self._unended.pop(name, writer) != writer:
            data = b"\n" + data
        written = self._append(name, data)
        if written:
            is_unended = data[written - 1 : written] != b"\n"
        if is_unended:
            self._unended[name] = writer if written == len(data) else _CUT
        if writer != DRIVER:
            self.lost[node, task] += min(size, len(data) - written)
        if written:
            piece = f"{time.time():.3f}\t{node}\t{task}\t{written}\n"
            self._append(log_names.make_order_name(self._job.id), piece.encode())

    def begin(self, node: str, task: int) -> None:
        """Create a task's log, empty unless it exists."""
        name = self._log(node, task)
        if name not in self._begun:
            self._append(name, b"")

    def preflight(self, lines: list[str]) -> None:
        """Write ``preflight.<jobid>.txt``."""
        text = "".join(f"{line}\n" for line in lines)
        data = text.encode(errors="backslashreplace")  # a name may be no text
        self._append(log_names.make_preflight_name(self._job.id), data)

    def stacks(self, text: str) -> None:
        """Write ``stacks.<jobid>.json``, in the place of an earlier one."""
        self._copy(log_names.make_stacks_name(self._job.id), text.encode())

    def is_stacks_requested(self) -> bool:
        """Tell whether this user asks for the stacks, with ``stacks.<jobid>.request``."""
        name = log_names.make_stacks_request_name(self._job.id)
        try:
            # A client of NFS looks again at a directory that it opens; else it may believe for
            # acdirmax, a minute, that the file is not there: see "close-to-open" in nfs(5).
            with os.scandir(self._job.log_dir):
                found = os.lstat(os.path.join(self._job.log_dir, name))
            owner = os.stat(self._job.log_dir).st_uid  # some servers make every file another's
        except OSError:
            return False
        self._request = found.st_ino, found.st_mtime_ns
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), owner)
        return is_own and self._request != self._answered

    def drop_stacks_request(self) -> None:
        """Remove the file that asked for stacks: they are written, or there are none."""
        self._answered = self._request
        if self._request:
            name = log_names.make_stacks_request_name(self._job.id)
            with suppress(OSError):
                os.unlink(os.path.join(self._job.log_dir, name))

    def _log(self, node: str, task: int) -> str:
        return log_names.make_rank_log_name(self._job.name, self._job.id, node, task)

    def _copy(self, name: str, data: bytes) -> None:
        path, new = (os.path.join(self._job.log_dir, one) for one in (name, f".{name}.new"))
        try:
            with self._open_with_mode(os.path.basename(new), "wb") as handle:
                handle.write(data)
            os.replace(new, path)
        except OSError as exc:
            self._note_fault(name, exc)
            with suppress(OSError):
                os.unlink(new)

    def _note_fault(self, name: str, exc: OSError) -> None:
        self.fault = f"{name}: {exc.strerror or exc}"
        self.disk_full = files.is_full(exc)

    def _open(self, name: str) -> IO[bytes]:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name]
        while len(self._files) >= self._most_open:
            self._close_oldest()
        while True:
            try:
                # Unbuffered: readers see all there is; a failed write leaves nothing behind.
                handle = self._files[name] = self._open_with_mode(name, "ab", buffering=0)
                self._begun.add(name)
                return handle
            except OSError as exc:
                if exc.errno not in (errno.EMFILE, errno.ENFILE) or not self._files:
                    raise
                self._close_oldest()

    def _close_oldest(self) -> None:
        self._files.popitem(last=False)[1].close()

    def _open_with_mode(self, name: str, mode: str, buffering: int = -1) -> IO[bytes]:
        path = os.path.join(self._job.log_dir, name)
        return open(path, mode, buffering, opener=permissions.make_opener(self._job.log_mode))

    def _append(self, name: str, data: bytes) -> int:
        view = memoryview(data)
        try:
            with signals.defer_signals():  # half of a line would be left
                handle = self._open(name)
                while view:
                    view = view[handle.write(view) :]
        except OSError as exc:
            self._note_fault(name, exc)
        return len(data) - len(view)
