"""The diagnosis of a job: its first failure, the reason, the evidence, and advice."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from bundle.driver.transports.slurm_text import ENDED_BY_STATE
from bundle.format.manifest import Manifest
from bundle.launch.rank_results import CAUSE
from bundle.protocol.codec import encode
from bundle.protocol.enumerations import Action, FailureClass
from bundle.protocol.events import Event, JobEnds
from bundle.protocol.messages import (
    Answer,
    Departure,
    FailureRecord,
    LaunchAnswer,
    Lingering,
    Vanished,
)
from bundle.protocol.problem import Problem
from bundle.redaction.secret_names import is_secret

from ..catalogue.catalogue import LineRole, LineTells
from ..config import load as settings
from ..core.errors import StagerError
from ..logs.job_files import JobFiles, KeptJob, LogFile
from ..logs.job_record import JobRecord, Refused, parse_event, read_events
from ..logs.lines import Clock, number_lines, read_last_lines
from ..slurm import messages
from . import verdict
from .failure import Diagnosis, Evidence, FirstFailure
from .hits import Hit, Scanned, make_prefilter, scan_log
from .log_verdict import LOG_TELLS, LogVerdict, describe_hang, find_absent_ranks, judge_logs
from .process_exits import Exit, Torchruns, find_torchruns, has_waited_in_vain, weigh_failure

# --- Failures of several ranks compared, without what only tells one place from another ----------

# Each begins where the one before it cannot go on: else a long word is read again from each letter.
_ROOT = r"(?<![^\s'\"`(<\[=:,])[^\s'\"`(<\[=:,]*/stager-\d+"
_VARIABLE = (
    (re.compile(_ROOT + r"/jobs/[^/\s'\"]+"), "JOB"),
    (re.compile(_ROOT + r"(?=/|\b)"), "ROOT"),
    (re.compile(r"\b0x[0-9a-fA-F]{4,}\b"), "POINTER"),
    (re.compile(r"\[(?=[0-9a-fA-F]*:)[0-9a-fA-F:.]{1,45}\](?::\d+)?"), "ADDRESS"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "ADDRESS"),
    (re.compile(r"\b(local_rank|rank|pid|process|cuda|GPU)([ :=#]{0,2})\d+\b", re.I), r"\1\2N"),
)
"""Parts that differ from rank to rank though the failure is the same, and their stand-ins."""


def make_comparable(record: FailureRecord) -> tuple[str, str]:
    """Return the exception and the message of a rank's failure, equal for equal failures.

    The node root, the job's directory, addresses, and the numbers of the rank and its process are
    each rank's own. With an exit status counts what was printed last.
    """
    text = record.message
    if record.exception == "SystemExit":  # a status alone is no error that two may have in common
        text += "".join(record.lines[-1:])
    for pattern, replacement in _VARIABLE:
        text = pattern.sub(replacement, text)
    if record.node:
        text = re.sub(rf"(?<![\w.-]){re.escape(record.node)}(?![\w-])", "NODE", text)
    return record.exception, text


# --- The failure of a rank that reads a variable which is withheld, as its name is a secret's ----

_MISSING = re.compile(r"KeyError: '([A-Za-z_][A-Za-z0-9_]*)'")
_OF_ENVIRONMENT = re.compile(r"\benviron\b|<frozen os>|/os\.py\"")
"""Lines of a traceback through ``os.environ``; a key of any other mapping may have such a name."""


def explain_withheld_variable(first: FirstFailure, job: KeptJob) -> FirstFailure:
    """Return a failure, with its reason and remedy if a withheld variable has caused it."""
    name = _missing_variable(first)
    if not is_secret(name):
        return first
    if name in job.launch.pass_env:
        return replace(
            first,
            meaning=f"{name} is named in pass-env, but was not set where the job was started",
            hint=f"set {name} in the shell that starts the job, and start it again",
        )
    return replace(
        first,
        meaning=f"{name} was withheld from the ranks, as its name is that of a secret",
        hint=f"pass it to the ranks: stager run --pass-env {name}, or pass-env = "
        f'["{name}"] below [launch] in stager.toml',
    )


def _missing_variable(first: FirstFailure) -> str:
    """Return the variable that ``os.environ`` lacked; empty for any other failure."""
    missing = _MISSING.fullmatch(first.cause)
    if missing is None or not any(_OF_ENVIRONMENT.search(line) for line in first.lines):
        return ""
    return missing[1]


# --- A module that a rank did not find: where the project has it, or the package to add ----------

_NAME = re.compile(r"No module named '?([\w.]+)")
_ENTRY = "module-missing"
"""The catalogue's entry for such a failure."""
_PACKAGES = {
    **{"sklearn": "scikit-learn", "cv2": "opencv-python-headless", "PIL": "pillow"},
    **{"yaml": "pyyaml", "skimage": "scikit-image", "bs4": "beautifulsoup4"},
    **{"dotenv": "python-dotenv", "dateutil": "python-dateutil", "attr": "attrs"},
    **{"hydra": "hydra-core", "pkg_resources": "setuptools", "distutils": "setuptools"},
}
"""Packages that are not called like the module they are known for."""


