"""Ranks without PyTorch: one process a rank, on nodes that are processes here."""

from __future__ import annotations

import re
from typing import Any

from tests.support.building import Project

JOB = ("--allocation", "local", "--nodes", "2", "--nproc-per-node", "2", "--log-dir", "logs")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_PORT")
PRINTED = ", ".join(f"os.environ['{name}']" for name in (*NAMES, "MASTER_ADDR"))
SHOW = f"import os\nprint('is', {PRINTED})\n"
MEET = """
import os, socket
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
            server.accept()[0].close()
else:
    while True:
        try:
            socket.create_connection(address).close()
            break
        except ConnectionRefusedError:
            pass
"""
FAIL = """
import os, signal, sys, time
if os.environ["RANK"] == "3":
    time.sleep(1)
    {how}
time.sleep(600)
"""


def ran(project: Project, code: int) -> dict[str, Any]:
    return project.report("run", *JOB, "--launcher", "processes", "--", "train.py", code=code)


def test_ranks_without_torch(project: Project) -> None:
    """They know their place and can meet; a failure ends the others, and is the one named."""
    (project.root / "train.py").write_text(SHOW + MEET)
    project.settings("alpha").build()
    refused = project.expect("run", *JOB, "--", "train.py", code=1)
    assert "--launcher processes" in refused.stderr

    report = ran(project, 0)
    assert (report["ok"], report["world_size"], report["launcher"]) == (True, 4, "processes")
    logs = [log.read_text() for log in (project.root / "logs").glob(f"*{report['job_id']}*.out")]
    places = sorted(re.findall(r"^is (\d) 4 (\d) 2 (\d) \d+ \S+$", "\n".join(logs), re.MULTILINE))
    assert places == [("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1")]

    for how, status in (
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    ):
        (project.root / "train.py").write_text(FAIL.format(how=how))
        failed = ran(project, 3)["first_failure"]
        assert (failed["rank"], failed["exit_code"]) == (3, status)
