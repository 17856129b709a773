"""The diagnosis of a job: its first failure, the reason, the evidence, and advice."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from bundle.driver.retries import find_retry
from bundle.driver.transports.slurm_text import ENDED_BY_STATE
from bundle.format.manifest import Manifest
from bundle.launch.rank_results import CAUSE
from bundle.protocol.codec import encode
from bundle.protocol.enumerations import Action, FailureClass, Retry
from bundle.protocol.events import JobEnds
from bundle.protocol.log_names import ATTEMPT_MARK
from bundle.protocol.messages import Departure, FailureRecord, Lingering, Vanished
from bundle.redaction.secret_names import is_secret
from bundle.regex import compile_lazily

from ..catalogue.catalogue import CatalogueMatch, LineRole, LineTells
from ..config import load as settings
from ..core.errors import StagerError
from ..logs.job_files import JobFiles, KeptJob, LogFile
from ..logs.job_record import JobRecord, Refused, read_events
from ..logs.lines import number_lines, read_last_lines
from ..slurm import messages
from . import verdict
from .failure import Diagnosis, Evidence, FirstFailure
from .hits import Hit, scan_logs
from .log_verdict import (
    LOG_TELLS,
    LogVerdict,
    describe_hang,
    find_absent_ranks,
    judge_logs,
    select_last_attempts,
)
from .process_exits import Exit, find_torchruns, has_waited_in_vain, weigh_failure

# It begins where the one before it cannot go on: else a long word is read again from each letter.
_ROOT = r"(?<![^\s'\"`(<\[=:,])[^\s'\"`(<\[=:,]*/stager-\d+"
_VARIABLE = (
    (compile_lazily(_ROOT + r"/jobs/[^/\s'\"]+"), "JOB"),
    (compile_lazily(_ROOT + r"(?=/|\b)"), "ROOT"),
    (compile_lazily(r"\b0x[0-9a-fA-F]{4,}\b"), "POINTER"),
    (compile_lazily(r"\[(?=[0-9a-fA-F]*:)[0-9a-fA-F:.]{1,45}\](?::\d+)?"), "ADDRESS"),
    (compile_lazily(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "ADDRESS"),
    (compile_lazily(r"\b(local_rank|rank|pid|process|cuda|GPU)([ :=#]{0,2})\d+\b", re.I), r"\1\2N"),
)
"""Parts that differ from rank to rank though the failure is the same, and their stand-ins."""


def make_comparable(record: FailureRecord) -> tuple[str, str]:
    """Return the exception and the message of a rank's failure, equal for equal failures."""
    text = record.message
    if record.exception == "SystemExit":  # a status alone is no error that two may have in common
        text += "".join(record.lines[-1:])
    for pattern, replacement in _VARIABLE:
        text = pattern.sub(replacement, text)
    if record.node:
        text = re.sub(rf"(?<![\w.-]){re.escape(record.node)}(?![\w-])", "NODE", text)
    return record.exception, text


# --- The failure of a rank that reads a variable which is withheld, as its name is a secret's ----

_MISSING = compile_lazily(r"KeyError: '([A-Za-z_][A-Za-z0-9_]*)'")
_OF_ENVIRONMENT = compile_lazily(r"\benviron\b|<frozen os>|/os\.py\"")
"""Lines of a traceback through ``os.environ``; a key of any other mapping may have such a name."""


def explain_withheld_variable(first: FirstFailure, job: KeptJob) -> FirstFailure:
    """Return a failure, with its reason and remedy if a withheld variable has caused it."""
    missing = _MISSING.fullmatch(first.cause)
    name = missing[1] if missing and any(map(_OF_ENVIRONMENT.search, first.lines)) else ""
    if not is_secret(name):
        return first
    meaning = f"{name} was withheld from the ranks, as its name is that of a secret"
    hint = f"pass it to the ranks: stager run --pass-env {name}, or pass-env = "
    hint += f'["{name}"] below [launch] in stager.toml'
    if name in job.launch.pass_env:
        meaning = f"{name} is named in pass-env, but was not set where the job was started"
        hint = f"set {name} in the shell that starts the job, and start it again"
    return replace(first, meaning=meaning, hint=hint)


