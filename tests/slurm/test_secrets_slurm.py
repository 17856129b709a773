"""Secrets on a real Slurm: what reaches ranks and scripts, and who may read what a job leaves."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.support.building import Project
from tests.support.cluster import Cluster

pytestmark = pytest.mark.slow

SECRETS = {"GH_TOKEN": "ghtokenhush", "AWS_SECRET_ACCESS_KEY": "awshush", "MYPASS": "passhush"}
SECRETS["HF_TOKEN"] = "hfhush"
ARGUMENTS = ["--password", "optionhush", "--url=http://u:urlhush@h/"]
RANK = """\
import json, os, sys
from pathlib import Path
hush = sorted(name for name, value in os.environ.items() if "hush" in value)
seen = {"hush": hush, "mine": os.environ.get("MINE"), "argv": sys.argv[1:]}
Path(f"seen.{os.environ['RANK']}.json").write_text(json.dumps(seen))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "batch",
    [(), pytest.param(("--batch", "--wait"), marks=pytest.mark.full)],
    ids=["salloc", "batch"],
)
def test_ranks_get_what_is_named_and_files_are_private(
    cluster: Cluster, slurm_project: Project, batch: tuple[str, ...]
) -> None:
    (slurm_project.root / "train.py").write_text(RANK)
    logs = slurm_project.root.parent / "logs"
    old = os.umask(0)
    try:
        done = slurm_project.stager(
            *("run", "--nodes", "2", "-v", "--json", "--log-dir", str(logs), *batch),
            *("--pass-env", "MYPASS", "--", "train.py", *ARGUMENTS),
            env={**SECRETS, "MINE": "kept"},
        )
    finally:
        os.umask(old)
    assert done.returncode == 0, done.stderr
    assert "hush" not in done.stdout + done.stderr
    report = json.loads(done.stdout)
    for rank in range(2):
        seen = json.loads((slurm_project.root / f"seen.{rank}.json").read_text())
        assert seen == {"hush": ["MYPASS"], "mine": "kept", "argv": ARGUMENTS}

    files = [path for path in logs.iterdir() if path.name != ".gitignore"]
    assert f"job.{report['job_id']}.json" in {path.name for path in files}
    assert any(path.name.endswith(".batch.out") for path in files) == bool(batch)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(logs.stat().st_mode) == 0o700
    assert not [path.name for path in files if b"hush" in path.read_bytes()]
    for node in cluster.nodes:
        grep = ["grep", "-rlsI", "--exclude-dir=envs", "hush", "/tmp"]
        assert cluster.on(node, grep, check=False).stdout == ""


def test_a_script_has_the_command_and_no_variable(
    cluster: Cluster, slurm_project: Project, tmp_path: Path
) -> None:
    """The command is what the script is for; its comment, which people paste, has no secret."""
    logs = tmp_path / "logs"
    options = ("--log-dir", str(logs), "--pass-env", "MYPASS", "--nodes", "2")
    made = slurm_project.stager("script", *options, "--", "train.py", *ARGUMENTS, env=SECRETS)
    assert made.returncode == 0, made.stderr
    held = [line.strip() for line in made.stdout.splitlines() if "hush" in line]
    assert held == ['"optionhush",', '"--url=http://u:urlhush@h/"']
    assert "--password '***' --url=http://h/" in made.stdout
    assert "--export" not in made.stdout
    dry = slurm_project.stager(
        "run", "--batch", "--dry-run", *options, "--", "train.py", *ARGUMENTS, env=SECRETS
    )
    assert dry.returncode == 0, dry.stderr
    assert "hush" not in dry.stdout + dry.stderr
    assert dry.stdout.split()[0] == "sbatch"
