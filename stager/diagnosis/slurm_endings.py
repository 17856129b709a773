"""The failures of jobs that Slurm ended, by the driver's words for such ends."""

from __future__ import annotations

from .failure import FirstFailure

_ENDINGS = {
    "time-limit": (
        "time-limit",
        "the time limit was reached, and Slurm ended the job",
        "ask for more with --time (cluster.time); a script that goes on from its checkpoint can "
        "be put into the queue again: stager script --requeue",
    ),
    "cancelled": (
        "killed",
        "the job was cancelled from outside (scancel)",
        "whoever cancelled it knows why; `sacct --jobs=JOB --format=JobID,State` shows by whom",
    ),
    "requeued": (
        "killed",
        "Slurm put the job back into the queue (scontrol requeue, or a node that cannot go on)",
        "it starts again by itself; `squeue --start --jobs=JOB` shows when",
    ),
    "node-failure": (
        "node-failure",
        "a node of the job was lost",
        "leave it out with --exclude, or let the job go on without it: --nodes MIN:MAX",
    ),
    "preempted": (
        "preemption",
        "another job took the nodes (preemption)",
        "submit it with `stager script --requeue`, or in a partition that is not preempted",
    ),
}


def failure(ended_by: str, job_id: str, node: str) -> FirstFailure:
    """Return the failure for an end that Slurm made.

    Args:
        ended_by: the driver's word for it.
        job_id: the allocation.
        node: the node to name; empty for none.
    """
    unknown = f"Slurm ended the job: {ended_by}", "`scontrol show job JOB` may say more"
    kind, cause, hint = _ENDINGS.get(ended_by, ("unknown", *unknown))
    return FirstFailure(
        node=node,
        rank=None,
        exit_code=None,
        kind=kind,
        cause=cause,
        hint=hint.replace("JOB", job_id),
        lines=(),
    )