# --- A module that a rank did not find: where the project has it, or the package to add ----------

_NAME = compile_lazily(r"No module named '?([\w.]+)")
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
    if first.entry != "module-missing" or found is None:
        return first
    from ..pack.bundle_file import layer_paths, open_bundle

    try:
        with open_bundle(Path(job.bundle), job.bundle_id) as bundle:
            paths = {path.partition("/")[2] for path in layer_paths(bundle, "project")}
            manifest = bundle.manifest
    except (StagerError, OSError, ValueError):  # it was removed, or replaced by a newer one
        return first
    root = Path(job.run_dir)
    with suppress(StagerError):
        source = settings.find(root)
        root = root if source is None else source.parent
    reason = _explain_other_folder(found[1], paths) or _explain_left_out(found[1], root)
    meaning, hint = reason or _explain_missing_package(found[1], manifest, root)
    return replace(first, meaning=meaning, hint=hint)


def _explain_other_folder(module: str, paths: Collection[str]) -> tuple[str, str] | None:
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
        f"import it as {name}; or move {found} to one of these folders",
    )


def _explain_left_out(module: str, root: Path) -> tuple[str, str] | None:
    place = module.replace(".", "/")
    for name in (f"{place}.py", f"{place}/", f"src/{place}.py", f"src/{place}/"):
        if (root / name).exists():
            return (
                f"{name} is in {root}, but not in the bundle",
                "project.exclude or a .gitignore leaves it out: to take it back, add "
                f'"!/{name}" to project.exclude',
            )
    return None


def _explain_missing_package(module: str, manifest: Manifest, root: Path) -> tuple[str, str]:
    top = module.partition(".")[0]
    package = _PACKAGES.get(top, top)
    there = {layer.name: layer.version for layer in manifest.layers if layer.kind == "wheel"}
    version = there.get(canonicalize_name(package))
    where = "environment.requirements"
    with suppress(StagerError):
        config = settings.load(root)
        named = config.environment.requirements
        files = [name for name in named if (config.root / name).is_file()]
        where = next(iter(files), f"environment.requirements in {config.source.name}")
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
    doubt = "" if top in _PACKAGES else f" (if the package of {top} has another name, that one)"
    return (
        f"no package in the bundle has the module {top}, nor has the project",
        f"{add}{doubt}, then `stager build`",
    )


# --- The lines that show a failure: lines of logs, else of the files that the job's driver keeps

_MOST = 5


def _find_evidence(case: _Case, first: FirstFailure, in_logs: LogVerdict) -> Iterator[Evidence]:
    hits = () if first.hang else _find_in_logs(first, in_logs, case.hits)
    yield from map(_make_evidence, hits)
    if not hits and case.files.job_id:
        yield from filter(None, [_find_in_driver_files(first, case)])


def _find_in_driver_files(first: FirstFailure, case: _Case) -> Evidence | None:
    preflight = case.files.preflight
    shown = f"{first.node} problem: {first.problem}".partition("\n")[0]
    for number, line in number_lines(preflight) if first.problem else ():
        if line == shown:
            return Evidence(path=preflight, number=number, text=line)
    texts = list(_list_signs(first, case.result))
    for number, line in number_lines(case.files.events) if texts else ():
        if not first.node or json.dumps(first.node) in line:
            for text in texts:
                if re.search(re.escape(text) + r"(?![\d.])", line):
                    return Evidence(path=case.files.events, number=number, text=text)
    return None


def _make_evidence(hit: Hit | Exit) -> Evidence:
    return Evidence(path=hit.log.path, number=hit.number, text=hit.text)


