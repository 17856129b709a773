"""Agents and ranks in a container of Apptainer's, on hosts that are reached over ssh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import INSIDE, PROGRAM
from tests.support.ssh_hosts import SshHosts

PLACE = "/usr/local/sbin"
IMAGE = f"{PLACE}/lab.sif"
RANK = f"""\
import os, pathlib, sys
import alpha
inside = os.path.exists({INSIDE!r})
print(f"[RANK {{os.environ['RANK']}}] {{inside}} {{sys.base_prefix}}", flush=True)
pathlib.Path("out").mkdir(exist_ok=True)
pathlib.Path("out", "here").touch()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def sited(hosts: SshHosts) -> Iterator[SshHosts]:
    """Hosts that have Apptainer, but for the last one, and an image, but for the third."""
    write = f"cat >{PLACE}/apptainer <<'END'\n{PROGRAM}END\nchmod 755 {PLACE}/apptainer"
    for node in hosts.nodes:
        hosts.on(node, "mount", "-t", "tmpfs", "none", PLACE)
    try:
        for node in hosts.nodes[:3]:
            hosts.on(node, "sh", "-c", write)
        for node in hosts.nodes[:2]:
            hosts.on(node, "sh", "-c", f"echo image >{IMAGE}")
        yield hosts
    finally:
        for node in hosts.nodes:
            hosts.on(node, "umount", PLACE, check=False)


@pytest.mark.full
def test_agents_and_ranks_run_inside(sited: SshHosts, project: Path) -> None:
    script = project / "inside.py"
    script.write_text(RANK)
    logs = sited.hidden / "container-logs"
    given = ("--container-image", IMAGE, "--log-dir", str(logs))
    ran = sited.stager(
        "run", "--hosts", "node[01-02]", *given, "--", "inside.py", "0", folder=project
    )
    assert ran.code == 0, ran.talk
    lines = [line for log in logs.glob("*.out") for line in log.read_text().splitlines()]
    assert sorted(line for line in lines if line.startswith("[RANK")) == [
        "[RANK 0] True /usr",
        "[RANK 1] True /usr",
    ]
    assert (project / "out" / "here").exists()
    failed = sited.stager(
        "run", "--hosts", "node[01-02]", *given, "--", "inside.py", "255", folder=project
    )
    assert failed.code == 3
    assert failed.report["first_failure"]["exit_code"] == 255

    lacking = sited.stager("verify", "--hosts", "node[01-04]", *given, folder=project)
    assert lacking.code == 3
    problems = {node["node"]: " ".join(node["problems"]) for node in lacking.report["nodes"]}
    assert "the container image cannot be read" in problems["node03"]
    assert "it has neither apptainer nor singularity" in problems["node04"]
    other = sited.stager(
        "verify", "--hosts", "node01", "--container-image", "ubuntu", folder=project
    )
    assert "name a .sif file or a directory" in str(other.report)
    script.unlink()
