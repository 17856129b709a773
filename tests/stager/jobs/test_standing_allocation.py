"""The options of Slurm in an allocation that stands already."""

from __future__ import annotations

import pytest

from bundle.protocol.enumerations import Allocation
from stager.config.job_settings import JobOptions
from stager.core.errors import ConfigError
from stager.jobs.allocation import ignored_elsewhere, without_effect

THERE = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_ACCOUNT": "ml",
    "SLURM_JOB_QOS": "normal",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_MEM_PER_NODE": "65536",
    "SLURM_GPUS_PER_NODE": "a100:4",
}


@pytest.mark.parametrize(
    "options",
    [
        JobOptions(),
        JobOptions(partition="gpu", account="ml", qos="normal"),
        JobOptions(nodelist="n[2-3]", exclude="n4"),
        JobOptions(mem="64G", gpus_per_node="a100:4"),
    ],
)
def test_what_the_allocation_has_is_no_contradiction(options: JobOptions) -> None:
    assert list(without_effect(options, THERE)) == []


def test_all_contradictions_are_named_at_once() -> None:
    options = JobOptions(
        partition="cpu", nodelist="n[3-4]", exclude="n1", mem="1T", gpus_per_node="8", account="ml"
    )
    with pytest.raises(ConfigError, match="job 17") as caught:
        list(without_effect(options, THERE))
    assert [line.partition(":")[0] for line in caught.value.context] == [
        "--gpus-per-node 8",
        "--partition cpu",
        "--exclude n1",
        "--nodelist n[3-4]",
        "--mem 1T",
    ]


def test_options_of_slurm_are_said_to_have_no_effect_without_it() -> None:
    options = JobOptions(time="10", mem="3G", partition="cpu", nproc_per_node=2)
    (note,) = ignored_elsewhere(options, Allocation.LOCAL)
    assert note == "no effect with --allocation local: --partition, --time, --mem"
    assert list(ignored_elsewhere(JobOptions(exclude="n1"), Allocation.SSH)) == []


def test_what_nothing_tells_is_said_to_have_no_effect() -> None:
    options = JobOptions(time="10", constraint="a100", salloc_args=("--nice",), reservation="r")
    (note,) = without_effect(options, THERE)
    assert note.startswith("no effect in job 17")
    for option in ("--time", "--constraint", "--salloc-arg", "--reservation"):
        assert option in note
