"""The files of one job: those of stager's driver, or the logs of a directory."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path

from bundle.protocol import log_names
from bundle.protocol.codec import decode
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Action, LogMode
from bundle.regex import compile_lazily

from ..core.errors import StagerError
from ..core.files import expand_home, read_bytes


@dataclass(frozen=True, kw_only=True)
class KeptLaunch:
    """The way the ranks were started."""

    command: tuple[str, ...] = ()
    launcher: str = ""
    backend: str = ""  # the backend of torch.distributed; ``auto`` where the driver chose it
    pass_env: tuple[str, ...] = ()  # names of secret variables that the ranks got
    container_image: str = ""
    omp_num_threads: int | None = None
    nproc_per_node: int | None = None  # None for the number of GPUs
    max_restarts: int = 0
    watch: bool = False
    """Whether its driver can find out where each rank is; no older version's can."""


@dataclass(frozen=True, kw_only=True)
class KeptJob:
    """A job as its driver got it; what is not known is empty."""

    id: str = ""
    name: str = ""
    action: Action | None = None
    dry_run: bool = False
    bundle: str = ""
    bundle_id: str = ""
    nodes: tuple[str, ...] = ()
    run_dir: str = ""
    run_subdir: str | None = None  # the run directory's path in the project; None if it is outside
    outputs: tuple[str, ...] = ()
    log_mode: LogMode = LogMode.PRIVATE
    launch: KeptLaunch = field(default_factory=KeptLaunch)

    @property
    def is_plan(self) -> bool:
        """True if it neither verified nor ran anything."""
        return self.dry_run or self.action is Action.CLEAN

    @property
    def kind(self) -> str:
        """Its kind in words; empty if unknown."""
        if self.action is None:
            return ""
        return f"dry run of {self.action.value}" if self.dry_run else self.action.value


def parse_kept_job(content: bytes) -> KeptJob:
    """Read ``job.json``; what is damaged says nothing."""
    try:
        return decode(KeptJob, json.loads(content.decode("utf-8", "replace")), strict=False)
    except (ValueError, RecursionError):
        return KeptJob()