def _find_in_logs(
    first: FirstFailure, in_logs: LogVerdict, hits: Sequence[Hit]
) -> Sequence[Hit | Exit]:
    if own := [hit for hit in hits if _is_own(hit, first)]:
        return own[-1:]
    of_entry = [
        hit
        for hit in hits
        if first.entry == hit.entry.name != "" and hit.log.node in ("", first.node)
    ][:1]
    if not _agrees(in_logs, first):
        return of_entry
    return [*of_entry, *(hit for hit in in_logs.shown if hit not in of_entry)][:_MOST]


def _is_own(hit: Hit, first: FirstFailure) -> bool:
    if hit.rank != first.rank or not hit.text:
        return False
    if hit.text not in (line.strip() for line in first.lines):
        return hit.text in first.cause
    return hit.entry.role == LineRole.PRIMARY or hit.entry.name == first.entry


def _agrees(in_logs: LogVerdict, first: FirstFailure) -> bool:
    if first.kind == FailureClass.HANG:
        return True
    if in_logs.first is None or in_logs.first.kind != first.kind:
        return False
    return first.exit_code is None or in_logs.first.rank in (None, first.rank)


def _list_signs(first: FirstFailure, result: JobEnds) -> Iterator[str]:
    signs: list[Mapping[str, object]] = []
    if first.hang is not None:
        signs.append({"text": first.hang.text})
    elif result.ended_by and first.exit_code is None:
        signs.append({"ended_by": result.ended_by})
    elif first.exit_code:
        signs.append({"exit_code": first.exit_code})
    else:
        signs += _list_departures(first.rank, result)
    if first.problem is not None:
        signs.append(first.problem.to_json())
    return (json.dumps(sign)[1:-1] for sign in signs)  # without braces, as it is in a line


def _list_departures(rank: int | None, result: JobEnds) -> list[Mapping[str, object]]:
    ends: list[Departure | Vanished | Lingering] = [*(result.left or ())]
    ends += [*(result.vanished or ()), *(result.lingering or ())]
    return [encode(process) for process in ends if process.rank == rank]


# --- The diagnosis of a job: its first failure, the reason, and advice, from the files it has left

_LAST_WORDS = 6
_SILENT = (
    "it has printed nothing: let it say how far it is, or have it dump its stack with "
    "faulthandler.dump_traceback_later(60); look for code that only some ranks run"
)
_AFTER_SLURM = (FailureClass.UNKNOWN, FailureClass.KILLED, FailureClass.HANG)
"""The classes of failures that may follow from Slurm's end of a job."""


class _Case(NamedTuple):
    files: JobFiles
    record: JobRecord
    result: JobEnds  # what of its result can be used; an empty one of a job without a result
    has_torchruns: bool  # whether logs are of whole torchruns, so that a task is no rank
    hits: Sequence[Hit]
    nodes: dict[int, str]


def diagnose(files: JobFiles, record: JobRecord | None = None) -> Diagnosis:
    """Find the first failure of a job; a record of None is read from the files."""
    if record is None:
        record = read_events(files.events) if files.job_id else JobRecord()
    case, in_logs = _read_logs(files, record)
    ok = None if record.result is None else record.result.ok
    first = verdict.judge_result(case.result, files.job_id)
    if first is not None:
        first, in_logs = _explain_failure(case, first, in_logs)
    elif ok is None:
        ok, first = _judge_without_result(case, in_logs)
    before_launch = record.begun is not None and not record.has_launched
    diagnosis = Diagnosis(
        job_id=files.job_id,
        folder=files.folder,
        ok=ok,
        first=first,
        interrupted=case.result.interrupted,
        read=len(files.logs),
        restarts=record.restarts,
        before_launch=before_launch and files.read_job().action is Action.RUN,
    )
    if first is not None:
        return _complete_diagnosis(diagnosis, case, first, in_logs)
    return replace(diagnosis, evidence=() if ok else tuple(map(_make_evidence, in_logs.weak)))


