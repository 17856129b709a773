"""A rank of a job that failed, run again on this machine by itself, in the job's environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bundle.launch.commands import choose_threads, must_use_cpus
from bundle.launch.program_variables import (
    RANK,
    USE_CPU,
    drop_schedulers,
    make_group_variables,
)
from bundle.launch.wrapper import is_own_frame
from bundle.node.machine import host_facts, kernel_driver
from bundle.protocol.codec import decode
from bundle.protocol.counts import format_count
from bundle.protocol.enumerations import Action, FailureClass, Launcher
from bundle.protocol.events import JobEnds
from bundle.protocol.messages import FailureRecord, PreflightAnswer
from bundle.redaction.secret_names import remove_secret_variables
from bundle.redaction.secrets import HIDDEN
from bundle.results import patterns
from bundle.system.own_program import read_source

from ..building.current_bundle import offline_root
from ..config.load import Config
from ..core.errors import BundleError, StagerError
from ..core.processes import run_attached
from ..core.store import Store
from ..diagnosis.diagnosis import diagnose
from ..diagnosis.failure import FirstFailure
from ..logs.job_files import JobFiles, KeptJob
from ..logs.job_record import JobRecord, read_events
from ..pack.bundle_file import ChosenBundle, find_by_id, layer_paths, open_bundle
from .driver import make_exec_argv
from .replayed_rank import BEGUN, REQUEST

# --- The rank to run, and the reasons to run none ------------------------------------------------

_OTHER_RANKS = "the ranks did not reach each other, and a replay has only one"
_SHOWS_NOTHING = {
    FailureClass.OUT_OF_MEMORY: "memory ran out, and this machine has another amount of it",
    FailureClass.KILLED: "its process was killed from outside",
    FailureClass.HANG: "ranks wait for each other, and a replay has only one",
    FailureClass.NODE_FAILURE: "its node failed",
    FailureClass.PREEMPTION: "Slurm ended the job",
    FailureClass.TIME_LIMIT: "Slurm ended the job",
    FailureClass.PORT: _OTHER_RANKS,
    FailureClass.RENDEZVOUS: _OTHER_RANKS,
    FailureClass.INTERFACE: _OTHER_RANKS,
    FailureClass.NAME_RESOLUTION: _OTHER_RANKS,
    FailureClass.DISK_FULL: "a disk of its node was full",
    FailureClass.DAMAGED_COPY: "a file on its node was damaged",
}
"""The failures that do not come from what one rank computes, with the reason."""
_CRASHES = frozenset(
    code
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS)
    for code in (-number, 128 + number)
)
"""The exit statuses of a process that compiled code ended: another run of it may end so, too."""


class ReplayedRank(NamedTuple):
    """A rank of a job, with what is known of its failure."""

    files: JobFiles
    job: KeptJob
    record: JobRecord
    rank: int
    result: JobEnds
    failure: FailureRecord | None
    """Its own failure in the job; None where it has not failed."""

    @property
    def world_size(self) -> int:
        """The number of the job's ranks."""
        return self.result.world_size or 1

    @property
    def ranks_here(self) -> int:
        """The number of ranks on each of its nodes."""
        nodes = len(self.record.nodes) - len(self.result.left_out)
        return max(1, self.world_size // max(1, nodes))


def choose_rank(files: JobFiles, asked: int | None, *, is_forced: bool) -> ReplayedRank:
    """Return the rank that is to run again: by default the one that failed first.

    Raises:
        StagerError: the job has no such rank, or it has not ended, or running it again would show
            nothing, unless ``is_forced``.
    """
    if not files.ours:
        raise StagerError(
            f"the logs in {files.folder} are not those of a job of stager's",
            hint="only of its own jobs it knows the environment and the command",
        )
    job, record = files.read_job(), read_events(files.events)
    _refuse_without_ranks(files, job, record)
    result = record.result or JobEnds(ok=False)
    if record.result is None and not is_forced:
        raise StagerError(
            f"job {files.job_id} has not ended, as far as its files tell",
            hint=f"`stager stacks {files.job_id}` shows where its ranks are; --anyway takes it as "
            "it is now",
        )
    first = diagnose(files, record).first
    rank = asked if asked is not None else None if first is None else first.rank
    if rank is None:
        what = "has not failed" if first is None else f"failed, but no rank of it: {first.cause}"
        raise StagerError(f"job {files.job_id} {what}", hint="--rank N chooses a rank to run")
    failure = next((each for each in result.failures or () if each.rank == rank), None)
    replayed = ReplayedRank(files, job, record, rank, result, failure)
    if rank >= replayed.world_size:
        ranks = format_count(replayed.world_size, "rank")
        raise StagerError(
            f"--rank {rank}: job {files.job_id} had {ranks}",
            hint=f"the last of them is --rank {replayed.world_size - 1}",
        )
    if first is not None and first.rank == rank and not is_forced:
        _refuse_futile(files, first)
    return replayed


def _refuse_without_ranks(files: JobFiles, job: KeptJob, record: JobRecord) -> None:
    why = ""
    if job.action is not Action.RUN or job.dry_run:
        why = f"was a {job.kind or 'job of an unknown kind'}: it started no ranks"
    elif not record.has_launched:
        why = "ended before its ranks were started"
    if why or not job.launch.command:
        raise StagerError(
            f"job {files.job_id} {why or 'has left no command'}",
            hint=f"`stager diagnose {files.job_id}` explains how it ended",
        )


def _refuse_futile(files: JobFiles, first: FirstFailure) -> None:
    if first.kind not in _SHOWS_NOTHING or first.exit_code in _CRASHES:
        return
    raise StagerError(
        f"a replay shows nothing of this failure ({first.kind}): {_SHOWS_NOTHING[first.kind]}",
        hint=f"`stager diagnose {files.job_id}` explains it; --anyway runs the rank nevertheless",
    )


def find_bundle(config: Config, job: KeptJob, named: Path | None) -> ChosenBundle:
    """Return the bundle of a job, with the project as it was then."""
    if named is not None:
        return ChosenBundle(path=named.absolute(), id=job.bundle_id)
    if Path(job.bundle).is_file():
        return ChosenBundle(path=Path(job.bundle), id=job.bundle_id)
    store = Store(offline_root(config))
    try:
        return find_by_id(store, job.bundle_id)
    except BundleError as exc:
        raise BundleError(
            f"the bundle of the job is no longer there: {job.bundle}, nor one with the id "
            f"{job.bundle_id} in {store.root}",
            hint="bring it back with `stager import FILE` from a machine that has it, or name the "
            "file with --bundle; `stager build` makes the same one of the same project and lock",
        ) from exc


# --- What is not the same as in the job ----------------------------------------------------------


def list_differences(replayed: ReplayedRank) -> Iterator[str]:
    """Yield what the user must know before it begins."""
    job, world = replayed.job, replayed.world_size
    if world > 1:
        yield (
            "no other rank takes part: from the first collective operation on, values are not "
            "those of the job"
        )
    if absent := [name for name in job.launch.pass_env if name not in os.environ]:
        yield f"the rank had {', '.join(absent)}, which is not set here"
    if any(HIDDEN in word for word in job.launch.command):
        yield f"a secret in its arguments was not kept: the program gets {HIDDEN}"
    if job.launch.container_image:
        yield f"its ranks ran in {job.launch.container_image}; this one runs without a container"
    answers = replayed.record.find_events(PreflightAnswer)
    if any(answer.gpus and answer.gpus.gpus for answer in answers) and not kernel_driver():
        yield "the job had GPUs, and this machine has none: what asks for one fails here"


def make_variables(replayed: ReplayedRank) -> dict[str, str]:
    """Return the variables that say which rank it is, as its launcher has set them."""
    job, here = replayed.job, replayed.ranks_here
    rank, failure = replayed.rank, replayed.failure
    local_rank = rank % here if failure is None else failure.local_rank
    backend = replayed.result.backend or job.launch.backend
    threads = choose_threads(job.launch.omp_num_threads, host_facts().cpus, here)
    variables = {
        **make_group_variables(replayed.world_size, here, rank // here, "127.0.0.1", 29500),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "STAGER_NODE": failure.node if failure else os.uname().nodename,
        "PYTORCH_DIST_BACKEND": backend,
        "OMP_NUM_THREADS": str(threads),
    }
    if job.launch.launcher == Launcher.TORCHRUN:
        variables |= {
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(replayed.world_size),
            "TORCHELASTIC_RUN_ID": f"{job.id}.0",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(job.launch.max_restarts),
        }
    if must_use_cpus(backend, {"": int(bool(kernel_driver()))}):
        variables[USE_CPU] = "true"
    return variables


# --- The working directory: files of the run directory, so that the job's own are not changed ----

_COPIED_BYTES = 512 << 20
_MOST_FILES = 10_000
_NAMED = 5
_SOURCES = (".py", ".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".txt", ".sh")
_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp")
_SKIPPED = frozenset((".git", "__pycache__", "node_modules"))


@dataclass
class _Copy:
    """The files of a run directory, as far as they are not the project's."""

    source: Path
    target: Path
    staged: Collection[str]
    """Files of the job's bundle, which count more than those of today."""
    outputs: Sequence[str]
    begun: float
    """The time when the job began: what has changed since is its output, but for sources."""
    room: int = _COPIED_BYTES
    files: int = _MOST_FILES
    changed: list[str] = field(default_factory=list)
    """Sources that have changed since."""
    linked: list[str] = field(default_factory=list)
    """Files that are too large to be copied."""
    left_out: list[str] = field(default_factory=list)

    def copy_all(self) -> None:
        """Copy what there is, as far as there is room."""
        for path, folders, files in os.walk(self.source):
            folder = Path(path)
            kept = [name for name in folders if not self._is_skipped(folder / name)]
            folders[:] = [name for name in kept if not (folder / name).is_symlink()]
            for name in (*files, *(name for name in kept if name not in folders)):
                inner = str((folder / name).relative_to(self.source))
                if inner in self.staged or patterns.is_wanted(inner, self.outputs):
                    continue
                self.files -= 1
                if self.files < 0:
                    self.left_out.append(inner)
                    return
                with suppress(OSError):  # it has been removed meanwhile, or may not be read
                    self._place(inner)

    def _is_skipped(self, path: Path) -> bool:
        is_output = patterns.is_wanted(str(path.relative_to(self.source)), self.outputs)
        return is_output or path.name in _SKIPPED or (path / "pyvenv.cfg").exists()

    def _place(self, inner: str) -> None:
        path, target = self.source / inner, self.target / inner
        status = path.stat()
        if status.st_mtime > self.begun:
            if path.suffix not in _SOURCES:
                return
            self.changed += [inner] if path.suffix == ".py" else []
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            target.symlink_to(path.parent / path.readlink())
        elif not path.is_file():
            return
        elif status.st_size <= self.room:
            shutil.copy2(path, target)
            self.room -= status.st_size
        elif path.suffix in _CHECKPOINTS:  # a program may write to it again
            self.left_out.append(inner)
        else:
            target.symlink_to(path)
            self.linked.append(inner)


def _fill_work_dir(replayed: ReplayedRank, bundle: ChosenBundle, tree: Path) -> _Copy:
    """Copy to the working directory what ranks found in theirs; the project follows later."""
    job, inner = replayed.job, replayed.job.run_subdir or ""
    staged: set[str] = set()
    if job.run_subdir is not None:
        with open_bundle(bundle.path, bundle.id) as opened:
            paths = [path.partition("/")[2] for path in layer_paths(opened, "project")]
        staged = {os.path.relpath(path, inner or ".") for path in paths}
    begun = replayed.record.begun or time.time()
    copy = _Copy(Path(job.run_dir), tree / inner, staged, job.outputs, begun)
    copy.target.mkdir(parents=True, exist_ok=True)
    if job.run_dir and copy.source.is_dir():
        copy.copy_all()
    return copy


def _describe_copy(copy: _Copy) -> Iterator[str]:
    yield f"working directory: {copy.target}; the files in {copy.source} are not changed"
    if not copy.source.is_dir():
        yield f"the job's run directory {copy.source} is not on this machine"
    for names, what in (
        (copy.changed, "changed since the job began, and not in its bundle:"),
        (copy.linked, "not copied, but linked, as they are large:"),
        (copy.left_out, "left out, as they are large or many:"),
    ):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            yield f"{what} {', '.join(names[:_NAMED])}{more}"


# --- The replay ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The end of a replay."""

    job_id: str
    rank: int
    exit_code: int
    """The program's exit status, as a shell has it."""
    same: bool | None
    """Whether it failed as it had in the job; null where it had not, or has not begun here."""
    verdict: str
    """The same in words."""
    expected: str
    """The failure of this rank in the job; empty for none."""
    failure: str
    """That of the replay; empty for none."""
    work_dir: str
    """The directory with what the program has written; empty where that is nothing."""


def replay(
    replayed: ReplayedRank,
    config: Config,
    bundle: ChosenBundle,
    say: Callable[[str], None],
    *,
    is_debugged: bool = False,
    is_quiet_stdout: bool = False,
) -> ReplayResult:
    """Run a rank to its end; what it prints goes where this process prints.

    Args:
        replayed: the rank.
        config: the settings; those of a signature, and of the node root, count.
        bundle: the job's bundle.
        say: shows a line for people.
        is_debugged: whether the debugger starts at the exception; it needs a terminal.
        is_quiet_stdout: whether the program's standard output goes to standard error.
    """
    place = Path(tempfile.mkdtemp(prefix=f"stager-replay-{replayed.files.job_id}-"))
    own, tree, is_needed = place / "rank", place / "work", False
    try:
        own.mkdir()
        copy = _fill_work_dir(replayed, bundle, tree)
        _write_programs(own)
        variables = {**make_variables(replayed), "STAGER_JOB_DIR": str(own)}
        if is_debugged:  # no remark in between that the process goes on
            variables["STAGER_LINGER_SECONDS"] = "1e9"
        request = {
            "variables": variables,
            "tree": None if replayed.job.run_subdir is None else str(tree),
            "work_dir": str(copy.target),
            "debug": is_debugged,
        }
        (own / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        _announce(replayed, copy, say)
        command = ["python", str(own / "replayed_rank.py"), *replayed.job.launch.command]
        code = run_attached(
            make_exec_argv(config, bundle, command),
            environment=_make_base(replayed.job),
            has_input=is_debugged,
            is_quiet=is_quiet_stdout,
        )
        result = _make_result(replayed, copy, own, code)
        is_needed = bool(result.work_dir)
    finally:
        shutil.rmtree(own if is_needed else place, ignore_errors=True)
    return result


def _write_programs(own: Path) -> None:
    rank_program = Path(__file__).with_name("replayed_rank.py")
    (own / "replayed_rank.py").write_bytes(rank_program.read_bytes())
    (own / "run_wrapper.py").write_bytes(read_source("launch.wrapper"))


def _announce(replayed: ReplayedRank, copy: _Copy, say: Callable[[str], None]) -> None:
    command = " ".join(replayed.job.launch.command[:2])
    where = f"rank {replayed.rank} of {replayed.world_size} of job {replayed.files.job_id}"
    say(f"replay: {where} on this machine: {command}")
    for line in (*list_differences(replayed), *_describe_copy(copy)):
        say(f"  {line}")


def _make_base(job: KeptJob) -> dict[str, str]:
    """Return the variables of this process that ranks would get, too."""
    kept = remove_secret_variables(os.environ, job.launch.pass_env)
    return {name: value for name, value in drop_schedulers(kept).items() if not RANK.match(name)}


def _has_written(work: Path, begun: Path) -> bool:
    """Return whether there is a file that the program has written, or changed."""
    with suppress(OSError):  # the program has not begun
        since = begun.stat().st_mtime
        for folder, _, files in os.walk(work):
            if any(Path(folder, name).lstat().st_mtime > since for name in files):
                return True
    return False


# --- The comparison of two failures --------------------------------------------------------------

_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+)')
_STAGED = re.compile(
    r"^.*/envs/[0-9a-f]{64}/(?:project/|lib/python[\d.]+/site-packages/)?"
    r"|^.*/stager-\d+/jobs/[^/]+\.work/"
)
_MISSING = re.compile(r"No such file or directory: '([^']+)'")


def describe_place(record: FailureRecord, folders: Sequence[str]) -> str:
    """Return exception and line, ``ValueError at train.py:12``, without directories of nodes."""
    frames = [line for line in record.lines if _FRAME.match(line)]
    own = [line for line in frames if is_own_frame(line)] or frames
    if not record.exception:
        return f"exit status {record.exit_code}"
    what = record.exception
    if what == "SystemExit":
        what = f"exit status {record.exit_code}"
    found = _FRAME.match(own[-1]) if own else None
    if found is None:
        return what
    file = _STAGED.sub("", found["file"])
    for folder in folders:
        file = file.removeprefix(f"{folder}/")
    return f"{what} at {file}:{found['line']}"


def _make_result(replayed: ReplayedRank, copy: _Copy, own: Path, code: int) -> ReplayResult:
    job, rank = replayed.job, replayed.rank
    inner = f"{job.run_subdir}/" if job.run_subdir else ""
    folders = [str(copy.target), job.run_dir]
    now = _read_failure(own, rank, code)
    expected = describe_place(replayed.failure, folders) if replayed.failure else ""
    failure = describe_place(now, folders) if now else ""
    # A script of the project is named from its root or from the run directory.
    names = [text.replace(f" at {inner}", " at ") for text in (expected, failure)]
    same = names[0] == names[1] if replayed.failure else None
    if not (own / BEGUN).exists():
        same, verdict = None, "the program was not started"
    elif same:
        verdict = f"the same failure: {failure}"
    elif not failure:
        verdict = f"it did not fail here{f'; in the job: {expected}' if expected else ''}"
    else:
        in_job = f"in the job: {expected}" if expected else "it did not fail in the job"
        verdict = f"another failure: {failure}; {in_job}"
    missing = _MISSING.search(now.message) if now else None
    if missing and not same:
        verdict += f"; {missing[1]} is not on this machine, or not in the working directory"
    return ReplayResult(
        job_id=replayed.files.job_id,
        rank=rank,
        exit_code=code if code >= 0 else 128 - code,
        same=same,
        verdict=verdict,
        expected=expected,
        failure=failure,
        work_dir=str(copy.target) if _has_written(copy.target, own / BEGUN) else "",
    )


def _read_failure(own: Path, rank: int, code: int) -> FailureRecord | None:
    if not code:
        return None
    try:
        text = (own / "failures" / f"{rank}.json").read_text(encoding="utf-8")
        return decode(FailureRecord, json.loads(text), strict=False)
    except (OSError, ValueError):
        return FailureRecord(node="", rank=rank, exit_code=code, time=time.time())
