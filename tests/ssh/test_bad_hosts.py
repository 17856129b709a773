"""Hosts that hang, break off or cannot reach each other: each has a name, and the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import until
from tests.support.provoking import Said
from tests.support.ssh_hosts import SshHosts, start_sleeping, words

ALL = "node[01-04]"
NOBODY = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
"""The end of ``ip neigh replace ADDRESS``: what is sent there is lost."""


@contextmanager
def user(hosts: SshHosts, node: str, name: str) -> Iterator[None]:
    """Let a host have another user, with a home of its own, while the block runs."""
    line = f"{name}:*:4242:65534::/tmp/{name}:/bin/sh"
    make = f"install -d -o 4242 /tmp/{name} && (cat /etc/passwd; echo '{line}') >/tmp/passwd"
    hosts.on(node, "sh", "-c", f"{make} && mount --bind /tmp/passwd /etc/passwd")
    try:
        yield
    finally:
        hosts.on(node, "sh", "-c", f"umount /etc/passwd; rm -rf /tmp/passwd /tmp/{name}")


@pytest.mark.full
def test_another_user(hosts: SshHosts, project: Path) -> None:
    listed = "node01,ann@node02"
    with user(hosts, "node02", "ann"):
        options = ("--hosts", listed, "--log-dir", str(hosts.hidden / "ann"))
        ran = hosts.stager("run", *options, "--", "train.py", folder=project)
        assert ran.code == 0, ran.talk
        assert ran.report["nodes"] == ["node01", "ann@node02"]
        owner = hosts.on("node02", "sh", "-c", "stat -c %U /tmp/stager-4242/envs/*")
        assert set(owner.split()) == {"ann"}
        deep = hosts.stager("verify", "--deep", "--hosts", listed, folder=project)
        assert deep.code == 0, deep.talk
        [log] = (hosts.hidden / "ann").glob("*.ann@node02.1.out")
        assert "home=/tmp/ann" in log.read_text()
        hosts.clean(listed, project)
        assert hosts.on("node02", "sh", "-c", "ls -d /tmp/stager-4242/envs/*", check=False) == ""


@pytest.mark.full
def test_a_user_whom_the_host_does_not_know(hosts: SshHosts, project: Path) -> None:
    done = hosts.stager("verify", "--hosts", "node01,nobodyhere@node02", folder=project)
    assert done.code == 3
    (bad,) = [node for node in done.report["nodes"] if node["problems"]]
    assert bad["node"] == "nobodyhere@node02"
    assert "Permission denied" in words(bad["problems"])
    assert "ssh-copy-id nobodyhere@node02" in done.talk
    assert "write user@host where your user name there is another one" in done.talk


@pytest.mark.full
def test_an_sshd_that_hangs(hosts: SshHosts, project: Path) -> None:
    """It takes the connection, and never says a word."""
    with hosts.stopped_sshd("node02"):
        done = hosts.stager("verify", "--hosts", ALL, "--min-nodes", "3", folder=project)
    assert done.code == 0, done.talk
    assert "node02 is left out: the host cannot be reached over ssh" in done.talk
    assert "timed out" in done.talk
    assert until(lambda: not (hosts.clients() or any(map(hosts.agents, hosts.nodes))))


def test_ctrl_c_while_hosts_are_reached(hosts: SshHosts, project: Path) -> None:
    with hosts.stopped_sshd("node02"), hosts.stopped_sshd("node03"):
        started = hosts.start("verify", "--hosts", ALL, folder=project)
        assert until(lambda: len(hosts.clients()) == 4 and bool(hosts.agents("node04"))), hosts.end(
            started
        ).talk
        os.killpg(started.pid, signal.SIGINT)
        done = hosts.end(started)
        assert done.code == 130, done.talk
        assert "timed out" not in done.talk  # the logins would still have hung for a while
        assert until(lambda: not hosts.clients(), 10)  # they do not hang on by themselves
    assert until(lambda: not any(hosts.agents(node) for node in hosts.nodes))


def test_a_connection_that_breaks_while_ranks_run(hosts: SshHosts, project: Path) -> None:
    """The host goes on, and so would its ranks."""
    started = start_sleeping(hosts, project)
    sessions = hosts.sshd("node03", session=True)
    hosts.on("node03", "kill", "-KILL", *sessions)
    done = hosts.end(started)
    assert done.code == 3, done.talk
    assert done.report["first_failure"]["node"] == "node03", done.talk
    assert done.report["first_failure"]["class"] == "node-failure"
    assert "the ssh connection to the host broke" in done.talk
    assert until(lambda: not any(hosts.agents(node) for node in hosts.nodes))


@contextmanager
def silent(hosts: SshHosts, node: str) -> Iterator[None]:
    """Lose what a host and the driver send to each other while the block runs.

    TCP on the host gives up in seconds, not in a quarter of an hour.
    """
    retries = Path("/proc/sys/net/ipv4/tcp_retries2")
    before = hosts.on(node, "cat", str(retries)).strip()
    hosts.on(node, "sh", "-ec", f"echo 3 >{retries}")
    link = hosts.link(node)
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", link, "up"], check=True)
        hosts.on(node, "sh", "-c", f"echo {before} >{retries}")


@pytest.mark.full
def test_a_network_that_is_gone_while_ranks_run(hosts: SshHosts, project: Path) -> None:
    """Neither side hears of it; the host's ranks, which print nothing, do not run on for hours."""
    logs = hosts.hidden / "silent"
    started = start_sleeping(hosts, project, "--log-dir", str(logs))
    assert until(lambda: sum("home=" in log.read_text() for log in logs.glob("*.out")) == 4)
    with silent(hosts, "node03"):
        assert until(lambda: not hosts.agents("node03"), 120)
        done = hosts.end(started)
    assert done.code == 3, done.talk
    assert done.report["first_failure"]["node"] == "node03", done.talk
    assert "the ssh connection to the host broke" in done.talk
    assert until(lambda: not any(hosts.agents(node) for node in hosts.nodes))