def explain_missing_module(first: FirstFailure, job: KeptJob) -> FirstFailure:
    """Return a failure, with its reason and remedy if a module was missing."""
    found = _NAME.search(first.cause)
    if first.entry != _ENTRY or found is None:
        return first
    from ..pack.bundle_file import layer_paths, open_bundle

    try:
        with open_bundle(Path(job.bundle), job.bundle_id) as bundle:
            paths = {path.partition("/")[2] for path in layer_paths(bundle, "project")}
            manifest = bundle.manifest
    except (StagerError, OSError, ValueError):  # it was removed, or replaced by a newer one
        return first
    root = _project_folder(Path(job.run_dir))
    reason = _explain_other_folder(found[1], paths) or _explain_left_out(found[1], root)
    meaning, hint = reason or _explain_missing_package(found[1], manifest, root)
    return replace(first, meaning=meaning, hint=hint)


def _project_folder(run_dir: Path) -> Path:
    with suppress(StagerError):
        source = settings.find(run_dir)
        return source.parent if source is not None else run_dir
    return run_dir


def _explain_other_folder(module: str, paths: Collection[str]) -> tuple[str, str] | None:
    """Return meaning and hint where the project in the bundle has the module in another folder."""
    place = module.replace(".", "/")
    ends = (f"/{place}.py", f"/{place}/__init__.py")
    found = min((path for path in paths if path.endswith(ends)), key=len, default="")
    folder = found[: found.rfind(f"/{place}")]
    if not found or (folder == "src" and "src/__init__.py" not in paths):
        return None
    name = f"{folder.replace('/', '.')}.{module}"
    return (
        f"the project has {module} in {folder}, where Python does not look: it looks in the "
        "script's folder, the project's folder, and its src",
        f"import it as {name}; or move {found} to one of these folders; or add its folder to "
        "sys.path in the script",
    )


def _explain_left_out(module: str, root: Path) -> tuple[str, str] | None:
    """Return meaning and hint where the project's folder has the module, and the bundle not."""
    place = module.replace(".", "/")
    for name in (f"{place}.py", f"{place}/", f"src/{place}.py", f"src/{place}/"):
        if (root / name).exists():
            return (
                f"{name} is in {root}, but not in the bundle",
                "project.exclude or a .gitignore leaves it out: to take it back, add "
                f'"!/{name}" to project.exclude',
            )
    return None


def _find_requirements(root: Path) -> str:
    """Return where the requirements of a project are to be named."""
    with suppress(StagerError):
        config = settings.load(root)
        named = config.environment.requirements
        files = [name for name in named if (config.root / name).is_file()]
        return next(iter(files), f"environment.requirements in {config.source.name}")
    return "environment.requirements"


