"""The files of one job: those that stager's driver writes, or whatever logs a directory holds."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import StagerError

DEFAULT_LOG_DIR = "~/slurm_logs"

_EVENTS = re.compile(r"events\.(.+)\.jsonl$")
_BATCH = re.compile(r".+\.(\d+)\.batch\.out$")
_FOREIGN = re.compile(
    r"^(?:.*\.)?\d+(?:_\d+)?\.(?P<node>[A-Za-z][\w-]*)\.(?P<rank>\d+)\.(?:out|err|log|txt)$"
)
"""Slurm's ``%x.%j.%N.%t.out``."""
_RANK = re.compile(r"rank[_.-]?(\d+)", re.I)
_NODE = re.compile(r"(?:^|[._/-])((?!rank|task|attempt|slurm|job|log)[a-z]+[a-z-]*\d+)(?=[._/-]|$)")
_NO_LOGS = {
    ".pt", ".pth", ".bin", ".safetensors", ".npz", ".npy", ".ckpt", ".pkl", ".parquet", ".arrow",
    ".png", ".jpg", ".gz", ".zst", ".xz", ".zip", ".tar", ".whl", ".pyc", ".py", ".so", ".html",
}  # fmt: skip
_BINARY_PROBE = 4096


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One file of what somebody wrote."""

    path: Path
    """Where it is."""
    node: str = ""
    """The node whose output it has; empty where its name does not tell."""
    rank: int | None = None
    """The rank, or Slurm's task; None where its name does not tell."""
    own: bool = False
    """Whether nothing else than that rank (and torchrun) writes there."""


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """The files of one job."""

    folder: Path
    """Where they are."""
    job_id: str
    """The job's number; empty for a directory of somebody else's logs."""
    logs: tuple[LogFile, ...]
    """What was written, sorted by rank and name."""

    @property
    def ours(self) -> bool:
        """Whether stager's driver wrote them."""
        return bool(self.job_id) and (self.events.exists() or self.job.exists())

    @property
    def events(self) -> Path:
        """The driver's events, one JSON object a line."""
        return self.folder / f"events.{self.job_id}.jsonl"

    @property
    def order(self) -> Path:
        """When which log grew, see :mod:`bundle.driver.logs`."""
        return self.folder / f"order.{self.job_id}.tsv"

    @property
    def preflight(self) -> Path:
        """What was found out about each node before anything was sent."""
        return self.folder / f"preflight.{self.job_id}.txt"

    @property
    def job(self) -> Path:
        """The job as the driver was told it."""
        return self.folder / f"job.{self.job_id}.json"

    @property
    def wrapper(self) -> Path:
        """The run wrapper."""
        return self.folder / f"run_wrapper.{self.job_id}.py"


def default_folder(asked: Path | None) -> Path:
    """Return where a job's logs are: the directory that is named, else the usual one."""
    return (asked or Path(DEFAULT_LOG_DIR)).expanduser()


def find(wanted: str | None, log_dir: Path) -> JobFiles:
    """The files of a job.

    Args:
        wanted: a job's number, a directory, or a file; None for the newest job.
        log_dir: where jobs leave their logs.

    Raises:
        StagerError: there is no such job or directory, or nothing to read in it.
    """
    named = None if wanted is None else _mode(Path(wanted).expanduser())
    if wanted and named is not None and stat.S_ISDIR(named):
        return _in_folder(Path(wanted).expanduser())
    if wanted and named is not None and stat.S_ISREG(named):
        path = Path(wanted).expanduser()
        _readable([path])
        return JobFiles(folder=path.parent, job_id="", logs=(foreign(path, path.parent),))
    jobs = _jobs(log_dir)
    if wanted is None and jobs:
        return of_job(log_dir, jobs[-1])
    if wanted is not None and wanted in jobs:
        return of_job(log_dir, wanted)
    what = "any job" if wanted is None else f"job {wanted}"
    known = f"the jobs there are {', '.join(jobs[-8:])}" if jobs else "no job has left any there"
    raise StagerError(
        f"there are no logs of {what} in {log_dir}",
        hint=f"{known}; --log-dir names another place, and a directory of logs can be given too",
    )


