"""Jobs on real hosts that are reached over ssh: they run as with Slurm, and each end has a name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.processes import until
from tests.support.provoking import Said
from tests.support.ssh_hosts import SshHosts, start_sleeping, words

ALL = "node[01-04]"


def test_all_phases(hosts: SshHosts, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle comes by the relay, results go home, secrets are no arguments; clean removes."""
    verified = hosts.stager("verify", "--hosts", ALL, folder=project)
    assert verified.code == 0, verified.talk
    assert [node["node"] for node in verified.report["nodes"]] == list(hosts.nodes)
    addresses = [node["address"] for node in verified.report["nodes"]]
    assert len(set(addresses)) == 4
    assert not any(address.startswith("127.") for address in addresses)

    monkeypatch.setenv("HF_TOKEN", "hf_" + "q7" * 15)
    monkeypatch.setenv("MINE", "kept")
    options = ("--hosts", ALL, "--log-dir", str(hosts.hidden / "logs"), "--pass-env", "HF_TOKEN")
    ran = hosts.stager("run", *options, "--", "train.py", folder=project)
    assert ran.code == 0, ran.talk
    assert ran.report["world_size"] == 4
    assert (project / "out" / "world.txt").read_text() == "4"
    logs = [log.read_text() for log in (hosts.hidden / "logs").glob("*.node0*.out")]
    assert sum("WORLD_SIZE=4 mine=kept" in text for text in logs) == 4
    assert sum("token is here" in text for text in logs) == 4
    assert not any("token is seen" in text for text in logs)

    hosts.clean(ALL, project)
    assert hosts.on("node02", "sh", "-c", "ls -d /tmp/*/envs/*", check=False) == ""


def bad(done: Said) -> tuple[str, str]:
    """The one host that has problems, and what they are."""
    assert done.code == 3, done.talk
    (found,) = [node for node in done.report["nodes"] if node["problems"]]
    return found["node"], words(found["problems"])


@pytest.mark.full
def test_a_host_that_is_lost_while_ranks_run_and_bad_hosts(hosts: SshHosts, project: Path) -> None:
    """Each has its reason and what to do; the next job goes on with those that are left."""
    started = start_sleeping(hosts, project)
    hosts.lose("node04")
    try:
        done = hosts.end(started)
        assert done.code == 3, done.talk
        assert done.report["first_failure"]["node"] == "node04", done.talk
        assert "the ssh connection to the host broke" in done.talk
        assert until(lambda: not hosts.agents("node01"))
        assert_left_out(hosts, project)
    finally:
        hosts.restore()


def assert_left_out(hosts: SshHosts, project: Path) -> None:
    """A host that is lost, one with another key, and one that does not let the user in."""
    known = hosts.state_dir / "known_hosts"
    lines = dict(line.split(" ", 1) for line in known.read_text().splitlines())
    lines["node03"] = lines["node02"]
    swapped = "".join(f"{node} {key}\n" for node, key in lines.items())
    listed = "node[01-04],nosuch.invalid"
    with (
        hosts.changed(hosts.state_dir / "node02" / "authorized_keys", ""),
        hosts.changed(known, swapped),
    ):
        done = hosts.stager("verify", "--hosts", listed, "--min-nodes", "1", folder=project)
        strict = hosts.stager("verify", "--hosts", "node[01-02]", folder=project)
    assert done.code == 0, done.talk
    for told in (
        "node02 is left out: the host does not let you in without a password",
        "node03 is left out: the host has another key than it had before",
        "node04 is left out: the host cannot be reached over ssh",
        "nosuch.invalid is left out: no host has this name",
        "ssh-copy-id node02",
        "ssh-keygen -R node03",
    ):
        assert told in done.talk, done.talk
    node, why = bad(strict)
    assert node == "node02"
    assert "Permission denied" in why


@pytest.mark.full
def test_two_names_of_one_host(hosts: SshHosts, project: Path) -> None:
    config = hosts.state_dir / "ssh_config"
    text = config.read_text()
    first = text[: text.index("Host node02")]
    with hosts.changed(config, first.replace("Host node01", "Host twin") + text):
        done = hosts.stager("verify", "--hosts", "node01,twin", folder=project)
    node, why = bad(done)
    assert node == "twin"
    assert "it is the same host as node01" in why


@pytest.mark.full
def test_an_agent_that_is_killed(hosts: SshHosts, project: Path) -> None:
    """Usually by the kernel, for memory: the connection is sound."""
    started = start_sleeping(hosts, project)
    lines = hosts.on("node03", "ps", "-ww", "-eo", "pid,args").splitlines()
    shown = [line.split(maxsplit=2) for line in lines if "agent " in line]
    [agent] = [number for number, program, _ in shown if "python" in program]
    hosts.on("node03", "kill", "-KILL", agent)
    done = hosts.end(started)
    assert (done.code, done.report["first_failure"]["node"]) == (3, "node03"), done.talk
    assert "connection" not in done.talk
    assert done.report["first_failure"]["class"] == "killed"


def test_ctrl_c(hosts: SshHosts, project: Path) -> None:
    started = start_sleeping(hosts, project)
    os.killpg(started.pid, signal.SIGINT)
    done = hosts.end(started)
    assert done.code == 130, done.talk
    assert until(lambda: not any(hosts.agents(node) for node in hosts.nodes))
