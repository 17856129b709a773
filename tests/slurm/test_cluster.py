"""scripts/cluster: nodes that are apart and offline, and nothing left when they are gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.cluster import (
    SCRIPT,
    STATES,
    Cluster,
    make_cluster,
    remove_cluster,
    script,
)
from tests.support.needs import needs
from tests.support.processes import living, until

pytestmark = pytest.mark.full

NAMESPACES = ("net", "mnt", "uts", "ipc", "pid")
CONNECT = """
import errno, socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60).close()
    print("connected")
except OSError as error:
    print(errno.errorcode.get(error.errno, error))
"""
OTHERS_PLACES = ("/var/tmp/", "/tmp/", "/run/netns", "/run/sshd")
"""Where tests that run beside these make and mount things."""
OTHERS_LINKS = ("sc", "ar")
"""How the names of interfaces and of network namespaces begin that such tests make: those of other
clusters, and those of tests/trainer/network."""


@pytest.fixture
def name() -> Iterator[str]:
    """Of a cluster that the test makes itself."""
    needs("slurm")
    chosen = f"test-{os.getpid()}-own"
    yield chosen
    remove_cluster(chosen)


def links() -> set[str]:
    """Interfaces on the login side."""
    found = json.loads(subprocess.check_output(["ip", "-j", "link"], text=True))
    return {link["ifname"] for link in found}


def bridge_of(name: str) -> str:
    """The interface with the address that the cluster's nodes know the login side by."""
    address = (STATES / name / "subnet").read_text().strip() + ".1"
    found = json.loads(subprocess.check_output(["ip", "-j", "address"], text=True))
    (bridge,) = [
        link["ifname"]
        for link in found
        if any(one.get("local") == address for one in link["addr_info"])
    ]
    return str(bridge)


def inhabited() -> set[str]:
    """Every network and mount namespace that a process is in, one that is no mere zombie."""
    found = set()
    for process in Path("/proc").iterdir():
        for kind in ("net", "mnt"):
            try:
                found.add(os.readlink(process / "ns" / kind))
            except OSError:  # not a process, or one that has ended
                continue
    return found


class Traces:
    """What a cluster that stands has on this machine, to be looked for when it is gone.

    Its namespaces are held open meanwhile: else what somebody else makes may get their numbers.
    """

    def __init__(self, name: str, kept: ExitStack) -> None:
        self.state = STATES / name
        self.bridge = bridge_of(name)
        self.namespaces = set()
        for node in (self.state / "nodes").read_text().split():
            init = (self.state / node / "init").read_text().strip()
            for path in (f"/proc/{init}/ns/net", f"/proc/{init}/ns/mnt"):
                kept.callback(os.close, os.open(path, os.O_RDONLY))
                self.namespaces.add(os.readlink(path))
        assert self.namespaces <= inhabited()
        assert self.bridge in links()

    def assert_gone(self) -> None:
        assert not self.state.exists()
        assert living(self.state) == []
        assert not {link for link in links() if link.startswith(self.bridge)}
        assert not self.namespaces & inhabited()


def machine(name: str) -> dict[str, object]:
    """What a cluster may not change outside of its own.

    Of what tests that run beside these may make, only what has the cluster's name counts.
    """
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    namespaces = subprocess.check_output(["ip", "netns"], text=True).splitlines()
    others = {STATES.name, *(Path(place).name for place in OTHERS_PLACES)}
    return {
        "mounts": [
            line for line in mounts if name in line or not line.split()[1].startswith(OTHERS_PLACES)
        ],
        "hosts": Path("/etc/hosts").read_text(),
        "links": sorted(link for link in links() if not link.startswith(OTHERS_LINKS)),
        "namespaces": [line for line in namespaces if not line.startswith(OTHERS_LINKS[1:])],
        "default route": subprocess.check_output(["ip", "route", "show", "default"], text=True),
        "forwarding": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "run": sorted(entry for entry in os.listdir("/run") if entry not in others),
        "slurm": sorted(os.listdir("/etc/slurm")) if Path("/etc/slurm").exists() else [],
    }


