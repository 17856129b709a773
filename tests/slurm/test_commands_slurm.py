"""Commands that start no job of ours, on real Slurm: ``exec`` below ``srun``, a build on a node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bundle.node.node_root import node_root_name
from tests.support.building import Project
from tests.support.cluster import Cluster
from tests.support.sources import make_sdist

pytestmark = pytest.mark.slow

STAGER = str(Path(sys.executable).with_name("stager"))
SETUP = """\
import os, setuptools
with open("from_source/where.py", "w") as file:
    file.write(f"NODE = {os.uname().nodename!r}")
setuptools.setup()
"""
"""A build that notes where it ran."""


def call(project: Project, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder."""
    return subprocess.run(
        argv, cwd=project.root, capture_output=True, text=True, check=False, timeout=900
    )


def test_exec_is_the_rank_that_its_task_is(cluster: Cluster, slurm_project: Project) -> None:
    """Below ``srun``, on nodes that have no environment yet."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    names = (*ranks, "MASTER_ADDR", "MASTER_PORT")
    show = f"import alpha, os; print('SEEN', *(os.environ[name] for name in {names}), flush=True)"
    step = ["srun", "--nodes=2", "--ntasks-per-node=2", "--nodelist=node02,node03"]
    done = call(slurm_project, *step, STAGER, "exec", "-q", "--", "python", "-c", show)
    assert done.returncode == 0, done.stderr
    seen = sorted(line.split()[1:] for line in done.stdout.splitlines() if "SEEN" in line)
    port = seen[0][-1]
    assert seen == [
        [str(rank), "4", str(rank % 2), "2", str(rank // 2), "node02", port] for rank in range(4)
    ]


@pytest.mark.full
def test_a_build_on_a_node(
    cluster: Cluster, slurm_project: Project, wheelhouse: Path, build_wheels: Path
) -> None:
    """In an allocation, or by a job of its own; no node sees the folder of the sdists."""
    for wheel in build_wheels.iterdir():
        shutil.copy2(wheel, wheelhouse)
    inside = ("salloc", "--nodes=1", "--nodelist=node02")
    for version, node, begin in (("1.0", "node02", inside), ("1.1", "node03", ())):
        make_sdist(wheelhouse, "from-source", version, files={"setup.py": SETUP})
        asked = '[cluster]\nnodelist = "node03"'
        slurm_project.settings(f"from-source=={version}", more=asked)
        done = call(slurm_project, *begin, STAGER, "build", "--on-node", "--no-prove")
        assert done.returncode == 0, done.stderr
        [built] = slurm_project.store.built.rglob(f"from_source-{version}-*.whl")
        with zipfile.ZipFile(built) as archive:
            assert archive.read("from_source/where.py").decode() == f"NODE = {node!r}"
    asked = '[cluster]\npartition = "nope"'
    make_sdist(wheelhouse, "from-source", "1.2", files={"setup.py": SETUP})
    slurm_project.settings("from-source==1.2", more=asked)
    refused = call(slurm_project, STAGER, "build", "--on-node", "--no-prove")
    assert refused.returncode == 1
    assert "Slurm did not allocate nodes: invalid partition specified: nope" in refused.stderr
    assert "`sinfo` lists the partitions" in refused.stderr


def test_clean_asks_for_the_nodes_that_have_environments(
    cluster: Cluster, slurm_project: Project
) -> None:
    """The logs of the jobs name them: one node would do for the settings, and any would be free."""
    made = call(slurm_project, STAGER, "verify", "-N", "2", "-w", "node02,node03")
    assert made.returncode == 0, made.stderr
    os.mkfifo(Path.home() / "slurm_logs" / "events.999.jsonl")  # nobody waits for its writer
    path = f"/tmp/{node_root_name()}/envs"
    assert cluster.on("node02", ["test", "-d", path]).returncode == 0
    words = ("clean", "--allocation", "slurm", "--nodes-only", "--all")
    cleaned = call(slurm_project, STAGER, *words)
    assert cleaned.returncode == 0, cleaned.stderr
    assert "asking for node[02-03], where your jobs have left environments" in cleaned.stderr
    for node in ("node02", "node03"):
        assert cluster.on(node, ["test", "-d", path], check=False).returncode != 0
    again = call(slurm_project, STAGER, *words, "--dry-run")
    assert "asking for" not in again.stderr, "they are clean, as the logs say"
