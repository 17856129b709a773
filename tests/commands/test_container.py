"""``--container-image x.sif``: agents and ranks run in a container of Apptainer's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.building import HOST, STAGER, Project
from tests.support.containers import INSIDE, stand_in
from tests.support.processes import living, until

pytestmark = pytest.mark.needs("namespaces")

RANK = f"""\
import json, os, sys, time
import alpha
facts = {{
    "image": os.path.exists({INSIDE!r}),
    "home": os.path.isdir(os.path.expanduser("~")),
    "base": sys.base_prefix,
    "prefix": sys.prefix,
    "cwd": os.getcwd(),
    "scratch": os.listdir("/inside") if os.path.isdir("/inside") else None,
    "rank": os.environ["RANK"],
}}
open(f"made-by-{{facts['rank']}}", "w").close()
print("FACTS", json.dumps(facts), flush=True)
if "wait" in sys.argv:
    time.sleep(300)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""
LOCAL = ("--allocation", "local", "--nodes", "2", "--launcher", "processes")


@pytest.fixture
def sited(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A built project, a home that no container sees, and Apptainer on ``PATH``."""
    if not Path(f"/usr/bin/python{HOST.python}").exists():
        pytest.skip(f"needs a Python {HOST.python} of the system's, which the container has")
    (project.root / "train.py").write_text(RANK)
    project.expect("build", "--no-prove")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{stand_in(tmp_path / 'bin')}:{os.environ['PATH']}")
    (tmp_path / "lab.sif").write_text("an image")
    return project


def facts_of(logs: Path) -> list[dict[str, object]]:
    """What each rank has found, in order."""
    lines = [line for log in logs.glob("*.out") for line in log.read_text().splitlines()]
    facts = [json.loads(line.removeprefix("FACTS ")) for line in lines if line.startswith("FACTS ")]
    return sorted(facts, key=lambda found: str(found["rank"]))


def test_ranks_run_in_the_container(sited: Project, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "rows").touch()
    sandbox = tmp_path / "sandbox"
    sandbox.mkdir()
    for image in ("../lab.sif", "../sandbox"):
        given = ("--container-image", image, "--container-mounts", f"{tmp_path}/scratch:/inside")
        done = sited.expect(
            "run", *LOCAL, *given, "--log-dir", str(logs / image[3:]), "--json", "--", "train.py"
        )
        report = json.loads(done.stdout)
        assert (report["ok"], report["world_size"]) == (True, 2)
        facts = facts_of(logs / image[3:])
        assert [found["rank"] for found in facts] == ["0", "1"]
        for found in facts:
            assert (found["image"], found["home"], found["base"]) == (True, False, "/usr")
            assert (found["cwd"], found["scratch"]) == (str(sited.root), ["rows"])
        assert (sited.root / "made-by-1").exists()
    failed = sited.stager(
        *("run", *LOCAL, "--container-image", "../lab.sif", "--log-dir", str(logs / "failed")),
        *("--json", "--", "train.py", "7"),
    )
    assert failed.returncode == 3
    assert json.loads(failed.stdout)["first_failure"]["exit_code"] == 7


def test_what_a_node_lacks_is_said(sited: Project, tmp_path: Path) -> None:
    given = ("verify", *LOCAL[:4], "--container-image")
    absent = sited.expect(*given, str(tmp_path / "absent.sif"), code=3)
    assert "local1,local2: the container image cannot be read" in absent.stderr
    assert f"{tmp_path}/absent.sif does not exist" in absent.stderr
    wrong = sited.expect(*given, "../lab.sif", "--container-mounts", "/absent/data:/data", code=3)
    assert "mount source /absent/data does not exist" in wrong.stdout + wrong.stderr
    (tmp_path / "bin" / "apptainer").unlink()
    neither = sited.expect(*given, "../lab.sif", code=3)
    assert "local1,local2: it has neither apptainer nor singularity" in neither.stderr


def test_ctrl_c_ends_what_runs_inside(sited: Project, tmp_path: Path) -> None:
    argv = [*STAGER, "run", *LOCAL, "--container-image", "../lab.sif"]
    argv += ["--log-dir", str(tmp_path / "logs"), "--", "train.py", "0", "wait"]
    process = subprocess.Popen(argv, cwd=sited.root, stderr=subprocess.PIPE, text=True)
    assert until(lambda: len(facts_of(tmp_path / "logs")) == 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert living(sited.root) == []