def test_nodes_are_apart(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster.nodes
    for place in ("/tmp", "/dev/shm"):
        cluster.on(first, ["touch", f"{place}/{cluster.name}"])
        assert cluster.name not in cluster.on(second, ["ls", place]).stdout.split()
        assert not Path(place, cluster.name).exists()
        cluster.on(first, ["rm", f"{place}/{cluster.name}"])
    assert cluster.on(first, ["ls", "-d", str(tmp_path)], check=False).returncode  # ours
    assert cluster.on(first, ["hostname"]).stdout.strip() == first
    assert sorted(cluster.on(first, ["ls", "/sys/class/net"]).stdout.split()) == ["eth0", "lo"]
    assert cluster.on(first, ["cat", "/proc/1/comm"]).stdout.strip() == "bash"
    seen = cluster.on(first, ["sh", "-c", "cat /proc/*/comm"], check=False).stdout  # some end
    assert "slurmd" in seen
    assert "slurmctld" not in seen
    apart = {
        (kind, cluster.on(node, ["readlink", f"/proc/1/ns/{kind}"]).stdout)
        for node in cluster.nodes
        for kind in NAMESPACES
    }
    assert len(apart) == len(NAMESPACES) * 3


def test_nodes_are_offline_and_the_login_side_is_not(cluster: Cluster) -> None:
    first, second, _ = cluster.nodes
    subnet = cluster.address(first).rpartition(".")[0]
    outside = ["192.0.2.1", "1.1.1.1"]
    link = json.loads(subprocess.check_output(["ip", "-j", "-4", "address"], text=True))
    outside += [
        one["local"]
        for interface in link
        for one in interface["addr_info"]
        if not one["local"].startswith(("127.", "10.213."))
    ]

    def connect(address: str, port: int) -> str:
        argv = ["python3", "-c", CONNECT, address, str(port)]
        return cluster.on(first, argv).stdout.strip()

    for address in outside:
        assert connect(address, 443) == "ENETUNREACH", address  # nothing is sent and waited for
    routes = cluster.on(first, ["ip", "route"]).stdout.splitlines()
    assert [route.split()[0] for route in routes] == [f"{subnet}.0/24"]
    assert cluster.on(first, ["ip", "-6", "route", "show", "default"]).stdout == ""
    # Names of nodes are known to each other, and each is found where it says it is.
    assert connect(second, 6818) == "connected"
    names = cluster.on(first, ["getent", "ahostsv4", second]).stdout.split()
    assert names[0] == cluster.address(second)
    assert subprocess.run(["ip", "route", "get", "192.0.2.1"], check=False).returncode == (
        0 if subprocess.check_output(["ip", "route", "show", "default"]) else 2
    )


def test_a_lost_node_takes_its_processes_with_it_and_comes_back(cluster: Cluster) -> None:
    node = cluster.nodes[2]
    mark = f"86413.{os.getpid()}"  # seconds; nobody else sleeps just so long
    argv = ["srun", f"--nodelist={node}", "sleep", mark]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as srun:
        try:
            on_node = [*cluster.entering(node), "pgrep", "-f", mark]
            assert until(lambda: subprocess.run(on_node, check=False).returncode == 0)
            cluster.on(node, ["touch", "/tmp/mine"])
            cluster.lose(node)
            assert cluster.slurmd(node) is None
            assert [line for line in living(mark) if not line.startswith("srun ")] == []
            # Its exit code is 0 all the same, in 22.05 at least.
            assert f"Node failure on {node}" in srun.communicate(timeout=900)[1]
        finally:
            srun.kill()
    script("up", "--name", cluster.name)
    cluster.wait_state(node, "idle")
    assert cluster.on(node, ["ls", "/tmp"]).stdout == ""
    assert cluster.run(["srun", "-N3", "hostname"]).stdout.split().count(node) == 1


def test_up_twice_is_harmless_and_other_options_are_refused(cluster: Cluster) -> None:
    before = [cluster.slurmd(node) for node in cluster.nodes]
    script("up", "--name", cluster.name)
    script("up", "--name", cluster.name, "--nodes", "3", "--cpus", "4")
    assert [cluster.slurmd(node) for node in cluster.nodes] == before
    refused = script("up", "--name", cluster.name, "--nodes", "2", check=False)
    assert refused.returncode == 1
    assert "other options: --nodes 3 --cpus 4" in refused.stderr
    shown = script("env", "--name", cluster.name).stdout
    assert script("--name", cluster.name, "env").stdout == shown
    assert shown == f"export SLURM_CONF={cluster.env['SLURM_CONF']}\n"


@pytest.mark.parametrize("end", ["with a job", "all killed"])
def test_down_leaves_nothing(name: str, end: str, tmp_path: Path) -> None:
    before = machine(name)
    hidden = Path("/var/tmp") / f"hidden-{name}"
    (hidden / "inner").mkdir(parents=True)
    with ExitStack() as kept:
        kept.callback(shutil.rmtree, hidden)
        own = make_cluster(name, "--nodes", "2", "--cpus", "2", "--hide", str(hidden))
        assert own.on("node01", ["ls", str(hidden)]).stdout == ""
        assert os.listdir(hidden) == ["inner"]
        job = subprocess.Popen(["srun", "-N2", "-c2", "sleep", "3600"], env=os.environ | own.env)
        assert until(lambda: own.state("node02") == "allocated")
        traces = Traces(name, kept)
        if end == "all killed":
            for program in (b"slurmctld", b"slurmd", b"munged", b"unshare"):
                kill_all(program, own.state_dir)
            job.kill()
        down = script("down", "--name", name)
        assert ("cancelling jobs" in down.stderr) == (end == "with a job")
        assert job.wait(timeout=900) != 0
        traces.assert_gone()
    assert machine(name) == before
    assert "is down" in script("down", "--name", name).stderr


def kill_all(program: bytes, state: Path) -> None:
    for process in Path("/proc").iterdir():
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if line.startswith(program + b"\0") and os.fsencode(state) in line:
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)


