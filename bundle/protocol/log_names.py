"""The names of a job's files in its log directory, which both sides use."""

from __future__ import annotations

ATTEMPT_MARK = "stager: attempt "  # begins the line in a rank's log below which one begins


def make_events_name(job_id: str) -> str:
    """Return the name of the driver's events, one JSON object in each line."""
    return f"events.{job_id}.jsonl"


def make_order_name(job_id: str) -> str:
    """Return the name of the record of the order in which the ranks' logs grew."""
    return f"order.{job_id}.tsv"


def make_preflight_name(job_id: str) -> str:
    """Return the name of the findings about each node before anything was sent."""
    return f"preflight.{job_id}.txt"


def make_job_name(job_id: str) -> str:
    """Return the name of the job's description."""
    return f"job.{job_id}.json"


def make_wrapper_name(job_id: str) -> str:
    """Return the name of the run wrapper."""
    return f"run_wrapper.{job_id}.py"


def make_stacks_name(job_id: str) -> str:
    """Return the name of the stacks of all ranks, as they were when they were last asked."""
    return f"stacks.{job_id}.json"


def make_stacks_request_name(job_id: str) -> str:
    """Return the name of the file that asks a running job for its stacks."""
    return f"stacks.{job_id}.request"


def make_rank_log_name(job_name: str, job_id: str, node: str, task: int | str) -> str:
    """Return the name of the output of one rank."""
    return f"{job_name}.{job_id}.{node}.{task}.out"


def make_batch_log_name(job_name: str, job_id: str) -> str:
    """Return the name of what the batch script and the driver print."""
    return f"{job_name}.{job_id}.batch.out"