Verify = Callable[[str], Said]


@contextmanager
def driver_on(hosts: SshHosts, node: str, project: Path) -> Iterator[Verify]:
    """Verify from one of the hosts, whose own name is a loopback address there."""
    place, there = "/tmp/login", hosts.entering(node)
    hosts.on(node, "mkdir", "-p", f"{place}/home")
    packed = subprocess.run(
        ["tar", "-c", "-C", str(project.parent), project.name, "offline"],
        stdout=subprocess.PIPE,
        check=True,
    )
    subprocess.run([*there, "tar", "-x", "-C", place], input=packed.stdout, check=True)
    address = hosts.address(node)
    config = hosts.state_dir / "ssh_config"
    inward = config.read_text().replace(f"HostName {address}\n", "HostName 127.0.1.1\n")
    names = f"sed 's/^{address} /127.0.1.1 /' /etc/hosts >{place}/hosts"
    hosts.on(node, "sh", "-c", f"{names} && mount --bind {place}/hosts /etc/hosts")
    variables = (f"HOME={place}/home", f"OFFLINE_ROOT={place}/offline")
    before = [*there, "env", "-C", f"{place}/{project.name}", *variables]

    [bundle] = (project.parent / "offline" / "bundles").glob("*.pkgs.tar")
    options = ("verify", "--bundle", f"{place}/offline/bundles/{bundle.name}", "--hosts")

    def verify(listed: str) -> Said:
        return hosts.end(hosts.start(*options, listed, folder=project, before=before))

    try:
        with hosts.changed(config, inward):
            yield verify
    finally:
        hosts.on(node, "sh", "-c", f"umount /etc/hosts; rm -rf {place}")


@pytest.mark.full
def test_a_name_that_leads_to_this_machine(hosts: SshHosts, project: Path) -> None:
    """The job is started on one of its hosts, as on Debian: the others cannot use that address."""
    hosts.clean("node[01-02]", project)
    with driver_on(hosts, "node01", project) as verify:
        hosts.on("node01", "ip", "address", "add", "192.0.2.7/32", "dev", "eth0")
        try:
            head = verify("node[01-02]")
            behind = verify("node02,node01")
        finally:
            hosts.on("node01", "ip", "address", "del", "192.0.2.7/32", "dev", "eth0")
        done = verify("node[01-02]")
    assert head.code == 3
    assert "node01: this host has no address that other nodes can be given" in head.talk
    assert "eth0 192.0.2.7" in head.talk
    assert behind.code == 0, behind.talk
    assert "ssh to 2 nodes: node02 cannot see the bundle; no relay, as node01 has" in behind.talk
    assert done.code == 0, done.talk
    address = done.report["nodes"][0]["address"]
    assert not address.startswith("127.")
    assert "node01: ssh reaches it at 127.0.1.1, so it is this machine" in done.talk
    assert f"the others are to reach it at {address}" in done.talk


