"""The table from the code of a problem to its words, its failure class and its remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .enumerations import Ending, FailureClass
from .node_wordings import HOST_WORDINGS, NODE_WORDINGS, Wording
from .problem import Problem, ProblemCode

# --- The words of problems with a bundle, and with the environment that is made from it on a node

_REBUILD = "stage it again; if this persists, build the bundle again"
_SEE_SPACE = (
    "check the free space, the inodes and the permissions there, or name another place with "
    "[cluster] node-root or $STAGER_NODE_ROOT"
)
_SEE_PTH = "unset PYTHONPATH and check the environment for .pth files"
_OR_EXCLUDE = "; or leave the node out with --exclude={where}"

ENVIRONMENT_WORDINGS: Mapping[ProblemCode, Wording] = {
    # The bundle as a file.
    ProblemCode.BUNDLE_UNREADABLE: Wording(
        "the bundle cannot be read", fix="check the path, or make the bundle with `stager build`"
    ),
    ProblemCode.BUNDLE_DISK_FAULT: Wording(
        "the bundle cannot be read", fix="check that disk for errors (dmesg)"
    ),
    ProblemCode.BUNDLE_DAMAGED: Wording(
        "the bundle is damaged or not a bundle",
        fix="copy it again, or build it again with `stager build`",
        failure_class=FailureClass.DAMAGED_COPY,
        meaning="the file changed after it was built. Copy it again",
    ),
    ProblemCode.STORED_LAYER_UNUSABLE: Wording(
        "the bundle refers to a layer in the offline root that cannot be used",
        "{layer}: {why}",
        "build again with `stager build`, which makes the layer; to use a bundle away from its "
        "offline root, write all of it with `stager build --output FILE`",
        FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.ANOTHER_BUNDLE: Wording(
        "this is another bundle than the job was made for",
        "its id is {id}, expected {expected}",
        "stage the right file, or start the job again",
        FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.SIGNATURE_REFUSED: Wording(
        "the bundle's signature is not accepted",
        fix="see whether the signer's key has expired since the job was submitted, and whether the "
        "node's clock is right; then start the job again",
        meaning="`[trust] require` is set, and what the login side has accepted does not hold on "
        "the node: nothing of the bundle has run there",
    ),
    ProblemCode.BUNDLE_OF_OTHER_VERSION: Wording(
        "the bundle was made by another version of stager",
        fix="build it again with `stager build`, or use the version that made it",
    ),
    ProblemCode.NO_ZSTD: Wording(
        "this Python has no zstd and the bundle brings none",
        "Python {version}",
        "run the node program with the Python that the bundle was made for",
    ),
    ProblemCode.DECOMPRESSOR_UNUSABLE: Wording(
        "the bundle's zstd decompressor {how}",
        "{name} under Python {version}: {why}",
        "use a node root that allows execution, or build for this machine's platform",
    ),
    ProblemCode.PROGRAM_INCOMPLETE: Wording(
        "the node program is incomplete", "no source", "build again"
    ),
    # Its way to the nodes.
    ProblemCode.BUNDLE_INVISIBLE: Wording(
        "the bundle cannot be read there, and staging is off",
        "--stage never lets every node read the bundle where it lies",
        "use --stage auto, or put the offline root on a file system that every node sees",
    ),
    ProblemCode.NOTHING_TO_SEND: Wording(
        "the first node cannot see the bundle, so it cannot be sent to the others",
        "a batch job is driven from its first node",
        "run it from the login node without --batch (it then uses salloc), or put the offline "
        "root on a file system that the nodes see; where a later build has replaced the bundle, "
        "print or submit the script again",
    ),
    ProblemCode.HOST_DISK_FULL: Wording(
        "a disk of the host where the job is driven from is full",
        fix="free some space in {where} on that host, or set TMPDIR to another place",
        failure_class=FailureClass.DISK_FULL,
        meaning="the driver runs where `stager` asked for the nodes, or on the first node of a "
        "batch job; no other node failed",
    ),
    ProblemCode.HOST_DISK_UNWRITABLE: Wording(
        "a disk of the host where the job is driven from cannot be used",
        fix="look at {where} on that host (full, read-only, failing?), or set TMPDIR to another "
        "place",
        meaning="the driver runs where `stager` asked for the nodes, or on the first node of a "
        "batch job; no other node failed",
    ),
    ProblemCode.EXCERPT_UNWRITABLE: Wording(
        "the part of the bundle that is to be sent cannot be written",
        fix="free some space there, or set TMPDIR to another place",
    ),
    ProblemCode.EXCERPT_DISK_FULL: Wording(
        "the part of the bundle that is to be sent cannot be written",
        fix="free some space there, or set TMPDIR to another place",
        failure_class=FailureClass.DISK_FULL,
    ),
    ProblemCode.INCOMING_UNWRITABLE: Wording(
        "the bundle cannot be received", fix="check the free space and the permissions there"
    ),
    ProblemCode.INCOMING_DISK_FULL: Wording(
        "the bundle cannot be received",
        fix="check the free space and the permissions there",
        failure_class=FailureClass.DISK_FULL,
    ),
    ProblemCode.BUNDLE_CUT_OFF: Wording(
        "the bundle could not be sent",
        "the rest of it did not arrive",
        "see the problem that is reported first",
    ),
    ProblemCode.BUNDLE_NOT_ARRIVED: Wording(
        "the bundle could not be sent",
        "{arrived} of {size} bytes had arrived",
        "see the problem that is reported first",
    ),
    ProblemCode.BUNDLE_NOT_ARRIVED_NO_ROOM: Wording(
        "the bundle could not be sent",
        "{arrived} of {size} bytes had arrived, {free} are free",
        "see the problem that is reported first",
        FailureClass.DISK_FULL,
    ),
    ProblemCode.RELAY_SOURCE_ENDED: Wording(
        "the process on {host} that sends the bundle has ended",
        "{why}",
        "start the job again; after SIGKILL, look there for a lack of memory (dmesg)",
        FailureClass.KILLED,
    ),
    ProblemCode.RELAY_SOURCE_HANGS: Wording(
        "the process on {host} that sends the bundle hangs",
        "{why}",
        "look at the file system of {where} on that host: it may not answer at present",
        meaning="the nodes waited for a minute; none of them failed",
    ),
    ProblemCode.BUNDLE_NOT_SENT: Wording(
        "the bundle could not be sent to the node",
        "{way} says: {why}",
        "check the free space and the permissions in {incoming} there" + _OR_EXCLUDE,
        meaning="sending to it failed, and failed again when tried with this node alone",
    ),
    ProblemCode.BUNDLE_NOT_SENT_NO_ROOM: Wording(
        "the bundle could not be sent to the node",
        "{way} says: {why}",
        "check the free space and the permissions in {incoming} there" + _OR_EXCLUDE,
        FailureClass.DISK_FULL,
        meaning="the disk there is full, of which Slurm says only `Unspecified error`. The line "
        "shows how much had arrived and how much is free",
    ),
    ProblemCode.BUNDLE_NOT_SENT_NETWORK: Wording(
        "the bundle could not be sent to the node",
        "sbcast says: {why}",
        "check the network to {where}: `sinfo -N -n {where}`, `ping {where}`" + _OR_EXCLUDE,
    ),
    ProblemCode.COPY_DAMAGED_TWICE: Wording(
        "the copy of the bundle was damaged on its way, twice",
        fix="the bundle itself is sound: check the network to {where}, and its memory and "
        "disk, or leave the node out with --exclude={where}",
        failure_class=FailureClass.DAMAGED_COPY,
        meaning="the node received different bytes from those sent, and received them once more. "
        "That node's network or memory is at fault, not the bundle",
    ),
    # The environment as it is made.
    ProblemCode.NO_ROOM: Wording(
        "the environment does not fit",
        fix="free some, or name another place with [cluster] node-root or $STAGER_NODE_ROOT",
        failure_class=FailureClass.DISK_FULL,
    ),
    ProblemCode.ENVIRONMENT_DISK_FULL: Wording(
        "the environment does not fit", fix=_SEE_SPACE, failure_class=FailureClass.DISK_FULL
    ),
    ProblemCode.ENVIRONMENT_UNWRITABLE: Wording(
        "the environment cannot be written", fix=_SEE_SPACE
    ),
    ProblemCode.LAYER_MISSING: Wording(
        "a part of the environment is missing",
        "{name} was to be taken from an older environment, which has changed",
        "start again",
    ),
    ProblemCode.ENVIRONMENT_GONE: Wording(
        "the environment is gone",
        "it was removed, as `stager clean` does with what is not in use",
        "start again",
    ),
    ProblemCode.UNPACKING_FAILED: Wording(
        "an unpacking process failed",
        "{why}; see its traceback above",
        "report this with the log",
    ),
    ProblemCode.UNPACKING_KILLED: Wording(
        "an unpacking process was killed",
        "signal {signal}",
        "usually the node ran out of memory; a tmpfs counts as memory too",
        FailureClass.KILLED,
    ),
    ProblemCode.UNPACKING_ENDED: Wording(
        "an unpacking process ended",
        "exit status {status}",
        "see the messages above; usually it received SIGTERM",
    ),
    # The environment as it is found.
    ProblemCode.ENVIRONMENT_DAMAGED: Wording(
        "the environment is damaged",
        fix="remove it with `stager clean --nodes`, then stage it again",
        failure_class=FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.ENVIRONMENT_REPAIRED: Wording(
        "the environment is damaged",
        fix="stager repairs the environment before using it",
        failure_class=FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.ENVIRONMENT_TAKEN_AWAY: Wording(
        "the environment is damaged",
        fix="it was removed there: the next `stager verify` or `stager run` makes it again",
        failure_class=FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.DAMAGE_IN_USE: Wording(
        "the damaged environment cannot be removed",
        "a job on this node is using it",
        "wait until that job has ended, or end it, and stage again",
        FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.DAMAGE_NOT_REMOVED: Wording(
        "the damaged environment cannot be removed",
        fix="remove {root} there by hand",
        failure_class=FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.PYTHON_GARBLED: Wording(
        "the environment's Python is not usable", "it answered: {answer}", _REBUILD
    ),
    ProblemCode.PYTHON_FAILED: Wording(
        "the environment's Python does not run",
        fix=f"if it names a shared library, install that on the node; else {_REBUILD}",
    ),
    ProblemCode.PYTHON_ILLEGAL_INSTRUCTION: Wording(
        "the environment's Python does not run",
        fix="this processor lacks instructions that the wheels use; exclude the node",
    ),
    ProblemCode.PYTHON_KILLED: Wording(
        "the environment's Python does not run",
        fix="the node ran out of memory; ask for more with --mem, or exclude the node",
        failure_class=FailureClass.KILLED,
    ),
    ProblemCode.LIBRARY_UNUSABLE: Wording(
        "the node has no usable copy of this shared library",
        "{why}; needed by {modules} in the environment's Python, and by {importers}",
        "install the package that has it on the node; or build with a Python that brings its "
        'libraries (uv python install, then [environment] interpreter = "bundled"); or exclude the '
        "node",
        meaning="a Python that was compiled on the build machine, such as pyenv's, needs libraries "
        "of its distribution (`libffi` for `ctypes`, `libssl` for `ssl`, ...). It is a warning "
        "where the modules of `environment.imports` can be imported without it",
    ),
    ProblemCode.PACKAGE_MISSING: Wording("the package is missing", "not in {root}", _REBUILD),
    ProblemCode.PACKAGE_INCOMPLETE: Wording(
        "the package is incomplete", "there is no module {module}", _REBUILD
    ),
    ProblemCode.PACKAGE_FOREIGN: Wording(
        "the package does not come from the environment", "found in {found}", _SEE_PTH
    ),
    ProblemCode.MODULE_MISSING: Wording("the module is missing", "not found by {python}", _REBUILD),
    ProblemCode.MODULE_FOREIGN: Wording(
        "the module does not come from the environment",
        "found in {found}",
        _SEE_PTH,
        meaning="something puts another directory first on `sys.path`: a `.pth` file, or "
        "`sitecustomize`",
    ),
    ProblemCode.MODULE_NOT_IMPORTED: Wording(
        "the module cannot be imported",
        fix="run stager exec -- python -c 'import {where}' there to see the whole error",
    ),
}
"""By code."""


# --- The words of problems with a job: its allocation, its ranks, its output, its end ------------

_SEE_CODES = "the ranks have ended as their exit codes say; run it again if the logs matter"
_KEPT = "what arrived in full is kept; the rest is still on the node, if the node is up"
_ROOM_THERE = "make room there; {files} still at {source}"

JOB_WORDINGS: Mapping[ProblemCode, Wording] = {
    # Its description and its allocation.
    ProblemCode.JOB_OF_OTHER_VERSION: Wording(
        "the job description cannot be read",
        fix="start the job with the same version of stager that built the bundle",
    ),
    ProblemCode.JOB_UNREADABLE: Wording("the job description cannot be read", fix="start it again"),
    ProblemCode.REQUEST_UNREADABLE: Wording(
        "the request cannot be read",
        fix="start the job with the same version of stager that built the bundle",
    ),
    ProblemCode.LOG_DIR_UNWRITABLE: Wording(
        "the log directory cannot be written", fix="name another one with --log-dir"
    ),
    ProblemCode.NO_ALLOCATION: Wording(
        "there is no Slurm allocation",
        "SLURM_JOB_ID and SLURM_JOB_NODELIST are not both set",
        "start it with salloc or sbatch, or use --allocation local",
    ),
    ProblemCode.ALLOCATION_UNUSABLE: Wording(
        "the Slurm allocation cannot be used",
        fix="find out what has set SLURM_JOB_ID and SLURM_JOB_NODELIST: the values are not "
        "Slurm's own",
    ),
    ProblemCode.TOO_FEW_NODES: Wording(
        "the allocation has too few nodes",
        "job {job} has {nodes}, and {least} are required",
        "use --nodes {nodes}, or ask Slurm for more",
    ),
    ProblemCode.TOO_FEW_CPUS: Wording(
        "the allocation has too few CPUs",
        "job {job} has {cpus} on a node, and {setting} = {asked} needs {asked}",
        "ask Slurm for more (--cpus-per-task={asked}), or make {setting} smaller in stager.toml",
        meaning="the allocation that `stager` runs in has less; no node failed",
    ),
    ProblemCode.NODE_LIST_UNREADABLE: Wording(
        "the node list cannot be read",
        fix="write it as Slurm does, for example n[01-03,07],login1",
    ),
    ProblemCode.SRUN_NOT_STARTED: Wording(
        "srun cannot be started", fix="check whether the allocation still exists"
    ),
    ProblemCode.RELAY_NOT_STARTED: Wording(
        "the relay of the bundle cannot be started",
        fix="the node gets it without the relay; check its addresses (--interface)",
    ),
    ProblemCode.SLURM_COMMAND_FAILED: Wording(
        "{command} failed",
        fix="run it where Slurm's commands are on PATH and the controller answers",
    ),
    ProblemCode.SENT_LOCALLY: Wording("nothing is sent on one machine", "", "use --stage auto"),
    ProblemCode.FETCHED_LOCALLY: Wording("nothing is fetched on one machine", ""),
    # Its ranks.
    ProblemCode.BACKEND_UNUSABLE: Wording("the backend cannot be used", fix="use --backend gloo"),
    ProblemCode.LAUNCHER_NOT_STARTED: Wording(
        "the launcher cannot start", fix="stage the environment again"
    ),
    ProblemCode.PIPES_NOT_MADE: Wording(
        "the ranks' pipes cannot be made", fix="check the free space and the inodes there"
    ),
    ProblemCode.PIPES_DISK_FULL: Wording(
        "the ranks' pipes cannot be made",
        fix="check the free space and the inodes there",
        failure_class=FailureClass.DISK_FULL,
    ),
    ProblemCode.PIPES_OVER_LIMIT: Wording(
        "the ranks' pipes cannot be made",
        "{why}: a pipe is needed for {ranks}, and the limit is {limit}",
        "raise the hard limit of open files (ulimit -Hn) on the nodes, or start fewer ranks",
    ),
    ProblemCode.RANKS_DID_NOT_END: Wording(
        "the ranks did not end",
        "other nodes had ended {seconds} s before; a thread, an exit handler or a process pool may "
        "hang",
        "end them before the program ends, or give them longer with SLURM_WAIT=SECONDS",
        FailureClass.HANG,
        meaning="some nodes had ended well, and ten minutes later these had not. If they are "
        "really working, for example on a very long save at the end, set `SLURM_WAIT` to another "
        "number of seconds, or to 0 for no limit",
    ),
    ProblemCode.RANKS_CANNOT_TALK: Wording(
        "the ranks cannot talk",
        fix="check the network between the nodes (cable, MTU, firewall), name the interface with "
        "[launch] interface in stager.toml, or leave the node out with --exclude",
    ),
    ProblemCode.NOTHING_MEASURED: Wording(
        "the ranks measured nothing",
        "none of their lines begins with {prefix}",
        "see the logs in {log_dir}",
    ),
    # Its output and its results.
    ProblemCode.OUTPUT_LOST: Wording(
        "output of {source} is lost",
        "it did not come through srun intact, and was no longer there to be sent again",
        _SEE_CODES,
    ),
    ProblemCode.OUTPUT_NOT_LOGGED: Wording("output of {source} is lost", fix=_SEE_CODES),
    ProblemCode.OUTPUT_DISK_FULL: Wording(
        "output of {source} is lost", fix=_SEE_CODES, failure_class=FailureClass.DISK_FULL
    ),
    ProblemCode.RUN_DIR_MISSING: Wording(
        "the outputs cannot be collected",
        fix="check whether the job, or a cleanup of temporary files, removed it",
    ),
    ProblemCode.TOO_MANY_OUTPUTS: Wording(
        "the outputs could not be sent",
        "there are too many of them",
        "name directories, not every file",
    ),
    ProblemCode.OUTPUTS_NOT_SENT: Wording(
        "the outputs could not be sent", fix="find out why the other end closed the connection"
    ),
    ProblemCode.NO_RESULTS: Wording(
        "no results arrived",
        fix="see the node's log; the results are still on the node, if it is up",
    ),
    ProblemCode.NO_PLACE_FOR_RESULTS: Wording("no place for results", fix=_ROOM_THERE),
    ProblemCode.RESULTS_TOO_LARGE: Wording(
        "the results do not fit", fix=_ROOM_THERE, failure_class=FailureClass.DISK_FULL
    ),
    ProblemCode.RESULTS_UNWRITABLE: Wording(
        "the results cannot be written", fix="check the permissions and the free space there"
    ),
    ProblemCode.RESULTS_INCOMPLETE: Wording("the results are not complete", fix=_KEPT),
    ProblemCode.RESULTS_CUT_BY_DISK: Wording(
        "the results are not complete",
        fix=f"make room there; {_KEPT}",
        failure_class=FailureClass.DISK_FULL,
    ),
    ProblemCode.OUTPUT_NOT_PLACED: Wording(
        "an output could not be put in place", fix="it is in {path}"
    ),
    # Its end, where Slurm made it.
    ProblemCode.JOB_TIME_LIMIT: Wording(
        "the time limit was reached, and Slurm ended the job",
        "",
        "ask for more with --time (cluster.time); a script that resumes from its checkpoint can "
        "be requeued: stager script --requeue",
        FailureClass.TIME_LIMIT,
        meaning="Slurm checks every half minute, so the end may come a little late",
    ),
    ProblemCode.JOB_CANCELLED: Wording(
        "the job was cancelled from outside (scancel)",
        "",
        "`sacct --jobs={job} --format=JobID,State%30` shows which user cancelled it",
        FailureClass.KILLED,
    ),
    ProblemCode.JOB_REQUEUED: Wording(
        "Slurm put the job back into the queue (scontrol requeue, or a failed node)",
        "",
        "it starts again by itself; `squeue --start --jobs={job}` shows when",
        FailureClass.KILLED,
    ),
    ProblemCode.JOB_NODE_FAILURE: Wording(
        "a node of the job was lost",
        "",
        "leave it out with --exclude, or let the job continue without it: --nodes MIN:MAX",
        FailureClass.NODE_FAILURE,
    ),
    ProblemCode.JOB_PREEMPTED: Wording(
        "another job took the nodes (preemption)",
        "",
        "submit it with `stager script --requeue`, or in a partition that is not preempted",
        FailureClass.PREEMPTION,
    ),
    ProblemCode.JOB_ENDED: Wording(
        "Slurm ended the job: {ending}",
        "",
        "`scontrol show job {job}` may say more",
        FailureClass.UNKNOWN,
    ),
    # Of another version: its words are its values.
    ProblemCode.OTHER: Wording("{what}", "{why}", "{fix}", FailureClass.UNKNOWN),
}
"""By code."""


# --- The one table from the code of a problem to its words, its failure class and its remedy -----

# The far side's messages, the diagnosis, the report and ``docs/troubleshooting.md`` read it. It
# stays with the driver: agents of a Slurm step are sent neither it nor the wordings.

TABLE: Mapping[ProblemCode, Wording] = {
    **NODE_WORDINGS,
    **HOST_WORDINGS,
    **ENVIRONMENT_WORDINGS,
    **JOB_WORDINGS,
}
"""The words of every code."""

ENDINGS: Mapping[str, ProblemCode] = {
    Ending.TIME_LIMIT: ProblemCode.JOB_TIME_LIMIT,
    Ending.CANCELLED: ProblemCode.JOB_CANCELLED,
    Ending.PREEMPTED: ProblemCode.JOB_PREEMPTED,
    Ending.REQUEUED: ProblemCode.JOB_REQUEUED,
    Ending.NODE_FAILURE: ProblemCode.JOB_NODE_FAILURE,
}
"""The problem of a job that Slurm ended, by the reason."""

_WIDEST = 100
"""Characters of a fault and its finding that are shown as one line."""

JOB_ENDINGS = frozenset((*ENDINGS.values(), ProblemCode.JOB_ENDED))
"""The problems that are the end of a job."""


def ending_problem(ending: str, job_id: str) -> Problem:
    """Return the problem of a job that Slurm ended; another version's ending is accepted."""
    where, code = f"job {job_id}", ENDINGS.get(ending)
    if code is None:
        return Problem(ProblemCode.JOB_ENDED, where, {"job": job_id, "ending": ending})
    return Problem(code, where, {"job": job_id})


