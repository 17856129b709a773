"""Slurm's words: messages of its commands, and the states of jobs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from bundle.driver.logs import CLOCK_SECONDS
from bundle.driver.transports.slurm_text import CONTROLLER_FAULTS, parse_submit_time
from bundle.regex import compile_lazily

from ..core.errors import JobError, StagerError
from ..core.processes import Runner, run

# The texts are those of ``salloc`` and ``sbatch`` 22.05 to 24.11; unknown lines pass through.

Kind = Literal["pending", "granted", "quiet", "revoked", "error", "other"]

_COMMAND = compile_lazily(r"(?:salloc|sbatch|srun|scancel|squeue|scontrol|sbcast): (.*)")
_ERROR = compile_lazily(r"(?:error|fatal): (?:.*(?:failed|allocate resources): )?(.+)")
_USAGE = compile_lazily(r"((?:unrecognized|invalid|ambiguous) option.*|option .* requires .*)")
_KINDS: tuple[tuple[Kind, str, str], ...] = (
    (
        "pending",
        r"Pending job allocation (?:JobId=)?(\d+)",
        "job {job} is waiting for nodes (Ctrl-C cancels it)",
    ),
    ("granted", r"Granted job allocation (\d+)", "job {job}: nodes allocated"),
    ("revoked", r"Job allocation (\d+) has been revoked", ""),
    ("revoked", r"Job (\d+) has exceeded its time limit", ""),
    ("revoked", r"Job (?:aborted due to signal|has been cancelled)()", ""),
    (
        "quiet",
        r"Requested partition configuration not available now()|Required node not available()",
        "not enough matching nodes are available right now: some may be down, drained or reserved, "
        "which `sinfo -R` says",
    ),
    (
        "quiet",
        r"job (\d+) (?:queued and waiting for|has been allocated) resources"
        r"|(?:Relinquishing job allocation|Waiting for resource configuration|Nodes \S+ are ready)",
        "",
    ),
)
"""What Slurm's commands say: the kind, the message with the job that it names, what is shown."""

_NOT_SENT = compile_lazily("|".join(words for words, unsent in CONTROLLER_FAULTS.items() if unsent))

_NO_CLUSTER = compile_lazily(r"resolve_ctls_from_dns_srv|establish a configuration source")
"""Errors of Slurm's commands on a machine that belongs to no cluster."""

_NOT_RELEASED = compile_lazily(
    r"Unable to clean up job allocation (?:JobId=)?(\d+)(?: SLUID=\w+)?: (.+)"  # 26.05 has these
)

_CONTEXT_LINES = 15

_ASSOCIATIONS = "`sacctmgr show associations user=$USER format=account,qos` lists yours"
_HINTS = {
    r"[Ii]nvalid partition": "`sinfo` lists the partitions; name one with --partition",
    r"[Nn]ode count specification|[Nn]ode configuration is not available|generic resource"
    r"|Memory specification|More processors requested|PartitionConfig|PartitionNodeLimit": (
        "ask for less: --nodes, cluster.cpus-per-task, gpus-per-node; `sinfo -N -l` shows what "
        "there is"
    ),
    r"[Rr]eservation": "`scontrol show reservation` lists them; name one with --reservation",
    r"[Ii]nvalid feature": "`sinfo -o '%N %f'` lists those of nodes; name them with --constraint",
    r"[Ii]nvalid qos": f"{_ASSOCIATIONS}; name one with --qos",
    r"[Ii]nvalid account|account/partition|AssocGrp|AssocMax|QOS": (
        f"name an account that may use this partition with --account; {_ASSOCIATIONS}"
    ),
    r"--time spec|time limit|PartitionTimeLimit": (
        "ask for less time: --time; `sinfo` shows the limits"
    ),
    r"[Ii]nvalid node name|node list|[Ii]nvalid host": (
        "check the names in --exclude, cluster.exclude and SALLOC_OPTS; `sinfo -N` lists the nodes"
    ),
    r"contact slurm controller|configuration source|slurm.conf|resolve_ctls|Zero Bytes"
    r"|munge|Protocol authentication": (
        "Slurm does not answer here: go to a login node of the cluster, or use --allocation local"
    ),
    r"invalid option|unrecognized option|[Ii]nvalid --|requires an argument": (
        "check cluster.salloc-args and SALLOC_OPTS; `salloc --help` lists the options"
    ),
}


class Message(NamedTuple):
    """One line of a Slurm command."""

    kind: Kind
    """``other`` is not Slurm's."""
    text: str
    shown: str
    job_id: str = ""