@contextmanager
def apart(hosts: SshHosts, node: str, other: str) -> Iterator[None]:
    """Lose what two hosts send to each other, as a firewall that drops does."""
    pairs = ((node, hosts.address(other)), (other, hosts.address(node)))
    for place, there in pairs:
        hosts.on(place, "ip", "neigh", "replace", there, *NOBODY)
    try:
        yield
    finally:
        for place, there in pairs:
            hosts.on(place, "ip", "neigh", "del", there, "dev", "eth0")


@contextmanager
def nothing_but_ssh(hosts: SshHosts, driver: str) -> Iterator[None]:
    """Let hosts answer the driver's ssh and connect to nothing else there."""
    ssh = "ip rule add pref 10 ipproto tcp sport 22 lookup main"
    for node in hosts.nodes:
        hosts.on(node, "sh", "-ec", f"{ssh}; ip rule add pref 11 to {driver} prohibit")
    try:
        yield
    finally:
        for node in hosts.nodes:
            hosts.on(node, "sh", "-c", "ip rule del pref 10; ip rule del pref 11")


@pytest.mark.full
def test_a_firewall_between_hosts(hosts: SshHosts, project: Path) -> None:
    """The bundle comes another way, and it is said which; a deep check names who cannot meet."""
    driver = f"{hosts.address('node01').rpartition('.')[0]}.1"
    hosts.clean(ALL, project)
    with apart(hosts, "node02", "node03"):
        done = hosts.stager("verify", "--hosts", ALL, folder=project)
    assert done.code == 0, done.talk
    for node, other in (("node02", "node03"), ("node03", "node02")):
        assert f"{node} cannot connect to {other} (no answer within 1.5 s)" in done.talk
    hosts.clean(ALL, project)
    with nothing_but_ssh(hosts, driver):
        done = hosts.stager("verify", "--hosts", ALL, folder=project)
    assert done.code == 0, done.talk
    assert "the relay did not reach node01, node02, node03 and 1 more" in done.talk
    assert "nodes cannot connect to this host" in done.talk
    assert "using ssh" in done.talk
    with apart(hosts, "node01", "node03"):
        deep = hosts.stager("verify", "--deep", "--hosts", ALL, folder=project)
    assert deep.code == 3, deep.talk
    [bad] = [node for node in deep.report["nodes"] if node["problems"]]
    assert bad["node"] == "node03"
    assert "the head node cannot be reached" in words(bad["problems"])


@pytest.mark.full
def test_a_host_that_is_lost_while_the_bundle_travels(hosts: SshHosts, project: Path) -> None:
    """The job goes on with the others, if these are enough; its agent waits for a lock."""
    hosts.clean(ALL, project)
    hosts.on("node03", "mkdir", "-p", "-m", "700", "/tmp/stager-0")
    lock = ["flock", "--exclusive", "/tmp/stager-0/.lock", "cat"]
    options = ("--hosts", ALL, "--min-nodes", "3", "--log-dir", str(hosts.hidden / "fewer"))
    with subprocess.Popen([*hosts.entering("node03"), *lock], stdin=subprocess.PIPE) as holder:
        started = hosts.start("run", *options, "--", "train.py", folder=project)
        assert until(lambda: unpacks(hosts.hidden / "fewer")), hosts.end(started).talk
        hosts.on("node03", "kill", "-KILL", *hosts.sshd("node03", session=True))
        done = hosts.end(started)
        holder.communicate()
    assert done.code == 0, done.talk
    assert (done.report["left_out"], done.report["world_size"]) == (["node03"], 3)
    assert "the ssh connection to the host broke" in done.talk
    assert until(lambda: not hosts.agents("node03"))


def unpacks(logs: Path) -> bool:
    """Whether a job has begun to bring the bundle to its hosts."""
    begun = ('"event": "begin"', '"unpack"')
    lines = [line for log in logs.glob("events.*") for line in log.read_text().splitlines()]
    return any(all(word in line for word in begun) for line in lines)