def _explain_missing_package(module: str, manifest: Manifest, root: Path) -> tuple[str, str]:
    """Return meaning and hint where no file of the project is the module."""
    top = module.partition(".")[0]
    package = _PACKAGES.get(top, top)
    there = {layer.name: layer.version for layer in manifest.layers if layer.kind == "wheel"}
    version = there.get(canonicalize_name(package))
    where = _find_requirements(root)
    if version is not None:
        return (
            f"{package} is in the bundle in version {version}, which has no module {module}",
            f"name a version of {package} that has it in {where}, then `stager build`",
        )
    if top in sys.stdlib_module_names and top not in _PACKAGES:
        return (
            f"{top} is a part of Python's standard library that the nodes' Python lacks",
            'let the bundle bring a Python: environment.interpreter = "bundled"',
        )
    add = f"add {package} to {where}"
    if (root / "uv.lock").is_file():
        add = f"`uv add {package}`"
    named = "" if top in _PACKAGES else f" (if the package of {top} has another name, that one)"
    return (
        f"no package in the bundle has the module {top}, nor has the project",
        f"{add}{named}, then `stager build`",
    )


# --- The lines that show a failure: lines of logs, else of the files that the job's driver keeps

_MOST = 5
"""Lines that are shown of one failure."""


def find_evidence(
    first: FirstFailure, verdict: LogVerdict, seen: Scanned, files: JobFiles
) -> list[Evidence]:
    """Return the lines that show a failure."""
    hits = _find_in_logs(first, verdict, seen)
    if hits:
        return [_line(hit) for hit in hits]
    if not files.job_id:
        return []
    of_driver = _find_in_preflight(first, files) or _find_in_events(first, files)
    return [] if of_driver is None else [of_driver]


def list_weak_evidence(verdict: LogVerdict) -> tuple[Evidence, ...]:
    """Return errors that programs have printed and survived, where nothing shows a failure."""
    return tuple(map(_line, verdict.weak))


def _line(hit: Hit | Exit) -> Evidence:
    return Evidence(path=hit.log.path, number=hit.number, text=hit.text)


def _find_in_logs(first: FirstFailure, verdict: LogVerdict, seen: Scanned) -> Sequence[Hit | Exit]:
    """Return the failure's own line, else the first of its entry and those of the verdict."""
    own = [hit for hit in seen.hits if _is_own(hit, first)]
    if own:
        return own[-1:]
    of_entry = [hit for hit in seen.hits if _is_of_entry(hit, first)][:1]
    if not _agrees(verdict, first):
        return of_entry
    others = [hit for hit in verdict.shown if hit not in of_entry]
    return [*of_entry, *others][:_MOST]


def _is_own(hit: Hit, first: FirstFailure) -> bool:
    if hit.rank != first.rank or not hit.text:
        return False
    if hit.text not in (line.strip() for line in first.lines):
        return hit.text in first.cause
    return hit.entry.role == LineRole.PRIMARY or hit.entry.name == first.entry


def _is_of_entry(hit: Hit, first: FirstFailure) -> bool:
    if not first.entry or hit.entry.name != first.entry:
        return False
    return hit.log.node in ("", first.node)


def _agrees(verdict: LogVerdict, first: FirstFailure) -> bool:
    """Return whether the logs alone show the same failure, and of the same rank."""
    if first.kind == FailureClass.HANG:
        return True
    if verdict.first is None or verdict.first.kind != first.kind:
        return False
    return first.exit_code is None or verdict.first.rank in (None, first.rank)


def _find_in_preflight(first: FirstFailure, files: JobFiles) -> Evidence | None:
    for number, line in number_lines(files.preflight):
        node, _, problem = line.partition(" problem: ")
        if node == first.node and _is_first_line(problem, first.problem):
            return Evidence(path=files.preflight, number=number, text=line)
    return None


def _find_in_events(first: FirstFailure, files: JobFiles) -> Evidence | None:
    """Return what no log shows: a killed rank, a failed node, an end by Slurm."""
    for number, line in number_lines(files.events):
        record = parse_event(line)
        for text in () if record is None else _parts_of_event(record.event, first):
            if text in line:
                return Evidence(path=files.events, number=number, text=text)
    return None