def parse_message(line: str) -> Message:
    """Parse one line that a Slurm command wrote to standard error."""
    spoken = _COMMAND.fullmatch(line.rstrip())
    if spoken is None:
        return Message("other", line, line)
    text = spoken[1]
    if error := _ERROR.fullmatch(text) or _USAGE.fullmatch(text):
        text, shown = error[1], ""
        if held := _NOT_RELEASED.match(text):
            job, why = held.groups()
            shown = f"job {job} still holds its nodes ({why}); scancel {job} releases them"
        elif "retrying" in text:
            shown = f"Slurm does not answer: {text} (Ctrl-C gives up)"
        return Message("error", text, shown)
    for kind, pattern, shown in _KINDS:
        match = re.match(pattern, text)
        if match is not None:
            job_id = match[1] or ""
            return Message(kind, text, shown.format(job=job_id), job_id)
    return Message("other", line, line)


def find_unsent_reason(stderr: str) -> str:
    """Return why a request cannot have reached Slurm's controller; empty where it may have."""
    reason = ""
    for message in map(parse_message, stderr.splitlines()):
        if message.kind == "error" and _NOT_SENT.search(message.text):
            reason = message.text
        elif message.kind != "other":
            return ""
    return reason


def is_time_up(lines: Sequence[str]) -> bool:
    """Return whether salloc reports that the time limit has ended the job."""
    return any("exceeded its time limit" in parse_message(line).text for line in lines)


def make_failure(lines: Sequence[str], code: int, log_dir: str) -> StagerError:
    """Return the error for a command that asked for nodes and ended without a result."""
    messages = [parse_message(line) for line in lines]
    errors = _list_texts(messages, "error")
    context = _list_texts(messages, "other")[-_CONTEXT_LINES:]
    jobs = {message.kind: message.job_id for message in reversed(messages) if message.job_id}
    granted, revoked = jobs.get("granted"), jobs.get("revoked")
    if granted:
        reason = "Slurm revoked the allocation" if revoked else f"exit status {code}"
        what = f"job {granted} ended without a result: {'; '.join([reason, *errors])}"
        hint = f"`scontrol show job {granted}` may say why; what the nodes wrote is in {log_dir}"
        return JobError(what, hint=hint, context=context)
    if "Job has been cancelled" in _list_texts(messages, "revoked"):
        hint = f"`sacct --jobs={revoked}` may show by whom; start it again"
        what = f"job {revoked} was cancelled before it had nodes"
        return JobError(what, hint=hint, context=context)
    refusal = "; ".join(dict.fromkeys(errors)) or f"exit status {code}"
    return make_no_cluster_error(lines) or StagerError(
        f"Slurm did not allocate nodes: {refusal}", hint=find_hint(" ".join(lines)), context=context
    )


def _list_texts(messages: Iterable[Message], kind: Kind) -> list[str]:
    return [message.text for message in messages if message.kind == kind]


def make_no_cluster_error(lines: Sequence[str]) -> StagerError | None:
    """Return the error for commands that found no cluster; None where they found one."""
    if not any(_NO_CLUSTER.search(line) for line in lines):
        return None
    return StagerError(
        "Slurm's commands are installed here, but no cluster answers",
        hint=find_hint(" ".join(lines)),
        context=lines[-_CONTEXT_LINES:],
    )


def find_hint(text: str) -> str:
    """Return what to do about a refusal of Slurm's."""
    for pattern, hint in _HINTS.items():
        if re.search(pattern, text):
            return hint
    return "the message is Slurm's own; `sinfo` shows its nodes, `squeue --me` your waiting jobs"


# --- The state that Slurm knows of a job that has left no result, and the way the job ended ------

_TIMEOUT_SECONDS = 10.0


def read_job_state(job_id: str, runner: Runner = run, *, begun: float | None = None) -> str:
    """Return the job's state in Slurm's words; empty where Slurm does not know it.

    A job that was submitted after ``begun`` is another one of the same number.
    """
    if not job_id.isdigit():
        return ""
    sacct = ["sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,Submit"]
    scontrol = ["scontrol", "-o", "show", "job", job_id]
    for argv in (sacct, scontrol):  # the first remembers for months, the second for minutes
        printed = query_output(argv, runner)
        known, submitted = parse_job_state(printed), parse_submit_time(printed)
        if known:
            is_another = begun and submitted and begun + CLOCK_SECONDS < submitted
            return "" if is_another else known
    return ""


def query_output(argv: list[str], runner: Runner) -> str:
    """Return what a command prints; empty if it is missing or fails."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        return runner(argv, timeout=_TIMEOUT_SECONDS, check=False).stdout
    except StagerError:
        return ""


def parse_job_state(printed: str) -> str:
    """Return the state in what ``sacct -P -o State,Submit`` or ``scontrol show job`` prints."""
    field = re.search(r"\bJobState=([A-Z_]+)", printed)
    if field:
        return field[1]
    word = re.split("[ |]", printed.strip())[0]  # sacct: "CANCELLED by 1000"
    return word if re.fullmatch(r"[A-Z_]+", word) else ""
