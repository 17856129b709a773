"""``stager verify`` and ``run`` with the real stack: what they report and what they leave."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.torch_project import Ran, TorchProject

pytestmark = [pytest.mark.slow, pytest.mark.network]

LOCAL = ("--allocation", "local")
NODE_LINE = re.compile(
    r"NODE (local\d) OK -> PY 3\.\d+ torch 2\.13\.0\S* tfm \S+ datasets \S+ numpy \S+"
)
FACTS = """\
import json, os, subprocess, sys
child = "import json, sys; print(json.dumps([sys.prefix, sys.path]))"
spawned = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout
print("FACTS", json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "argv": sys.argv,
                           "path": sys.path, "prefix": sys.prefix, "child": spawned}), flush=True)
"""
ARGUMENTS = (
    "two words", "it's", 'a "quote"', "\N{SNOWMAN} \xfc", "--", "--json", "-q", "", "$HOME", "*",
    "a\\b",
)  # fmt: skip


def test_people_get_the_lines_they_grep_for(torch_project: TorchProject, tmp_path: Path) -> None:
    argv = ["verify", *LOCAL, "--nodes", "2", "--log-dir", "logs", "--bundle", torch_project.bundle]
    done = torch_project.stager(*argv, cwd=tmp_path)
    assert done.returncode == 0
    nodes = [NODE_LINE.fullmatch(line) for line in done.stdout.splitlines()]
    assert sorted(found[1] for found in nodes if found) == ["local1", "local2"]
    assert len(nodes) == 2
    for line in ("  local1 proj=ok pkgs=ok", "  local2 proj=ok pkgs=ok"):
        assert line in done.stderr.splitlines()
    assert f"all 2 nodes can run it; logs: {tmp_path}/logs" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_scripts_get_every_nodes_facts_and_staging_is_done_once(
    torch_project: TorchProject, tmp_path: Path
) -> None:
    torch_project.job("verify", cwd=tmp_path)  # whether this stages depends on earlier tests
    ran = torch_project.job("verify", cwd=tmp_path)
    report = ran.report
    assert (ran.code, report["ok"], report["schema"]) == (0, True, 1)
    assert report["bundle"] == str(torch_project.bundle)
    assert report["log_dir"] == str(tmp_path / "logs")
    assert set(report["seconds"]) == {"preflight", "place", "unpack", "probe"}
    assert [node["node"] for node in report["nodes"]] == ["local1", "local2"]
    for node in report["nodes"]:
        assert (node["ok"], node["origin_ok"], node["problems"]) == (True, True, [])
        assert (node["interface"], node["address"]) == ("lo", "127.0.0.1")
        assert node["packages"]["torch"].startswith("2.13.0")
        assert {"transformers", "datasets", "numpy", "accelerate"} <= set(node["packages"])
        where, line = ran.log(node["node"]).splitlines()
        assert where.startswith(f"{node['node']} reused -> {torch_project.nodes}/")
        assert NODE_LINE.fullmatch(line)

    job = report["job_id"]
    preflight = (ran.logs / f"preflight.{job}.txt").read_text().splitlines()
    assert [line[:23] for line in preflight] == [
        "local1 proj=ok pkgs=ok ",
        "local2 proj=ok pkgs=ok ",
    ]
    names = {path.name for path in ran.logs.glob(f"*{job}*")}
    assert {f"{tmp_path.name}.{job}.local{n}.{n - 1}.out" for n in (1, 2)} <= names
    kept = (ran.logs / f"events.{job}.jsonl").read_text().splitlines()
    unpacked = [event for event in map(json.loads, kept) if event["event"] == "unpack"]
    assert [(event["reused"], event["files_written"]) for event in unpacked] == [(True, 0)] * 2


def test_a_users_own_script_runs_unchanged_and_an_edit_counts(
    torch_project: TorchProject, tmp_path: Path
) -> None:
    """The project's command on two nodes with two ranks each, as the settings say."""
    project = tmp_path / "project"
    shutil.copytree(torch_project.root, project)
    with (project / "stager.toml").open("a") as settings:
        settings.write('[project]\nname = "copy"\ncommand = ["train.py"]\n')
    built = torch_project.stager("build", "--json", cwd=project)
    assert json.loads(built.stdout)["layers_built"] <= 1, built.stderr  # the project's own

    done = torch_project.stager(
        "run", *LOCAL, "--json", "--log-dir", tmp_path / "logs", cwd=project
    )
    report = json.loads(done.stdout)
    ran = Ran(code=done.returncode, report=report, stderr=done.stderr, logs=tmp_path / "logs")
    assert ran.code == 0
    assert (report["ok"], report["first_failure"], report["bytes_broadcast"]) == (True, None, 0)
    assert (report["world_size"], report["launcher"], report["backend"]) == (4, "torchrun", "gloo")
    assert report["exit_codes"] == {"local1": 0, "local2": 0}
    assert set(report["seconds"]) == {"preflight", "place", "unpack", "probe", "launch"}
    ranks = [line for line in ran.output() if line.startswith("[RANK ")]
    assert sorted(ranks) == [f"[RANK {rank}] WORLD_SIZE=4" for rank in range(4)]
    assert ran.output().count("sum of ranks: 6.0 arguments: []") == 4
    assert "[RANK 0]" in ran.log("local1")
    assert "[RANK 3]" in ran.log("local2")

    edited = (project / "train.py").read_text().replace("sum of ranks", "the new code's sum")
    (project / "train.py").write_text(edited)
    done = torch_project.stager(
        "run", *LOCAL, "--json", "--nodes", "1", "--log-dir", tmp_path / "logs", cwd=project
    )
    report = json.loads(done.stdout)
    ran = Ran(code=done.returncode, report=report, stderr=done.stderr, logs=tmp_path / "logs")
    assert report["world_size"] == 2
    assert ran.output().count("the new code's sum: 1.0 arguments: []") == 2
    assert torch_project.left_over() == []


