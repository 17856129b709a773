"""A rank of a job that failed, run again on this machine by itself, in the job's environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from bundle.driver.findings import shorten_names
from bundle.launch.commands import choose_threads, must_use_cpus
from bundle.launch.program_variables import RANK, USE_CPU, drop_schedulers, make_group_variables
from bundle.launch.wrapper import is_own_file
from bundle.node.machine import host_facts, kernel_driver
from bundle.protocol.codec import decode
from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Action, FailureClass, Launcher
from bundle.protocol.events import JobEnds
from bundle.protocol.messages import FailureRecord, PreflightAnswer
from bundle.redaction.secret_names import remove_secret_variables
from bundle.redaction.secrets import HIDDEN
from bundle.results.patterns import is_wanted
from bundle.system.own_program import read_source
from bundle.system.processes import waited_for
from bundle.system.signals import replace_handlers

from ..building.current_bundle import offline_root
from ..config.load import Config
from ..core.errors import BundleError, StagerError
from ..core.processes import run_attached
from ..core.store import Store
from ..diagnosis.diagnosis import diagnose
from ..diagnosis.failure import FirstFailure, name_file
from ..diagnosis.process_exits import find_signal
from ..logs.job_files import JobFiles, KeptJob
from ..logs.job_record import JobRecord
from ..pack.bundle_file import ChosenBundle, find_by_id, layer_paths, open_bundle
from .driver import make_exec_argv
from .replayed_rank import BEGUN, REQUEST
from .stacks import read_own_job

_OF_ONE_RANK = (
    *(FailureClass.PYTHON_ERROR, FailureClass.MISSING_ASSET, FailureClass.MISSING_MODULE),
    *(FailureClass.ENVIRONMENT, FailureClass.UNKNOWN),
)
"""The failures that may come from what one rank does by itself."""
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS)
"""Signals by which compiled code ends a process: another run of it may end so, too."""


class ReplayedRank(NamedTuple):
    """A rank of a job."""

    files: JobFiles
    job: KeptJob
    record: JobRecord
    result: JobEnds
    rank: int

    @property
    def failure(self) -> FailureRecord | None:
        """Its failure in the job; None where it has not failed by itself."""
        return next((each for each in self.result.failures or () if each.rank == self.rank), None)

    @property
    def world_size(self) -> int:
        """The number of the job's ranks."""
        planned = len(self.record.nodes) * (self.job.launch.nproc_per_node or 1)
        return self.result.world_size or max(1, planned)

    @property
    def ranks_here(self) -> int:
        """The number of ranks on each of its nodes."""
        nodes = len(self.record.nodes) - len(self.result.left_out)
        return max(1, self.world_size // max(1, nodes))


def choose_rank(files: JobFiles, asked: int | None, *, is_forced: bool) -> ReplayedRank:
    """Return the rank to run again: by default the one that failed first.

    Refused are ranks that are not there and, unless ``is_forced``, those that would show nothing.
    """
    job, record = read_own_job(files, "only of those are the environment and the command known")
    _refuse_without_ranks(files, job, record)
    first = diagnose(files, record).first
    rank = asked if asked is not None or first is None else first.rank
    if not is_forced:
        _refuse_futile(files, record, first if first and first.rank == rank else None)
    if rank is None:
        what = "has not failed" if first is None else f"failed, but no rank of it: {first.cause}"
        raise StagerError(f"job {files.job_id} {what}", hint="--rank N chooses a rank to run")
    replayed = ReplayedRank(files, job, record, record.result or JobEnds(ok=False), rank)
    if rank >= replayed.world_size:
        ranks, last = format_count(replayed.world_size, "rank"), replayed.world_size - 1
        raise StagerError(
            f"--rank {rank}: job {files.job_id} had {ranks}",
            hint=f"the last of them is --rank {last}",
        )
    return replayed


def _refuse_without_ranks(files: JobFiles, job: KeptJob, record: JobRecord) -> None:
    if job.action is not Action.RUN or job.dry_run:
        why = f"was a {job.kind or 'job of an unknown kind'}: it started no ranks"
    elif not (record.has_launched and job.launch.command):
        why = "has left no command, or ended before its ranks were started"
    else:
        return
    hint = f"`stager diagnose {files.job_id}` explains how it ended"
    raise StagerError(f"job {files.job_id} {why}", hint=hint)


def _refuse_futile(files: JobFiles, record: JobRecord, own: FirstFailure | None) -> None:
    """Refuse a rank of a job that runs, and one whose own failure would not come again."""
    if record.result is None:
        raise StagerError(
            f"job {files.job_id} has not ended, as far as its files tell",
            hint=f"`stager stacks {files.job_id}` shows its ranks; --anyway takes it as it is now",
        )
    if own is None or own.rank is None or own.kind in _OF_ONE_RANK:
        return
    if find_signal(own.exit_code or 0) not in _CRASHES:
        raise StagerError(
            f"a replay shows nothing of this failure ({own.kind}): one rank does not cause it",
            hint=f"`stager diagnose {files.job_id}` explains it; --anyway runs the rank",
        )


def find_bundle(config: Config, job: KeptJob, named: Path | None) -> ChosenBundle:
    """Return the bundle of a job, with the project as it was then."""
    path = Path(named or job.bundle)
    if named or path.is_file():
        return ChosenBundle(path=path.absolute(), id=job.bundle_id)
    store = Store(offline_root(config))
    try:
        return find_by_id(store, job.bundle_id)
    except BundleError as exc:
        raise BundleError(
            f"the bundle of the job is no longer there: {path}, with the id {job.bundle_id}",
            hint="bring it back with `stager import FILE`, or name the file with --bundle; "
            "`stager build` makes the same one of the same project and lock",
        ) from exc


# --- What is the same as in the job, and what is not ---------------------------------------------


def make_variables(replayed: ReplayedRank) -> dict[str, str]:
    """Return the variables that say which rank it is, as its launcher has set them."""
    launch, failure = replayed.job.launch, replayed.failure
    rank, world, here = replayed.rank, replayed.world_size, replayed.ranks_here
    backend = replayed.result.backend or launch.backend
    variables: dict[str, object] = {
        **make_group_variables(world, here, rank // here, "127.0.0.1", 29500),
        "RANK": rank,
        "LOCAL_RANK": failure.local_rank if failure else rank % here,
        "STAGER_NODE": failure.node if failure else os.uname().nodename,
        "PYTORCH_DIST_BACKEND": backend,
        "OMP_NUM_THREADS": choose_threads(launch.omp_num_threads, host_facts().cpus, here),
    }
    if launch.launcher == Launcher.TORCHRUN:
        variables |= {"ROLE_NAME": "default", "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world}
        variables |= {"TORCHELASTIC_RUN_ID": f"{replayed.job.id}.0"}
        variables |= {"TORCHELASTIC_RESTART_COUNT": 0}
        variables |= {"TORCHELASTIC_MAX_RESTARTS": launch.max_restarts}
    if must_use_cpus(backend, {"": int(bool(kernel_driver()))}):
        variables[USE_CPU] = "true"
    return {name: str(value) for name, value in variables.items()}


def _make_base(job: KeptJob) -> dict[str, str]:
    """Return the variables of this process that ranks would get, too."""
    kept = remove_secret_variables(os.environ, job.launch.pass_env)
    return {name: value for name, value in drop_schedulers(kept).items() if not RANK.match(name)}


def list_differences(replayed: ReplayedRank) -> Iterator[str]:
    """Yield what the user must know before it begins."""
    launch = replayed.job.launch
    if replayed.world_size > 1:
        until = "from the first collective operation on, values are not those of the job"
        yield f"no other rank takes part: {until}"
    if absent := [name for name in launch.pass_env if name not in os.environ]:
        yield f"the rank had {', '.join(absent)}, which is not set here"
    if HIDDEN in " ".join(launch.command):
        yield f"a secret in its arguments was not kept: the program gets {HIDDEN}"
    if launch.container_image:
        yield f"its ranks ran in {launch.container_image}; this one runs without a container"
    answers = replayed.record.find_events(PreflightAnswer)
    if any(answer.gpus for answer in answers) and not kernel_driver():
        yield "the job had GPUs, and this machine has none: what asks for one fails here"


# --- The working directory: files of the run directory, so that the job's own are not changed ----

_COPIED_BYTES, _MOST_FILES = 512 << 20, 10_000
_SOURCES = (".py", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".ini")
_INPUTS = (*_SOURCES, ".json", ".txt")  # the last two may be outputs as well
_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp")
_SKIPPED = ("**/.git", "**/__pycache__", "**/node_modules")
_CHANGED = "changed since the job began, and not in its bundle"
_LINKED = "not copied, but linked, as they are large, so do not let the program change them"
_LEFT_OUT = "left out, as they are large or many"


def copy_run_dir(
    source: Path, target: Path, begun: float, is_copied: Callable[[str], bool]
) -> dict[str, list[str]]:
    """Copy what was there when the job began; return the files to know of, by the reason."""
    known, room = defaultdict[str, list[str]](list), _COPIED_BYTES
    found = list(islice(_list_files(source, is_copied), _MOST_FILES + 1))  # the target may be in it
    for number, inner in enumerate(found):
        if number == _MOST_FILES:
            known[_LEFT_OUT].append(inner)
            break
        path, place = source / inner, target / inner
        with suppress(OSError):  # it has been removed meanwhile, or may not be read
            status = path.lstat()
            is_new = status.st_mtime > begun
            if is_new and path.suffix not in _INPUTS:
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                place.symlink_to(path.parent / path.readlink())
            elif status.st_size <= room:
                shutil.copy2(path, place)
                room -= status.st_size
            elif path.suffix in _CHECKPOINTS:  # a program may write to it again
                known[_LEFT_OUT].append(inner)
            else:
                place.symlink_to(path)
                known[_LINKED].append(inner)
            if is_new and path.suffix in _SOURCES:
                known[_CHANGED].append(inner)
    return known


def _list_files(source: Path, is_copied: Callable[[str], bool]) -> Iterator[str]:
    """Yield the files in a directory, and links to others, but none of an environment."""
    for name, folders, files in os.walk(source):
        folder = Path(name).relative_to(source)
        if folder.parts and "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = [each for each in folders if is_copied(str(folder / each))]
        links = [each for each in folders if Path(name, each).is_symlink()]
        yield from filter(is_copied, (str(folder / each) for each in (*files, *links)))


def _fill_work_dir(replayed: ReplayedRank, bundle: ChosenBundle, work: Path) -> Iterator[str]:
    """Copy the run directory; the project follows later. Yield what the user must know of it."""
    job, source = replayed.job, Path(replayed.job.run_dir)
    yield f"working directory: {work}, with copies of the files in {source}"
    if not job.run_dir or not source.is_dir():
        yield f"the job's run directory {source} is not on this machine"
        return
    staged = set[str]()  # these count more than what is there today
    if job.run_subdir is not None:
        with open_bundle(bundle.path, bundle.id) as opened:
            paths = [path.partition("/")[2] for path in layer_paths(opened, "project")]
        staged = {os.path.relpath(path, job.run_subdir or ".") for path in paths}
    begun, left_out = replayed.record.begun or time.time(), (*job.outputs, *_SKIPPED)

    def is_copied(path: str) -> bool:
        return path not in staged and not is_wanted(path, left_out)

    known = copy_run_dir(source, work, begun, is_copied)
    yield from (f"{what}: {shorten_names(names)}" for what, names in known.items())


# --- The replay, and the comparison of its failure with that in the job --------------------------

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+)')


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The end of a replay."""

    job_id: str
    rank: int
    exit_code: int  # of the program, as a shell has it
    same: bool | None  # it failed as in the job; null where it had not, or has not begun here
    verdict: str
    expected: str  # the failure of this rank in the job; empty for none
    failure: str
    work_dir: str  # what the program has written is there; empty where that is nothing


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

    ``is_debugged`` starts the debugger at the exception, which needs a terminal;
    ``is_quiet_stdout`` sends the program's standard output to standard error.
    """
    job = replayed.job
    place = Path(tempfile.mkdtemp(prefix=f"stager-replay-{replayed.files.job_id}-"))
    own, tree, is_needed = place / "rank", place / "work", False
    work = tree / (job.run_subdir or "")
    try:
        own.mkdir()
        work.mkdir(parents=True)
        where = f"rank {replayed.rank} of {replayed.world_size} of job {replayed.files.job_id}"
        say(f"replay: {where} on this machine: {' '.join(job.launch.command[:2])}")
        for line in (*list_differences(replayed), *_fill_work_dir(replayed, bundle, work)):
            say(f"  {line}")
        variables = {**make_variables(replayed), "STAGER_JOB_DIR": str(own)}
        if is_debugged:  # no remark in between that the process goes on
            variables["STAGER_LINGER_SECONDS"] = "1e9"
        goal = "" if job.run_subdir is None else str(tree)
        request = json.dumps([variables, goal, str(work), is_debugged])
        (own / REQUEST).write_text(request, encoding="utf-8")
        program = own / "replayed_rank.py"
        shutil.copyfile(Path(__file__).with_name(program.name), program)
        (own / "run_wrapper.py").write_bytes(read_source("launch.wrapper"))
        argv = make_exec_argv(config, bundle, ["python", str(program), *job.launch.command])
        with replace_handlers([signal.SIGTERM, signal.SIGHUP], _make_ender()):
            code = run_attached(
                argv,
                environment=_make_base(job),
                has_input=is_debugged,
                is_quiet=is_quiet_stdout,
            )
        result = _make_result(replayed, work, own, code)
        is_needed = bool(result.work_dir)
    finally:
        shutil.rmtree(own if is_needed else place, ignore_errors=True)
    return result


def _make_ender() -> Callable[[int, object], None]:
    """Return a handler that ends the program first: only Ctrl-C reaches it by itself."""
    told = set[int]()

    def end(number: int, _frame: object) -> None:
        if not waited_for:
            raise KeyboardInterrupt
        for pid in tuple(waited_for):
            with suppress(ProcessLookupError):  # one that did not end is killed
                os.kill(pid, signal.SIGKILL if pid in told else number)
            told.add(pid)

    return end


def _make_result(replayed: ReplayedRank, work: Path, own: Path, code: int) -> ReplayResult:
    now = _read_failure(own, replayed.rank, code)
    # A script of the project is named from its root or from the run directory.
    folders = (replayed.job.run_subdir or "", str(work), replayed.job.run_dir)
    expected, failure = (
        _describe_place(record, folders) if record else "" for record in (replayed.failure, now)
    )
    has_begun = (own / BEGUN).exists()
    verdict = _compare(expected, failure) if has_begun else "the program was not started"
    is_interrupted = find_signal(code) in _INTERRUPTS
    is_same = None if is_interrupted or not (expected and has_begun) else failure == expected
    return ReplayResult(
        job_id=replayed.files.job_id,
        rank=replayed.rank,
        exit_code=code if code >= 0 else 128 - code,
        same=is_same,
        verdict="it was interrupted" if is_interrupted else verdict,
        expected=expected,
        failure=failure,
        work_dir=str(work) if _has_written(work, own / BEGUN) else "",
    )


def _read_failure(own: Path, rank: int, code: int) -> FailureRecord | None:
    if not code:
        return None
    try:
        record = json.loads((own / "failures" / f"{rank}.json").read_bytes())
        return decode(FailureRecord, record, strict=False)
    except (OSError, ValueError):
        return FailureRecord(node="", rank=rank, exit_code=code, time=time.time())


def _describe_place(record: FailureRecord, folders: Sequence[str]) -> str:
    """Return exception and line, ``ValueError at train.py:12``, without directories of nodes."""
    what = record.exception
    if what in ("", "SystemExit"):
        what = f"exit status {record.exit_code}"
    frames = [found.groups() for found in map(_FRAME.match, record.lines) if found]
    own = [frame for frame in frames if is_own_file(frame[0])] or frames
    if not record.exception or not own:
        return what
    file, line = own[-1]
    return f"{what} at {name_file(file, folders)}:{line}"


def _compare(expected: str, failure: str) -> str:
    if failure and failure == expected:
        return f"the same failure: {failure}"
    here = f"another failure: {failure}" if failure else "it did not fail here"
    in_job = f"in the job: {expected}" if expected else "it did not fail in the job"
    return f"{here}; {in_job}" if failure or expected else here


def _has_written(work: Path, begun: Path) -> bool:
    """Return whether there is a file that the program has written, or changed."""
    with suppress(OSError):  # the program has not begun
        since = begun.stat().st_mtime
        files = (Path(folder, name) for folder, _, names in os.walk(work) for name in names)
        return any(file.lstat().st_mtime > since for file in files)
    return False