def read(raw: Mapping[str, object]) -> Problem:
    """Read a problem from JSON; see :meth:`Problem.from_json`."""
    if not isinstance(raw, Mapping):
        raise TypeError("it is no object")
    code, values = raw.get("code"), raw.get("values")
    if code in _KNOWN and isinstance(values, Mapping):
        known = ProblemCode(code)
        if values.keys() >= TABLE[known].names:
            return Problem(known, _text(raw, "where"), {key: _text(values, key) for key in values})
    words = {"what": _text(raw, "what"), "why": "", "fix": ""}
    words.update((key, _text(raw, key)) for key in ("why", "fix") if key in raw)
    return Problem(ProblemCode.OTHER, _text(raw, "where") if "where" in raw else "", words)


_KNOWN = {code.value for code in ProblemCode}


def _text(raw: Mapping[str, object], key: str) -> str:
    if not isinstance(raw[key], str):
        raise TypeError(f"{key} is no text")
    return str(raw[key])


def what(problem: Problem) -> str:
    """Return the fault in words."""
    return _filled(TABLE[problem.code].what, problem)


def why(problem: Problem) -> str:
    """Return the finding in words."""
    return _filled(TABLE[problem.code].why, problem)


def fix(problem: Problem) -> str:
    """Return the remedy in words."""
    return _filled(TABLE[problem.code].fix, problem)


@dataclass(frozen=True)
class ShownProblem:
    """A problem as a person is shown it: a line, those that support it, and what to do."""

    line: str
    """The fault with its place, and the finding if there is room for it."""
    findings: tuple[str, ...]
    """The findings, if there are several or they are long."""
    hint: str
    """The remedy."""


def shown(problem: Problem, here: Collection[str]) -> ShownProblem:
    """Return a problem as it is shown."""
    place = "" if problem.where in here else problem.where
    line, finding = ": ".join(filter(None, (place, problem.what))), problem.why
    whole = "; ".join(filter(None, (line, finding)))
    if len(whole) <= _WIDEST:
        return ShownProblem(whole, (), problem.fix)
    return ShownProblem(line, tuple(finding.split("; ")), problem.fix)


def _filled(text: str, problem: Problem) -> str:
    return text.format_map({**problem.values, "where": problem.where})