def _complete_diagnosis(
    diagnosis: Diagnosis, case: _Case, first: FirstFailure, in_logs: LogVerdict
) -> Diagnosis:
    if case.files.ours:
        job = case.files.read_job()
        first = explain_missing_module(explain_withheld_variable(first, job), job)
    first = _add_retry(first, case.result)
    same_failure = _find_same_failure(first, case.result)
    failed = {each.rank for each in case.result.failures or ()} | set(in_logs.failed)
    return replace(
        diagnosis,
        first=_add_last_lines(first, case.files),
        entry=first.entry,
        evidence=tuple(_find_evidence(case, first, in_logs)),
        same_failure=same_failure,
        consequences=tuple(sorted(failed - {first.rank, *in_logs.missing, *same_failure})),
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
        first=_add_retry(first, JobEnds(ok=False)),
        before_launch=refused.command == "run",
        command=refused.command,
    )


def _read_logs(files: JobFiles, record: JobRecord) -> tuple[_Case, LogVerdict]:
    restarts = max((log.attempt or 0 for log in files.logs), default=0)
    files = replace(files, logs=_select_last_attempt(files.logs))
    launched = find_torchruns(files.logs)
    logs = [launched.drop_task(log) for log in files.logs]
    if files.job_id and files.preflight.exists() and not files.events.exists():
        logs.append(LogFile(path=files.preflight))
    result = verdict.select_usable_result(record.result or JobEnds(ok=False))
    # The names of logs win over the order of the nodes.
    named = {log.rank: log.node for log in files.logs if log.rank is not None}
    nodes = _deal_ranks(result.world_size, record.nodes) | named | launched.nodes(files.logs)
    hits, heads = scan_logs(logs, files)
    hits = launched.add_ranks(hits)
    case = _Case(files, record, result, bool(launched.first), hits, nodes)
    return case, judge_logs(select_last_attempts(hits, heads, restarts), nodes)


def _select_last_attempt(logs: Sequence[LogFile]) -> tuple[LogFile, ...]:
    last: dict[Path, int] = {}
    for log in logs:
        if log.attempt is not None:
            folder = log.path.parents[2]
            last[folder] = max(log.attempt, last.get(folder, 0))
    return tuple(
        log for log in logs if log.attempt is None or log.attempt == last[log.path.parents[2]]
    )