def _parts_of_event(event: Event, first: FirstFailure) -> Iterator[str]:
    """Yield parts of an event's line that may show a failure, the most telling first."""
    if isinstance(event, JobEnds) and not event.ok and event.ended_by and first.exit_code is None:
        yield _members({"ended_by": event.ended_by})
    if isinstance(event, (LaunchAnswer, JobEnds)):
        processes: list[Departure | Vanished | Lingering]
        processes = [*(event.left or ()), *(event.vanished or ()), *(event.lingering or ())]
        for process in processes:
            if process.rank == first.rank and not first.exit_code:
                yield _members(encode(process))
        for record in event.failures or ():
            if (record.rank, record.exit_code) == (first.rank, first.exit_code):
                yield _members({"exit_code": record.exit_code})
    if _has_launcher_status(event, first):
        yield _members({"exit_code": first.exit_code})
    if first.problem is not None and first.problem in _problems_of_event(event, first.node):
        yield _members(first.problem.to_json())


def _has_launcher_status(event: Event, first: FirstFailure) -> bool:
    if not isinstance(event, Answer) or not first.exit_code:
        return False
    return (event.node, event.exit_code) == (first.node, first.exit_code)


def _problems_of_event(event: Event, node: str) -> Sequence[Problem]:
    if isinstance(event, JobEnds):
        return event.problems.get(node, ())
    return event.problems if isinstance(event, Answer) and event.node == node else ()


def _members(value: Mapping[str, object]) -> str:
    """Return an object as it appears in a line of events, without its braces."""
    return json.dumps(value)[1:-1]


def _is_first_line(text: str, problem: Problem | None) -> bool:
    return problem is not None and text == str(problem).partition("\n")[0]


# --- The diagnosis of a job: its first failure, the reason, and advice, from the files it has left

_LAST_WORDS = 6
"""Lines that are shown of a rank that hangs."""
_SILENT = (
    "it has printed nothing: let it say how far it is, or have it dump its stack with "
    "faulthandler.dump_traceback_later(60); look for code that only some ranks run"
)

_AFTER_SLURM = (FailureClass.UNKNOWN, FailureClass.KILLED, FailureClass.HANG)
"""The classes of failures that may follow from Slurm's end of a job."""


@dataclass(frozen=True, kw_only=True)
class _Case:
    files: JobFiles
    """The job's files, or a directory of somebody else's logs."""
    record: JobRecord
    """The driver's events; empty where there was no such driver."""
    result: JobEnds
    """What of its result can be used; an empty one of a job without a result."""
    launched: Torchruns
    """The logs that are of whole torchruns."""
    seen: Scanned
    """The hits of all logs."""
    nodes: dict[int, str]
    """The node of each rank, as far as it is known."""


def diagnose(files: JobFiles, record: JobRecord | None = None) -> Diagnosis:
    """Find the first failure of a job.

    The driver's result counts most: the records of the ranks, the problems of the nodes, and the
    way Slurm ended the job. Logs explain it, and stand in for it where there was no such driver.

    Args:
        files: the job's files.
        record: its events; None to read them from its files.
    """
    if record is None:
        record = read_events(files.events) if files.job_id else JobRecord()
    case = _gather(files, record)
    restarts = max((log.attempt or 0 for log in files.logs), default=0)
    in_logs = judge_logs(case.seen, case.nodes, restarts)
    ok = None if record.result is None else record.result.ok
    first = verdict.judge_result(case.result, files.job_id)
    if first is not None:
        first, in_logs = _explain_failure(case, first, in_logs)
    elif ok is None:
        ok, first = _judge_without_result(case, in_logs)
    diagnosis = Diagnosis(
        job_id=files.job_id,
        folder=files.folder,
        ok=ok,
        first=first,
        interrupted=case.result.interrupted,
        read=len(files.logs),
        before_launch=_has_failed_before_launch(case),
    )
    if first is None:
        return replace(diagnosis, evidence=() if ok else list_weak_evidence(in_logs))
    if files.ours:
        job = files.read_job()
        first = explain_withheld_variable(first, job)
        first = explain_missing_module(first, job)
    same_failure = _same_failure(first, case.result)
    return replace(
        diagnosis,
        first=_add_last_lines(first, files),
        entry=first.entry,
        evidence=tuple(find_evidence(first, in_logs, case.seen, files)),
        same_failure=same_failure,
        consequences=_consequences(first, in_logs, case.result, same_failure),
        missing=in_logs.missing if first.kind == FailureClass.HANG else (),
    )


