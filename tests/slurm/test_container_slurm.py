"""Agents and ranks in a container of Apptainer's, on nodes of Slurm."""

from __future__ import annotations

import os
import sys

from tests.support.containers import INSIDE, stand_in
from tests.support.needs import lacks
from tests.support.provoking import Bench

RANK = f"""\
import os, sys
import alpha
inside = os.path.exists({INSIDE!r})
print(f"[RANK {{os.environ['RANK']}}] {{inside}} {{os.getcwd()}} {{sys.base_prefix}}", flush=True)
sys.exit(int(sys.argv[1]))
"""


def test_agents_and_ranks_run_inside(bench: Bench) -> None:
    """In this container the only Python is the system's."""
    own = f"python3.{sys.version_info[1]}"
    if not os.path.realpath("/usr/bin/python3").endswith(own):
        lacks("system python", f"it is not {own}, which the bundle needs")
    shared = bench.logs.parent
    script, image = shared / "inside.py", shared / "lab.sif"
    script.write_text(RANK)
    image.write_text("an image")
    bench.env["PATH"] = f"{stand_in(shared / 'bin')}:{os.environ['PATH']}"
    given = ("--nodes", "2", "--nproc-per-node", "2", "--container-image", str(image))
    bound = ("--container-mounts", f"{shared}:{shared}")
    said = bench.stager("run", *given, *bound, "--", str(script), "0")
    assert said.code == 0, said.talk
    ranks = sorted(line.split() for line in bench.lines() if line.startswith("[RANK"))
    assert [rank for _, rank, *_ in ranks] == ["0]", "1]", "2]", "3]"]
    for rank in ranks:
        assert rank[2:] == ["True", str(bench.root), "/usr"]
    failed = bench.stager("run", *given, *bound, "--", str(script), "7")
    assert failed.code == 3, failed.talk
    assert failed.failure["exit_code"] == 7

    image.unlink()
    said = bench.stager("verify", *given[:2], *given[4:])
    assert said.code == 3
    assert "the container image cannot be read" in said.problems("node01")
    bench.assert_clean()