def _deal_ranks(world_size: int | None, nodes: Sequence[str]) -> dict[int, str]:
    if not nodes or not world_size or world_size % len(nodes):
        return {}
    ranks_per_node = world_size // len(nodes)
    return {rank: nodes[rank // ranks_per_node] for rank in range(world_size)}


def _judge_without_result(
    case: _Case, in_logs: LogVerdict
) -> tuple[bool | None, FirstFailure | None]:
    job_id = case.files.job_id
    state = messages.read_job_state(job_id, begun=case.record.begun) if job_id else ""
    ended_by = ENDED_BY_STATE.get(state)
    has_cause = in_logs.first is not None and in_logs.first.kind not in _AFTER_SLURM
    if ended_by and not has_cause:
        return False, verdict.convert_ending(ended_by, job_id, "")
    if in_logs.first is not None:
        return False, _place_failure(case, in_logs.first, next(iter(in_logs.shown), None))
    return (True if state == "COMPLETED" else None), None


def _place_failure(case: _Case, first: FirstFailure, hit: Hit | Exit | None) -> FirstFailure:
    if not isinstance(hit, Hit):
        return first
    if hit.entry.tells != LineTells.END:
        task = hit.groups.get("tasks", "")
        is_rank = first.rank is None and not case.has_torchruns and task.isdigit()
        return replace(first, rank=int(task)) if is_rank else first
    # Slurm reports the end of a job through one of the nodes, which is not to blame for it.
    is_lost = first.kind == FailureClass.NODE_FAILURE
    lost = (each for each in (hit, *case.hits) if is_lost and each.entry.kind == first.kind)
    nodes = filter(None, (each.groups.get("node") for each in lost))
    return replace(first, node=next(nodes, ""), rank=None)


def _explain_failure(
    case: _Case, first: FirstFailure, in_logs: LogVerdict
) -> tuple[FirstFailure, LogVerdict]:
    """Add what only the logs show to the driver's verdict: missing ranks, a kill for memory."""
    if first.hang is not None:
        is_behind = first.hang.kind == "behind"
        return first, in_logs._replace(missing=first.hang.ranks if is_behind else ())
    if first.exit_code == 0:  # it left early; ranks missing in the logs are a consequence
        return first, in_logs._replace(missing=())
    if first.kind == FailureClass.HANG:
        return _explain_hang(case, first, in_logs)
    if first.kind == FailureClass.KILLED and first.exit_code in (-9, 137):
        for hit in case.hits:
            if hit.entry.kind == FailureClass.OUT_OF_MEMORY and hit.node in ("", first.node):
                return first.explain(CatalogueMatch(hit.entry, hit.groups)), in_logs._replace(
                    shown=(hit,)
                )
    return first, in_logs


def _explain_hang(
    case: _Case, first: FirstFailure, in_logs: LogVerdict
) -> tuple[FirstFailure, LogVerdict]:
    """Name the ranks missing in a collective, if the blamed rank itself timed out in it."""
    waited = {record.rank for record in case.result.failures or () if has_waited_in_vain(record)}
    waiting = [hit for hit in case.hits if hit.entry.tells == LineTells.STUCK]
    waiting.sort(key=lambda hit: (hit.time is None, hit.time or 0.0))
    if first.rank not in waited or not waiting:
        return first, in_logs
    missing = find_absent_ranks(waiting, case.nodes) or tuple(sorted(set(case.nodes) - waited))
    in_logs = in_logs._replace(shown=tuple(waiting[:3]), missing=missing)
    return describe_hang(waiting[0], missing, case.nodes), in_logs


def _add_last_lines(first: FirstFailure, files: JobFiles) -> FirstFailure:
    if first.kind != FailureClass.HANG or first.exit_code:
        return first
    own = [log.path for log in files.logs if log.rank == first.rank]
    lines = tuple(line for path in own for line in _read_last_words(path))
    is_silent = not lines and first.rank is not None and first.hint == LOG_TELLS
    return replace(first, lines=lines, hint=_SILENT if is_silent else first.hint)


def _read_last_words(path: Path) -> tuple[str, ...]:
    lines = read_last_lines(path, _LAST_WORDS)
    marks = [number for number, line in enumerate(lines, 1) if line.startswith(ATTEMPT_MARK)]
    return lines[marks[-1] if marks else 0 :]


def _add_retry(first: FirstFailure, result: JobEnds) -> FirstFailure:
    """Add whether to run again: the driver knows of attempts before, and the logs know more."""
    attempt = result.attempt
    if attempt is not None and attempt.rank == first.rank and attempt.retry is Retry.NO:
        return replace(first, retry=attempt.retry, retry_reason=attempt.reason)
    own = [record for record in result.failures or () if record.rank == first.rank][:1]
    words = (own[0].exception, own[0].message) if own else ("", "")
    retry, reason = find_retry(first.kind, *words)
    return replace(first, retry=retry, retry_reason=reason)


def _find_same_failure(first: FirstFailure, result: JobEnds) -> tuple[int, ...]:
    records = {record.rank: record for record in result.failures or ()}
    own = None if first.rank is None else records.pop(first.rank, None)
    if own is None or not own.exception or weigh_failure(own) != CAUSE:
        return ()
    error = make_comparable(own)
    return tuple(sorted(rank for rank, other in records.items() if make_comparable(other) == error))
