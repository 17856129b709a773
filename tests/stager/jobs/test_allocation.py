"""The nodes of a job without an allocation of its own: hosts, and options of Slurm."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.protocol.enumerations import Allocation
from stager.config.job_settings import JobOptions
from stager.config.load import Config
from stager.config.template import make_default_config
from stager.core.errors import ConfigError
from stager.jobs.allocation import (
    Hosts,
    check_options_inside,
    find_hosts,
    list_options_without_slurm,
)

# --- Hosts ----------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_default_config(tmp_path)


def named(config: Config, *hosts: str) -> Config:
    return replace(config, cluster=replace(config.cluster, hosts=hosts))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu9,user@gpu9", "the same host twice: gpu9 and user@gpu9"),
        ("node[01-", "its brackets do not match"),
        ("node[3-1]", "runs backwards"),
        pytest.param(f"node[1-{'1' * 5000}]", "neither a number", id="a number without end"),
        ("node01,-oProxyCommand=x", "cannot be the name of a host"),
        ("node01:2222", "cannot be the name of a host"),
        ("node01,,node02", "an empty name"),
    ],
)
def test_a_list_with_a_mistake_is_refused(config: Config, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        find_hosts(JobOptions(hosts=(text,)), config, {})
    assert caught.value.message.startswith("--hosts")
    assert caught.value.hint


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "OAR_NODEFILE"])
def test_the_job_of_a_batch_system_names_them(
    config: Config, tmp_path: Path, variable: str
) -> None:
    """Such a file has a line for each slot. It counts more than the settings, an option most."""
    file = tmp_path / "node-file"
    file.write_text("n1.cluster\nn1.cluster\nn2.cluster\n")
    env, settings = {variable: str(file)}, named(config, "other[1-2]")
    expected = Hosts(names=("n1.cluster", "n2.cluster"), origin=f"${variable}")
    assert find_hosts(JobOptions(), settings, env) == expected
    by_option = find_hosts(JobOptions(hosts=("n9",)), settings, env)
    assert by_option is not None
    assert by_option.names == ("n9",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"node01 node02\n", "line 1: there is 'node02'"),
        (b"# none\n", "no host"),
        (b"a" * (1 << 20), "too long for a list of hosts"),
    ],
)
def test_a_host_file_with_a_mistake_is_refused(
    config: Config, tmp_path: Path, content: bytes, told: str
) -> None:
    (tmp_path / "hosts").write_bytes(content)
    endless = "too long for a list of hosts"
    for place, said in (("hosts", told), ("none", "No such file"), ("/dev/zero", endless)):
        with pytest.raises(ConfigError, match=said):
            find_hosts(JobOptions(host_file=tmp_path / place), config, {})


def test_a_host_file_may_be_a_pipe_and_come_from_windows(config: Config) -> None:
    """As of ``--host-file <(squeue ...)``; a mark of its encoding is no part of a name."""
    read, write = os.pipe()
    os.write(write, b"\xef\xbb\xbf# ours\r\nnode[01-02] slots=4\r\n\r\n")
    os.write(write, b"ann@node03  # a GPU\r\nnode01 max_slots=2\r\n")
    os.close(write)
    found = find_hosts(JobOptions(host_file=Path(f"/proc/self/fd/{read}")), config, {})
    os.close(read)
    assert found is not None
    assert found.names == ("node01", "node02", "ann@node03")


def test_hosts_to_avoid_are_left_out(config: Config) -> None:
    settings = named(config, "node[01-03]")
    settings = replace(settings, cluster=replace(settings.cluster, exclude="node02"))
    found = find_hosts(JobOptions(exclude="node01"), settings, {})
    assert found == Hosts(("node03",), "[cluster] hosts")
    with pytest.raises(ConfigError, match="all hosts are excluded"):
        find_hosts(JobOptions(exclude="node[01-03]"), settings, {})
    # One host alone may be this machine.
    for text, names in (
        ("localhost", ("localhost",)),
        ("node[1-2],user@gpu9", ("node1", "node2", "user@gpu9")),
    ):
        assert find_hosts(JobOptions(hosts=(text,)), config, {}) == Hosts(names, "--hosts")


# --- Options of Slurm inside an allocation --------------------------------------------------------


THERE = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_ACCOUNT": "ml",
    "SLURM_JOB_QOS": "normal", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_MEM_PER_NODE": "65536",
    "SLURM_GPUS_PER_NODE": "a100:4",
}  # fmt: skip


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
    assert list(check_options_inside(options, THERE)) == []


def test_all_contradictions_are_named_at_once() -> None:
    options = JobOptions(
        partition="cpu", nodelist="n[3-4]", exclude="n1", mem="1T", gpus_per_node="8", account="ml"
    )
    with pytest.raises(ConfigError, match="job 17") as caught:
        list(check_options_inside(options, THERE))
    named = [
        "--gpus-per-node 8",
        "--partition cpu",
        "--exclude n1",
        "--nodelist n[3-4]",
        "--mem 1T",
    ]
    assert [line.partition(":")[0] for line in caught.value.context] == named


def test_options_without_effect_are_named() -> None:
    options = JobOptions(time="10", mem="3G", partition="cpu", nproc_per_node=2)
    (note,) = list_options_without_slurm(options, Allocation.LOCAL)
    assert note == "no effect with --allocation local: --partition, --time, --mem"
    assert list(list_options_without_slurm(JobOptions(exclude="n1"), Allocation.SSH)) == []
    # Nor what nothing tells of an allocation that stands.
    options = JobOptions(time="10", constraint="a100", salloc_args=("--nice",), reservation="r")
    (note,) = check_options_inside(options, THERE)
    assert note.startswith("no effect in job 17")
    for option in ("--time", "--constraint", "--salloc-arg", "--reservation"):
        assert option in note