def format_time(seconds: float) -> str:
    """Return a time in this machine's zone, to the second; empty for one that cannot be."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


# --- The files of one job: those of stager's driver, or whatever logs a directory holds ----------

DEFAULT_LOG_DIR = "~/slurm_logs"

_EVENTS = compile_lazily(r"events\.(.+)\.jsonl$")
_NUMBER = compile_lazily(r"\d[\w.+-]*")  # a job's number, also of an array or a heterogeneous job
_BATCH = compile_lazily(r".+\.(\d+)\.batch\.out$")
_HOST = (
    r"(?!(?:rank|task|attempt|step|try|restart|run|seed|fold|stage|epoch|part|array|retry|exp|trial|"
    r"node-?rank|local|proc|process|version|v|log|err|out|lr|bs)[_-]?\d)[A-Za-z][A-Za-z-]*\d[\w-]*"
)
_NODE_AND_TASK = compile_lazily(
    r"(?:.*\.)?(?P<job>\d+)(?:_\d+)?\.(?P<node>[A-Za-z][\w-]*)\.(?P<task>\d+)\.(?:out|err|log|txt)"
    rf"|(?:.*[._-])?(?P<number>\d+)(?:_\d+)?[_-](?P<host>{_HOST})[_-](?P<rank>\d+)\.(?:out|err|log|txt)"
)
"""Slurm's ``%x.%j.%N.%t.out`` and ``%x-%j-%N-%t.out``."""
_BEHIND_JOB = compile_lazily(
    rf"(?:.*[._-])?\d{{2,}}(?:_\d+)?[._-](?P<node>{_HOST})\.(?:out|err|log|txt)"
)
_HOST_WORD = r"(?:node|nid|host|compute|cn|gpu|cpu|dgx|hgx|hpc|algo)"
_KNOWN_HOST = compile_lazily(
    rf"(?:^|[._/-])((?:(?:worker|{_HOST_WORD})-?)*{_HOST_WORD}(?:-?0\d+|\d+|-\d{{1,2}})|ip(?:-\d{{1,3}}){{4}})(?=[._/]|$)"
)
"""Words that only hosts are called by, with a number that no job has."""
_RANK = compile_lazily(r"(?<![a-z])(?P<of>local|node)?[_.-]?rank[_.-]?(?P<number>\d+)", re.I)
_OF_TORCHRUN = compile_lazily(
    r"(?:^|/)attempt_(?P<attempt>\d+)/(?P<local>\d+)/(?:stdout|stderr|error)\.(?:log|json)$"
)
"""The folders of ``torchrun --log-dir``."""
_JOB_NUMBERS = (
    compile_lazily(r"slurm[_-](\d+)"),
    compile_lazily(r"\.(?:o|e|po|pe)(\d+)(?:[.-]\d+)?$"),  # PBS, Grid Engine
    compile_lazily(r"(\d+)_\d+_\d*_?log\.(?:out|err)$"),  # submitit
    compile_lazily(r"\bjob[_.-]?(\d+)"),
)
_NAMED_BY_SCHEDULER = compile_lazily(r"\.(?:out|err|o|e)$")
_LONG_NUMBER = compile_lazily(r"(?:^|[._-])(\d{3,})(?=[._-]|$)")
_DATE = compile_lazily(
    r"(?<!\d)20\d\d[-_.]?[01]\d[-_.]?[0-3]\d(?:[-_T.]\d{2}[-_.]?\d\d[-_.]?\d\d)?(?!\d)"
)
_JOB_FOLDER = compile_lazily(r"(?:job|slurm)?[_.-]?(\d{3,})(?:_\d+)?")
_NO_LOGS = {
    ".pt", ".pth", ".bin", ".safetensors", ".npz", ".npy", ".ckpt", ".pkl", ".parquet", ".arrow",
    ".png", ".jpg", ".gz", ".zst", ".xz", ".zip", ".tar", ".whl", ".pyc", ".py", ".so", ".html",
}  # fmt: skip
_APART = 60.0  # seconds between the files of two jobs from which on their times tell them apart
_BINARY_PROBE = 4096
_LISTED = 8


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One log; what its name does not tell is None or empty."""

    path: Path
    node: str = ""
    rank: int | None = None  # the rank, or Slurm's task
    local_rank: int | None = None
    attempt: int | None = None  # the number of torchrun's restarts before it
    job: str = ""
    own: bool = False  # whether only that rank (and torchrun) writes there


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """The files of one job."""

    folder: Path
    job_id: str  # the job's number; empty for a directory of somebody else's logs
    logs: tuple[LogFile, ...] = ()
    other_jobs: tuple[str, ...] = ()
    """The numbers of somebody else's older jobs, whose logs in the same directory are left out."""

    @property
    def ours(self) -> bool:
        """True if stager's driver wrote them."""
        return bool(self.job_id) and (self.events.exists() or self.job.exists())

    def read_job(self) -> KeptJob:
        """Return the job's description; empty where there is none."""
        try:
            return parse_kept_job(read_bytes(self.job)) if self.job_id else KeptJob()
        except OSError:
            return KeptJob()

    def describe(self, *, with_project: bool = True) -> str:
        """Return the job in a line: its number, action, project and time."""
        job = self.read_job()
        what = job.action.value if job.action else ""
        of_project = f" of {job.name}" if job.name and with_project else ""
        changed = _get_mtime(self.job) or _get_mtime(self.events)
        when = format_time(changed)[: len("2026-11-22 05:21")] if changed else ""
        parts = (self.job_id, what + of_project, "dry run" if job.dry_run else "", when)
        return ", ".join(filter(None, parts))

    @property
    def events(self) -> Path:
        """The driver's events, one JSON object a line."""
        return self.folder / log_names.make_events_name(self.job_id)

    @property
    def order(self) -> Path:
        """The order in which logs grew, see :mod:`bundle.driver.logs`."""
        return self.folder / log_names.make_order_name(self.job_id)

    @property
    def preflight(self) -> Path:
        """The findings about each node before anything was sent."""
        return self.folder / log_names.make_preflight_name(self.job_id)

    @property
    def job(self) -> Path:
        """The job's description, as the driver got it."""
        return self.folder / log_names.make_job_name(self.job_id)

    @property
    def wrapper(self) -> Path:
        """The run wrapper."""
        return self.folder / log_names.make_wrapper_name(self.job_id)

    @property
    def stacks(self) -> Path:
        """The places of all ranks when they were last asked."""
        return self.folder / log_names.make_stacks_name(self.job_id)

    @property
    def stacks_request(self) -> Path:
        """A file that asks the driver for them, and that it removes once they are written."""
        return self.folder / log_names.make_stacks_request_name(self.job_id)


def choose_log_dir(asked: Path | None) -> Path:
    """Return where a job's logs are: the directory that is named, else the usual one."""
    return expand_home(asked or DEFAULT_LOG_DIR)


def find_job_files(wanted: str | None, log_dir: Path) -> JobFiles:
    """Return the files of a job: by its number, a directory, or a file; None is the newest job."""
    if wanted and (files := _find_at_path(expand_home(wanted))):
        return files
    jobs = _list_jobs(log_dir)
    job_id = _find_newest_job(log_dir, jobs) if wanted is None else wanted
    if job_id in jobs:
        return list_job_files(log_dir, job_id)
    foreign = [] if wanted is None or jobs else _list_foreign_logs(log_dir)
    if logs := [log for log in foreign if log.job == wanted]:
        return JobFiles(folder=log_dir, job_id="", logs=tuple(_fill_in_ranks(logs)))
    raise _explain_missing_job(wanted, log_dir, jobs)