def diagnose_refused(refused: Refused, log_dir: Path) -> Diagnosis:
    """Return the diagnosis of a command that failed before its job began."""
    first = FirstFailure(
        node="",
        kind=FailureClass.ENVIRONMENT,
        cause=refused.message,
        hint=refused.hint,
        lines=refused.context,
        time=refused.time,
    )
    return Diagnosis(
        job_id="",
        folder=log_dir,
        ok=False,
        first=first,
        before_launch=refused.command == "run",
        command=refused.command,
    )


def _gather(files: JobFiles, record: JobRecord) -> _Case:
    result = verdict.select_usable_result(record.result or JobEnds(ok=False))
    files = replace(files, logs=tuple(_select_last_attempt(files.logs)))
    launched = find_torchruns(files.logs)
    nodes = _nodes_of_ranks(files, record, result) | launched.nodes(files.logs)
    return _Case(
        files=files,
        record=record,
        result=result,
        launched=launched,
        seen=launched.add_ranks(_scan(files, launched)),
        nodes=nodes,
    )


def _select_last_attempt(logs: Sequence[LogFile]) -> Iterator[LogFile]:
    last: dict[Path, int] = {}
    for log in logs:
        if log.attempt is not None:
            last[log.path.parents[2]] = max(log.attempt, last.get(log.path.parents[2], 0))
    for log in logs:
        if log.attempt is None or log.attempt == last[log.path.parents[2]]:
            yield log


def _has_failed_before_launch(case: _Case) -> bool:
    if case.record.begun is None or case.record.has_launched:
        return False
    return case.files.read_job().action is Action.RUN


def _scan(files: JobFiles, launched: Torchruns) -> Scanned:
    clock = Clock(files)
    logs = [launched.drop_task(log) for log in files.logs]
    if files.job_id and files.preflight.exists() and not files.events.exists():
        logs.append(LogFile(path=files.preflight))
    texts = make_prefilter()
    return Scanned.joined(scan_log(log, clock, texts) for log in logs)


def _nodes_of_ranks(files: JobFiles, record: JobRecord, result: JobEnds) -> dict[int, str]:
    """Return the node of each rank: the names of logs win over the order of the nodes."""
    named = {log.rank: log.node for log in files.logs if log.rank is not None}
    return _deal_ranks(result.world_size or 0, record.nodes) | named