def test_ranks_get_their_arguments_and_a_clean_environment(
    torch_project: TorchProject, tmp_path: Path
) -> None:
    decoys = tmp_path / "decoys"
    decoys.mkdir()
    foreign = {
        "PYTHONPATH": str(decoys), "RANK": "77", "WORLD_SIZE": "78", "MASTER_ADDR": "192.0.2.1",
        "OMP_NUM_THREADS": "61", "VIRTUAL_ENV": str(decoys), "MINE": "kept",
        "SLURM_JOB_ID": "7", "SLURM_NTASKS": "78", "SLURM_PROCID": "3",
    }  # fmt: skip
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "facts.py").write_text(FACTS)
    command = ("--", "sub/facts.py", *ARGUMENTS)
    ran = torch_project.job("run", *command, cwd=tmp_path, env=foreign)
    assert ran.code == 0, ran.stderr

    cpus = len(os.sched_getaffinity(0))
    ranks = set()
    for node_rank, node in enumerate(("local1", "local2")):
        facts = [
            json.loads(line.removeprefix("FACTS "))
            for line in ran.log(node).splitlines()
            if line.startswith("FACTS ")
        ]
        assert len(facts) == 2
        for fact in facts:
            env, environment = fact["env"], fact["env"]["STAGER_ENV"]
            assert int(env["RANK"]) == 2 * node_rank + int(env["LOCAL_RANK"])
            ranks.add(int(env["RANK"]))
            assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("4", "2")
            assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
            assert env["OMP_NUM_THREADS"] == str(max(1, cpus // 2 // 2))
            for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
                assert env[name] == "1"
            assert (env["PYTHONNOUSERSITE"], env["MINE"]) == ("1", "kept")
            assert not [name for name in env if name.startswith(("PYTHONPATH", "SLURM_"))]
            assert env["STAGER_NODE"] == node
            assert env["HF_HOME"].startswith(str(torch_project.nodes))
            assert environment.startswith(
                f"{torch_project.nodes}/stager-{os.geteuid()}/nodes/{node}/"
            )
            assert fact["prefix"] == environment == env["VIRTUAL_ENV"]
            assert json.loads(fact["child"])[0] == environment
            assert fact["cwd"] == str(tmp_path)
            assert fact["argv"] == [str(tmp_path / "sub" / "facts.py"), *ARGUMENTS]
            assert fact["path"][0] == str(tmp_path / "sub")
            everywhere = fact["path"] + json.loads(fact["child"])[1]
            assert not [entry for entry in everywhere if "decoys" in entry or ".venv" in entry]
    assert ranks == {0, 1, 2, 3}


def test_a_module_and_a_relative_path_to_the_bundle(
    torch_project: TorchProject, tmp_path: Path
) -> None:
    relative = Path(os.path.relpath(torch_project.bundle, tmp_path))
    argv = ("--nodes", "1", "--nproc-per-node", "1", "--", "-m", "train", "an argument")
    ran = torch_project.job("run", *argv, cwd=tmp_path, bundle=relative)
    assert ran.code == 0, ran.stderr
    assert "sum of ranks: 0.0 arguments: ['an argument']" in ran.output()
    assert Path(ran.report["bundle"]).samefile(torch_project.bundle)