def _find_newest_job(folder: Path, jobs: Sequence[str]) -> str:
    active = (files.job_id for files, job in _list_last_jobs(folder, jobs) if not job.is_plan)
    return next(active, jobs[-1] if jobs else "")


def find_last_job(project: str, folder: Path) -> JobFiles | None:
    """Return the last job of a project that verified or ran something, without its logs."""
    last = _list_last_jobs(folder, _list_jobs(folder))
    own = (files for files, job in last if job.name == project and not job.is_plan)
    return next(own, None)


def _list_last_jobs(folder: Path, jobs: Sequence[str]) -> Iterator[tuple[JobFiles, KeptJob]]:
    for job_id in reversed(jobs):
        files = JobFiles(folder=folder, job_id=job_id)
        yield files, files.read_job()


def _explain_missing_job(wanted: str | None, log_dir: Path, jobs: Sequence[str]) -> StagerError:
    context = [f"the jobs in {log_dir}, the last active first:"] if jobs else []
    for job_id in reversed(jobs[-_LISTED:]):
        context.append(f"  {JobFiles(folder=log_dir, job_id=job_id).describe()}")
    what = f"there are no logs of {f'job {wanted}' if wanted else 'any job'} in {log_dir}"
    if wanted is not None and not _NUMBER.fullmatch(wanted):
        is_there = _stat(expand_home(wanted)) is not None
        what = f"{wanted!r} is no log" if is_there else f"there is no directory {wanted}"
    hint = "give a job's number, a directory of logs, or a log; --log-dir names another place"
    return StagerError(what, hint=hint, context=context)


def _find_at_path(path: Path) -> JobFiles | None:
    if _is_regular(path):
        _refuse_unreadable([path])
        return JobFiles(folder=path.parent, job_id="", logs=(parse_log_name(path, path.parent),))
    found = _stat(path)
    if found is None or not stat.S_ISDIR(found.st_mode):
        return None
    if jobs := _list_jobs(path):
        return list_job_files(path, _find_newest_job(path, jobs))
    logs = _list_foreign_logs(path)
    if not logs:
        raise StagerError(
            f"there are no logs in {path}", hint="give the directory that holds what ranks wrote"
        )
    others, newest = _select_newest_job(logs)
    logs = _fill_in_ranks(newest)
    return JobFiles(folder=path, job_id="", logs=tuple(logs), other_jobs=tuple(others))


def _list_foreign_logs(folder: Path) -> list[LogFile]:
    paths = sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    logs = [parse_log_name(path, folder) for path in paths if _is_log(path)]
    if any(log.job for log in logs):
        return logs
    return [replace(log, job=_find_job_of_folders(log.path.relative_to(folder))) for log in logs]


def _select_newest_job(logs: Sequence[LogFile]) -> tuple[list[str], list[LogFile]]:
    """Separate older jobs by number, which Slurm and PBS increase: copies lose file times."""
    changed: dict[str, list[float]] = {}
    for log in logs:
        changed.setdefault(log.job, []).append(_get_mtime(log.path))
    jobs = sorted(changed.keys() - {""}, key=int)
    if len(jobs) < 2:
        return [], list(logs)
    *others, newest = jobs
    before = max(max(changed[job]) for job in others)
    # Where the times do not tell the jobs apart, files without a number may be of the newest.
    limit = before if min(changed[newest]) > before + _APART else -1.0
    own = (log for log in logs if log.job in ("", newest))
    return others, [log for log in own if log.job or _get_mtime(log.path) > limit]


def _fill_in_ranks(logs: Sequence[LogFile]) -> list[LogFile]:
    by_torchrun = [log for log in logs if log.local_rank is not None and log.attempt is not None]
    if len({log.path.parents[2] for log in by_torchrun}) != 1:
        return list(logs)
    return [log if log.local_rank is None else replace(log, rank=log.local_rank) for log in logs]


def _list_jobs(folder: Path) -> list[str]:
    changed: dict[str, float] = {}
    for path in _list_entries(folder):
        if (name := _find_job_name(path)) and _is_regular(path):
            changed[name] = max(changed.get(name, 0.0), _get_mtime(path))
    return sorted(changed, key=lambda job: (changed[job], len(job), job))


def _find_job_name(path: Path) -> str:
    name = _EVENTS.match(path.name) or _BATCH.match(path.name)
    return name[1] if name else ""


def find_newest_change(folder: Path) -> float:
    """Return when a job has last written (not claimed) a file, in seconds; 0.0 for none."""
    found = [_stat(path) for path in _list_entries(folder) if _find_job_name(path)]
    return max((status.st_mtime for status in found if status and status.st_size), default=0.0)


