"""What Slurm's own commands say on standard error, put in plain words. Pure functions.

The texts are those of ``salloc`` and ``sbatch`` 22.05 to 24.11; what is not known passes through.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..core.errors import JobError, StagerError

Kind = Literal["pending", "unlikely", "granted", "quiet", "revoked", "error", "other"]

_SPEAKER = re.compile(r"(?:salloc|sbatch|srun|scancel|squeue|scontrol|sbcast): (.*)")
_ERROR = re.compile(r"(?:error|fatal): (?:.*(?:failed|allocate resources): )?(.+)")
_USAGE = re.compile(r"((?:unrecognized|invalid|ambiguous) option.*|option .* requires .*)")
_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("pending", re.compile(r"Pending job allocation (\d+)")),
    ("granted", re.compile(r"Granted job allocation (\d+)")),
    ("revoked", re.compile(r"Job allocation (\d+) has been revoked")),
    ("revoked", re.compile(r"Job (\d+) has exceeded its time limit")),
    ("revoked", re.compile(r"Job (?:aborted due to signal|has been cancelled)()")),
    ("unlikely", re.compile(r"Requested partition configuration not available now()")),
    ("quiet", re.compile(r"job (\d+) (?:queued and waiting for|has been allocated) resources")),
    ("quiet", re.compile(r"Relinquishing job allocation (\d+)")),
    ("quiet", re.compile(r"Waiting for resource configuration()")),
    ("quiet", re.compile(r"Nodes \S+ are ready for job()")),
)

_UNSENT = re.compile(r"Unable to contact slurm controller \(connect failure\)|in standby mode")
"""How Slurm's library says that nobody took the request: it had not been sent, or was refused.

After any other fault of the network (a time-out, an answer that was cut) it may have been taken.
"""

_KEPT = re.compile(r"Unable to clean up job allocation (\d+): (.+)")

_HINTS = (
    (
        r"[Ii]nvalid partition",
        "`sinfo` lists the partitions; name one with --partition or cluster.partition",
    ),
    (
        r"[Nn]ode count specification|[Nn]ode configuration is not available"
        r"|generic resource|Memory specification|More processors requested|PartitionConfig"
        r"|PartitionNodeLimit",
        "ask for less: --nodes, cluster.cpus-per-task, gpus-per-node; `sinfo -N -l` shows what "
        "there is",
    ),
    (
        r"[Ii]nvalid account|account/partition|AssocGrp|AssocMax|QOS",
        "name an account that may use this partition with --account; "
        "`sacctmgr show associations user=$USER` lists yours",
    ),
    (
        r"--time spec|time limit|PartitionTimeLimit",
        "ask for less time: --time; `sinfo` shows the limits",
    ),
    (
        r"[Ii]nvalid node name|node list|[Ii]nvalid host",
        "check the names in --exclude, cluster.exclude and SALLOC_OPTS; `sinfo -N` lists the nodes",
    ),
    (
        r"contact slurm controller|configuration source|slurm.conf|resolve_ctls|Zero Bytes"
        r"|munge|Protocol authentication",
        "Slurm does not answer here: go to a login node of the cluster, or use --allocation local",
    ),
    (
        r"invalid option|unrecognized option|[Ii]nvalid --|requires an argument",
        "check cluster.salloc-args and SALLOC_OPTS; `salloc --help` lists the options",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Told:
    """One line of a Slurm command."""

    kind: Kind
    """What it is about; ``quiet`` is of no use to a person, ``other`` is not Slurm's."""
    job_id: str
    """The job it names; empty for none."""
    text: str
    """What it says, without the name of the command."""


def read(line: str) -> Told:
    """Understand one line that a Slurm command wrote to standard error."""
    spoken = _SPEAKER.fullmatch(line.rstrip())
    if spoken is None:
        return Told(kind="other", job_id="", text=line)
    text = spoken[1]
    failed = _ERROR.fullmatch(text) or _USAGE.fullmatch(text)
    if failed is not None:
        return Told(kind="error", job_id="", text=failed[1])
    for kind, pattern in _KINDS:
        found = pattern.match(text)
        if found is not None:
            return Told(kind=kind, job_id=found[1], text=text)
    return Told(kind="other", job_id="", text=line)


def plain(told: Told) -> str:
    """What a person is told of it; empty for nothing."""
    if told.kind == "pending":
        return f"job {told.job_id} waits for its nodes (Ctrl-C gives it up)"
    if told.kind == "unlikely":
        return "Slurm has not that many nodes of this kind now: too few, or some are down"
    if told.kind == "granted":
        return f"job {told.job_id}: the nodes are ours"
    kept = _KEPT.match(told.text) if told.kind == "error" else None
    if kept is not None:
        return f"job {kept[1]} still has its nodes ({kept[2]}); scancel {kept[1]} gives them back"
    if told.kind == "error" and "retrying" in told.text:
        return f"Slurm does not answer: {told.text} (Ctrl-C gives it up)"
    return told.text if told.kind == "other" else ""


def unsent(said: str) -> str:
    """Why a request for nodes cannot have reached Slurm's controller; empty where it may have.

    Args:
        said: all that the command wrote to standard error.
    """
    told = [one for one in map(read, said.splitlines()) if one.kind != "other"]
    nobody = bool(told) and all(one.kind == "error" and _UNSENT.search(one.text) for one in told)
    return told[-1].text if nobody else ""


def time_is_up(lines: Sequence[str]) -> bool:
    """Whether salloc says that the time limit has ended the job."""
    return any("exceeded its time limit" in read(line).text for line in lines)


def failure(lines: Sequence[str], code: int, log_dir: str) -> StagerError:
    """Why a command that asked for nodes ended without a result.

    Args:
        lines: all that was said on standard error.
        code: its exit status.
        log_dir: where logs are, if there are any.
    """
    told = [read(line) for line in lines]
    granted = next((one.job_id for one in told if one.kind == "granted"), "")
    revoked = next((one.job_id for one in told if one.kind == "revoked" and one.job_id), "")
    errors = [one.text for one in told if one.kind == "error"]
    context = [line for line in lines if read(line).kind == "other"][-15:]
    if granted:
        why = "Slurm took the nodes away" if revoked else f"exit status {code}"
        return JobError(
            f"job {granted} ended without a result: {'; '.join([why, *errors])}",
            hint=f"`scontrol show job {granted}` may say why (a time limit, a lost node, scancel); "
            f"what the nodes wrote is in {log_dir}",
            context=context,
        )
    if any(one.text == "Job has been cancelled" for one in told):
        return JobError(
            f"job {revoked} was cancelled before it had nodes",
            hint=f"`sacct --jobs={revoked}` may show by whom; start it again",
            context=context,
        )
    message = "; ".join(dict.fromkeys(errors)) or f"exit status {code}"
    return StagerError(
        f"Slurm gives no nodes: {message}", hint=hint_for(" ".join(lines)), context=context
    )


def hint_for(text: str) -> str:
    """What to do about a refusal of Slurm's."""
    for pattern, hint in _HINTS:
        if re.search(pattern, text):
            return hint
    return "the message is Slurm's own; `sinfo` shows what it has, `squeue --me` what waits"