def _in_folder(folder: Path) -> JobFiles:
    jobs = _jobs(folder)
    if jobs:
        return of_job(folder, jobs[-1])
    logs = [foreign(path, folder) for path in _below(folder) if _is_log(path)]
    if not logs:
        raise StagerError(
            f"there are no logs in {folder}", hint="give the directory that holds what ranks wrote"
        )
    return JobFiles(folder=folder, job_id="", logs=tuple(logs))


def _jobs(folder: Path) -> list[str]:
    """The jobs that have left files, the one that began last at the end."""
    found: dict[str, float] = {}
    for path in _entries(folder):
        name = _EVENTS.match(path.name) or _BATCH.match(path.name)
        if name and _is_regular(path):
            found[name[1]] = max(found.get(name[1], 0.0), _changed(path))
    return sorted(found, key=lambda job: (found[job], len(job), job))


def newest_change(folder: Path) -> float:
    """When a job has last told something, in seconds since the epoch; 0.0 for none.

    The empty file by which a local job claims its number tells nothing yet.
    """
    named = [
        path for path in _entries(folder) if _EVENTS.match(path.name) or _BATCH.match(path.name)
    ]
    return max((_changed(path) for path in named if _size(path)), default=0.0)


def of_job(folder: Path, job_id: str) -> JobFiles:
    """The files of a job of stager's; it may have left none."""
    # Greedy: a job's name may have its number in it, and so may a task be called.
    of_rank = re.compile(rf".+\.{re.escape(job_id)}\.(?P<node>.+?)\.(?P<task>\d+)\.out")
    batch = re.compile(rf".+\.{re.escape(job_id)}\.batch\.out")
    logs = []
    for path in _entries(folder):
        if not _is_regular(path):
            continue  # a pipe or a device would never end
        if named := of_rank.fullmatch(path.name):
            logs.append(LogFile(path=path, node=named["node"], rank=int(named["task"]), own=True))
        elif batch.fullmatch(path.name):
            logs.append(LogFile(path=path))
    _readable([log.path for log in logs])
    return JobFiles(folder=folder, job_id=job_id, logs=_sorted(logs))


def foreign(path: Path, folder: Path) -> LogFile:
    """A file of somebody else's launcher; its name may tell node and rank."""
    shown = path.relative_to(folder).as_posix()
    if named := _FOREIGN.match(path.name):
        return LogFile(path=path, node=named["node"], rank=int(named["rank"]))
    rank, node = _RANK.search(shown), _NODE.search(shown)
    return LogFile(path=path, node=node[1] if node else "", rank=int(rank[1]) if rank else None)


def _is_log(path: Path) -> bool:
    if path.suffix in _NO_LOGS or path.name.startswith(".") or not _is_regular(path):
        return False
    try:
        with path.open("rb") as handle:
            text = handle.read(_BINARY_PROBE).decode(errors="replace")
    except OSError:
        return False
    # A few may be in a log: PyTorch ends what it says of a bus error with a zero byte.
    return (text.count("\0") + text.count("\ufffd")) * 20 <= len(text)


def _readable(paths: Sequence[Path]) -> None:
    """Refuse files of which none can be read: nothing found in them would look like all is well."""
    if paths and not any(os.access(path, os.R_OK) for path in paths):
        raise StagerError(
            f"{paths[0]} cannot be read" + (f", nor can {len(paths) - 1} more" * (len(paths) > 1)),
            hint="look at the owner and the mode of the logs",
        )


def _below(folder: Path) -> list[Path]:
    """All files below a directory; what cannot be entered has none."""
    found = []
    for here, _, names in os.walk(folder):
        found += [Path(here, name) for name in names]
    return sorted(found)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return None


def _is_regular(path: Path) -> bool:
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def _sorted(logs: Iterable[LogFile]) -> tuple[LogFile, ...]:
    return tuple(
        sorted(logs, key=lambda one: (-1 if one.rank is None else one.rank, one.path.name))
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