def _deal_ranks(world_size: int, nodes: Sequence[str]) -> dict[int, str]:
    """Return the node of each rank; empty if the nodes cannot have equally many ranks."""
    if not nodes or world_size % len(nodes):
        return {}
    ranks_per_node = world_size // len(nodes)
    return {rank: nodes[rank // ranks_per_node] for rank in range(world_size)}


def _judge_without_result(
    case: _Case, in_logs: LogVerdict
) -> tuple[bool | None, FirstFailure | None]:
    """Return the verdict without a driver's result, from Slurm's accounting and the logs."""
    job_id = case.files.job_id
    state = messages.read_job_state(job_id, begun=case.record.begun) if job_id else ""
    first = _find_end_by_slurm(state, job_id, in_logs) or _place_failure(case, in_logs)
    if first is not None:
        return False, first
    return (True if state == "COMPLETED" else None), None


def _find_end_by_slurm(state: str, job_id: str, in_logs: LogVerdict) -> FirstFailure | None:
    """Return the failure for Slurm's end of a job; None if the logs show a cause."""
    ended_by = ENDED_BY_STATE.get(state)
    has_cause = in_logs.first is not None and in_logs.first.kind not in _AFTER_SLURM
    if not ended_by or has_cause:
        return None
    return verdict.convert_ending(ended_by, job_id, "")


def _place_failure(case: _Case, in_logs: LogVerdict) -> FirstFailure | None:
    first, hit = in_logs.first, next(iter(in_logs.shown), None)
    if first is None or not isinstance(hit, Hit):
        return first
    if hit.entry.tells == LineTells.END:
        # Slurm reports the end of a job through one of the nodes, which is not to blame for it.
        failed_node = first.kind == FailureClass.NODE_FAILURE
        node = _find_lost_node((hit, *case.seen.hits)) if failed_node else ""
        return replace(first, node=node, rank=None)
    if first.rank is not None or case.launched.first:
        return first
    task = hit.groups.get("tasks", "")
    return replace(first, rank=int(task)) if task.isdigit() else first


def _find_lost_node(hits: tuple[Hit, ...]) -> str:
    for hit in hits:
        if hit.entry.kind == FailureClass.NODE_FAILURE and hit.groups.get("node"):
            return hit.groups["node"]
    return ""


def _explain_failure(
    case: _Case, first: FirstFailure, in_logs: LogVerdict
) -> tuple[FirstFailure, LogVerdict]:
    """Add what only the logs show to the driver's verdict: missing ranks, a kill for memory."""
    if first.exit_code == 0:  # it left early; ranks missing in the logs are a consequence
        return first, replace(in_logs, missing=())
    if first.kind == FailureClass.HANG:
        return _explain_hang(case, first, in_logs)
    killer = case.seen.find_out_of_memory(first.node)
    if first.kind != FailureClass.KILLED or first.exit_code not in (-9, 137) or killer is None:
        return first, in_logs
    first = first.explain(killer.known)
    return first, replace(in_logs, shown=(killer,))


def _explain_hang(
    case: _Case, first: FirstFailure, in_logs: LogVerdict
) -> tuple[FirstFailure, LogVerdict]:
    """Name the ranks missing in a collective, if the blamed rank itself timed out in it."""
    waited = {record.rank for record in case.result.failures or () if has_waited_in_vain(record)}
    waiting = case.seen.waiting()
    if first.rank not in waited or not waiting:
        return first, in_logs
    missing = find_absent_ranks(waiting, case.nodes) or tuple(sorted(set(case.nodes) - waited))
    in_logs = replace(in_logs, shown=tuple(waiting[:3]), missing=missing)
    return describe_hang(waiting[0], missing, case.nodes), in_logs


def _add_last_lines(first: FirstFailure, files: JobFiles) -> FirstFailure:
    """Add the last lines of the rank that the others waited for to a hang."""
    if first.kind != FailureClass.HANG or first.exit_code:
        return first
    lines: list[str] = []
    for log in files.logs:
        if log.rank == first.rank:
            lines += read_last_lines(log.path, _LAST_WORDS)
    if lines or first.rank is None or first.hint != LOG_TELLS:
        return replace(first, lines=tuple(lines))
    return replace(first, lines=(), hint=_SILENT)


def _same_failure(first: FirstFailure, result: JobEnds) -> tuple[int, ...]:
    records = {record.rank: record for record in result.failures or ()}
    record = None if first.rank is None else records.pop(first.rank, None)
    if record is None or not _has_raised(record):
        return ()
    error = make_comparable(record)
    return tuple(sorted(rank for rank, other in records.items() if make_comparable(other) == error))


def _has_raised(record: FailureRecord) -> bool:
    return record.exception != "" and weigh_failure(record) == CAUSE


def _consequences(
    first: FirstFailure, in_logs: LogVerdict, result: JobEnds, same_failure: tuple[int, ...]
) -> tuple[int, ...]:
    failed = {record.rank for record in result.failures or ()} | set(in_logs.failed)
    return tuple(sorted(failed - {first.rank} - set(in_logs.missing) - set(same_failure)))