def stand_in(folder: Path, program: str, shell: str) -> dict[str, str]:
    """PATH with a program of that name in front, which is what breaks."""
    folder.mkdir()
    (folder / program).write_text(f"#!/bin/sh\n{shell}\n")
    (folder / program).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_down_after_an_up_that_was_killed(name: str) -> None:
    env = stand_in(Path("/var/tmp") / f"stager-{name}", "slurmd", "sleep 3600")
    before = machine(name)
    with subprocess.Popen(
        [str(SCRIPT), "up", "--name", name], env=os.environ | env, stderr=subprocess.PIPE
    ) as up:
        made = STATES / name / "node01" / "made"
        assert until(made.exists)
        up.kill()
    bridge = bridge_of(name)
    assert living(STATES / name)
    script("down", "--name", name)
    assert not (STATES / name).exists()
    # A child that the killed one had just begun may still find out that the node is gone.
    assert until(lambda: not living(STATES / name)), living(STATES / name)
    assert not {link for link in links() if link.startswith(bridge)}
    assert machine(name) == before


def test_what_is_refused(name: str, tmp_path: Path) -> None:
    """A wrong command line, missing rights, and missing programs."""

    def refused(*argv: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        named = [] if "--name" in argv else ["--name", name]
        done = subprocess.run(
            [*argv, *named],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not (STATES / name).exists()
        return done.returncode, done.stderr

    cluster = str(SCRIPT)
    few = tmp_path / "bin"
    few.mkdir()
    for program in ("bash", "dirname", "basename", "id", "cksum", "sort"):
        (few / program).symlink_to(str(shutil.which(program)))
    missing = refused(cluster, "up", env={"PATH": str(few)})
    assert "srun" in missing[1].splitlines()[0]
    assert "apt-get install" in missing[1]
    unprivileged = ("setpriv", "--bounding-set=-sys_admin")
    for (code, said), expected in (
        (missing, (1, "not found:")),
        (refused("unshare", "--user", cluster, "up"), (1, "must be run as root")),
        (refused(*unprivileged, cluster, "up"), (1, "does not let root make namespaces")),
        (refused(cluster, "up", "--nodes", "none"), (1, "--nodes none: give a number from 1 to")),
        (refused(cluster, "up", "--name", "No/Name"), (1, "not a cluster's name")),
        (refused(cluster, "up", "--hide", "/run"), (1, "the nodes need what is in it")),
        (refused(cluster, "down", "--force"), (2, "there is no option --force")),
        (refused(cluster, "status"), (1, "there is no cluster named")),
    ):
        assert code == expected[0]
        assert expected[1] in said