def list_job_files(folder: Path, job_id: str) -> JobFiles:
    """Return the files of a job of stager's; it may have left none."""
    # Greedy: a job's name may have its number in it, and so may a task be called.
    name = re.compile(rf".+\.{re.escape(job_id)}\.(?:batch|(?P<node>.+?)\.(?P<task>\d+))\.out")
    logs = []
    for path in _list_entries(folder):
        named = name.fullmatch(path.name)
        if named is None or not _is_regular(path):  # a pipe or a device would never end
            continue
        node, task = named.groups()
        log = LogFile(path=path)
        logs.append(replace(log, node=node, rank=int(task), own=True) if task else log)
    _refuse_unreadable([log.path for log in logs])
    logs.sort(key=lambda log: (-1 if log.rank is None else log.rank, log.path.name))
    return JobFiles(folder=folder, job_id=job_id, logs=tuple(logs))


def parse_log_name(path: Path, folder: Path) -> LogFile:
    """Return a log of somebody else's launcher; its name may tell its job, node and rank."""
    shown = path.relative_to(folder).as_posix()
    if named := _NODE_AND_TASK.fullmatch(path.name):
        job, node, task = named.groups()[:3] if named[1] else named.groups()[3:]
        return LogFile(path=path, job=job, node=node, rank=int(task))
    job = "" if _OF_TORCHRUN.search(shown) else _find_job_number(path.name)
    log = LogFile(path=path, job=job, node=_find_host(shown, job))
    if of_torchrun := _OF_TORCHRUN.search(path.as_posix()):
        attempt, local_rank = map(int, of_torchrun.groups())
        return replace(log, attempt=attempt, local_rank=local_rank)
    for rank in _RANK.finditer(shown):
        of, number = rank.groups()
        if of is None:
            return replace(log, rank=int(number))
        if of.lower() == "local":
            log = replace(log, local_rank=int(number))
    return log


def _find_host(shown: str, job: str) -> str:
    name = shown.rpartition("/")[2]
    if after_job := _BEHIND_JOB.fullmatch(name):
        return after_job[1]
    # What stands before the number of a job is its name.
    place = shown[: -len(name)] if job and job in name else shown
    known = _KNOWN_HOST.search(place)
    return known[1] if known else ""


def _find_job_number(name: str) -> str:
    for pattern in _JOB_NUMBERS:
        if named := pattern.search(name):
            return named[1]
    if not _NAMED_BY_SCHEDULER.search(name):
        return ""
    numbers: list[str] = _LONG_NUMBER.findall(_DATE.sub("", name))
    return max(reversed(numbers), key=len, default="")


def _find_job_of_folders(shown: Path) -> str:
    folders = _OF_TORCHRUN.sub("/-", shown.as_posix()).split("/")[:-1]
    of_folders = (_JOB_FOLDER.fullmatch(folder) for folder in folders if not _DATE.search(folder))
    return next((folder[1] for folder in of_folders if folder), "")


def _is_log(path: Path) -> bool:
    if path.suffix in _NO_LOGS or path.name.startswith(".") or not _is_regular(path):
        return False
    try:
        with path.open("rb") as handle:
            text = handle.read(_BINARY_PROBE).decode(errors="replace")
    except OSError:
        return False
    # A log may have a few: PyTorch ends its message about a bus error with a zero byte.
    return (text.count("\0") + text.count("\ufffd")) * 20 <= len(text)


def _refuse_unreadable(paths: Sequence[Path]) -> None:
    if paths and not any(os.access(path, os.R_OK) for path in paths):
        # No findings would look like no failure.
        raise StagerError(
            f"{paths[0]} cannot be read", hint="look at the owner and the mode of the logs"
        )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _is_regular(path: Path) -> bool:
    found = _stat(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def _get_mtime(path: Path) -> float:
    found = _stat(path)
    return 0.0 if found is None else found.st_mtime


def _list_entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


# --- The place of a file that a command makes about a job: never one of the job's own files ------


def resolve_output(path: Path, files: JobFiles, what: str) -> Path:
    """Return where a file is written: the target of a link, but no device and no own file."""
    place = Path(os.path.realpath(path))  # unlike resolve(), it takes a loop of links as it is
    of_driver = (files.events, files.job, files.order, files.stacks)
    own = [*(log.path for log in files.logs), *of_driver]
    if place.exists() and not place.is_file():
        reason = f"is not a regular file, so {what} cannot be written there"
    elif str(place) in map(os.path.realpath, own):
        reason = f"is one of the files that {what} is made from, and would be lost"
    else:
        return place
    raise StagerError(f"{path} {reason}", hint="name another one with --output")
