"""What salloc and sbatch say, as Slurm 22.05 said it: understood, and turned into advice."""

from __future__ import annotations

import pytest

from stager.core.errors import JobError, StagerError
from stager.slurm.messages import (
    find_hint,
    find_unsent_reason,
    is_time_up,
    make_failure,
    parse_message,
)

PARTITION = """\
salloc: error: invalid partition specified: nope
salloc: error: Job submit/allocate failed: Invalid partition name specified
"""
TOO_MUCH = """\
salloc: error: Memory specification can not be satisfied
salloc: Job allocation 7 has been revoked.
salloc: error: Job submit/allocate failed: Requested node configuration is not available
"""
OPTION = """\
salloc: unrecognized option '--nonsense'
Try "salloc --help" for more information
"""
CANCELLED = """\
salloc: Pending job allocation 14
salloc: job 14 queued and waiting for resources
salloc: Job allocation 14 has been revoked.
salloc: Job has been cancelled
salloc: error: Job submit/allocate failed: Job/step already completing or completed
"""
TIME_LIMIT = """\
salloc: Granted job allocation 15
salloc: Job 15 has exceeded its time limit and its allocation has been revoked.
"""
REVOKED = """\
salloc: Granted job allocation 10
salloc: Job allocation 10 has been revoked.
"""
DIED = """\
salloc: Granted job allocation 11
Traceback (most recent call last):
ValueError: what the driver did not expect
salloc: Relinquishing job allocation 11
"""
NO_CLUSTER = """\
salloc: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
salloc: error: fetch_config: DNS SRV lookup failed
salloc: error: _establish_config_source: failed to fetch config
salloc: fatal: Could not establish a configuration source
"""


@pytest.mark.parametrize(
    ("line", "kind", "job_id", "shown"),
    [
        ("salloc: Pending job allocation 9", "pending", "9",
         "job 9 is waiting for nodes (Ctrl-C cancels it)"),
        ("salloc: Granted job allocation 9", "granted", "9", "job 9: nodes allocated"),
        ("salloc: job 9 queued and waiting for resources", "quiet", "9", ""),
        ("salloc: Waiting for resource configuration", "quiet", "", ""),
        ("salloc: Relinquishing job allocation 9", "quiet", "", ""),
        ("salloc: Job allocation 9 has been revoked.", "revoked", "9", ""),
        ("salloc: Job aborted due to signal", "revoked", "", ""),
        ("salloc: error: Invalid --time specification", "error", "", ""),
        ("salloc: Requested partition configuration not available now", "quiet", "",
         "not enough matching nodes are available right now: some may be down, drained or "
         "reserved, which `sinfo -R` says"),
        ("salloc: error: cannot stat file /x: No such file, retrying in 1sec", "error", "",
         "Slurm does not answer: cannot stat file /x: No such file, retrying in 1sec "
         "(Ctrl-C gives up)"),
        ("salloc: error: Unable to clean up job allocation 9: Unable to contact", "error", "",
         "job 9 still holds its nodes (Unable to contact); scancel 9 releases them"),
        ("salloc: error: Unable to clean up job allocation JobId=9 SLUID=s8Q5M8JPEWNT00: refused",
         "error", "", "job 9 still holds its nodes (refused); scancel 9 releases them"),
        ("salloc: something new", "other", "", "salloc: something new"),
    ],
)  # fmt: skip
def test_single_lines(line: str, kind: str, job_id: str, shown: str) -> None:
    told = parse_message(line)
    assert (told.kind, told.job_id) == (kind, job_id)
    assert told.shown == shown


ABSENT = "error: Job submit/allocate failed: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (f"salloc: {ABSENT}\n", "Unable to contact slurm controller (connect failure)"),
        (
            "a line of a plugin's\nsbatch: error: Batch job submission failed: "
            "Slurm backup controller in standby mode",
            "Slurm backup controller in standby mode",
        ),
        # It may have been heard.
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", ""),
        ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", ""),
        (f"salloc: Pending job allocation 9\nsalloc: {ABSENT}", ""),
        (f"sbatch: error: Message receive failure\nsbatch: {ABSENT}", ""),
        ("sbatch: error: Batch job submission failed: Invalid account", ""),
        ("", ""),
    ],
)
def test_what_has_not_reached_the_controller(said: str, fault: str) -> None:
    assert find_unsent_reason(said) == fault


@pytest.mark.parametrize(
    ("text", "error", "message", "hint"),
    [
        (PARTITION, StagerError, "nodes: invalid partition specified: nope", "sinfo"),
        (TOO_MUCH, StagerError, "nodes: Memory specification", "ask for less"),
        (OPTION, StagerError, "unrecognized option '--nonsense'", "SALLOC_OPTS"),
        (CANCELLED, JobError, "job 14 was cancelled before it had nodes", "sacct --jobs=14"),
        (TIME_LIMIT, JobError, "job 15 ended without a result: Slurm revoked the", "scontrol"),
        (REVOKED, JobError, "job 10 ended without a result: Slurm revoked the", "/logs"),
        (DIED, JobError, "job 11 ended without a result: exit status 1", "/logs"),
        ("", StagerError, "Slurm did not allocate nodes: exit status 1", "squeue --me"),
        (NO_CLUSTER, StagerError, "Slurm's commands are installed here, but no cluster answers",
         "--allocation local"),
    ],
)  # fmt: skip
def test_why_there_is_no_result(
    text: str, error: type[StagerError], message: str, hint: str
) -> None:
    found = make_failure(text.splitlines(), 1, "/logs")
    assert type(found) is error
    assert message in found.message
    assert hint in found.hint
    assert "has been revoked" not in found.message
    assert is_time_up(text.splitlines()) is (text == TIME_LIMIT)
    context = {NO_CLUSTER: NO_CLUSTER.splitlines(), DIED: DIED.splitlines()[1:3]}
    context[OPTION] = OPTION.splitlines()[1:]  # what is not Slurm's
    assert list(found.context) == context.get(text, [])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("salloc: error: Job submit/allocate failed: Invalid node name specified", "--exclude"),
        ("sbatch: error: Invalid generic resource (gres) specification", "gpus-per-node"),
        ("salloc: error: Invalid --time specification", "--time"),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", "login node"),
        ("sbatch: error: invalid account or account/partition combination", "--account"),
        ("salloc: error: Job submit/allocate failed: Invalid qos specification", "--qos"),
        ("salloc: error: Invalid feature specification", "--constraint"),
        (
            "sbatch: error: Batch job submission failed: Requested reservation is invalid",
            "scontrol",
        ),
        ("salloc: error: s_p_parse_file: cannot stat file /etc/slurm/slurm.conf", "login node"),
    ],
)
def test_hints(text: str, word: str) -> None:
    assert word in find_hint(text)
