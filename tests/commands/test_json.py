"""The JSON object of each command, compared with a whole golden file.

After a wanted change run this file with WRITE_GOLDEN=1, and read the difference: scripts rely on
each key. What differs from run to run and from machine to machine is replaced by a word or a 0.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any

from stager.incidents.node_history import keep_incidents
from tests.support.building import HOST, Project
from tests.support.events import event_keys
from tests.support.fake_slurm import slurm_commands
from tests.support.golden import GOLDEN, check_golden
from tests.support.incidents import FULL, incidents_of
from tests.support.signing import Key
from tests.support.small_torch import TORCH
from tests.support.stacks import job_stacks, write_stacks
from tests.support.wheelhouse import make_wheel

JOB = ("--allocation", "local", "--nproc-per-node", "1", "--log-dir", "logs")
TWO_RANKS = ("--nproc-per-node", "2")
LOGS = ("--log-dir", "logs")
VARYING = re.compile(r"bytes(_.*)?|.*_(bytes|files)|size|sent|cpus|files|freed|removed|nfs")
"""Keys whose numbers depend on the machine, or on the size of our own program."""


def normalized(value: object, words: Mapping[str, str], key: str = "") -> object:
    """Return a JSON value without what differs from run to run."""
    if isinstance(value, dict):
        return {name: normalized(item, words, name) for name, item in value.items()}
    if isinstance(value, list):
        return [normalized(item, words, key) for item in value]
    if isinstance(value, float):
        return 0.5
    if isinstance(value, int) and not isinstance(value, bool) and VARYING.fullmatch(key):
        return 0
    if not isinstance(value, str):
        return value
    if key in ("platform", "why", "script"):
        return f"<{key}>"
    for text, word in words.items():
        value = value.replace(text, word)
    value = re.sub(r"[0-9a-f]{64}", "<digest>", value)
    value = re.sub(r"(?<=project-)[0-9a-f]{12}(?=\.p)", "<id>", value)
    value = re.sub(r"(?<=NFS from )\d+", "<count>", value)
    return re.sub(r"\b\d+\.\d+ s\b", "<seconds>", value)


def of_one_layer(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report of ``inspect --files`` with the files of one small package."""
    listing = [file for file in report["listing"] if file["layer"] == "alpha"]
    return {**report, "listing": listing}


def of_the_environment(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report of ``inspect --licenses`` without what a newer Python does not need."""
    components = [one for one in report["components"] if one["kind"] != "decompressor"]
    return {**report, "components": components}


def of_the_lock(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report of ``mirror`` without what a newer Python does not need."""
    added = [name for name in report["added"] if not name.startswith("zstandard-")]
    more = len(report["added"]) - len(added)
    counts = {key: report[key] - more for key in ("packages", "wheels")}
    return {**report, **counts, "added": added}


def without_counts(trace: dict[str, Any]) -> dict[str, Any]:
    """Return a trace without the numbers of files that were read."""
    packages = [{**package, "files_read": 0} for package in trace["packages"]]
    return {**trace, "files_read": 0, "packages": packages}


def test_each_command_prints_the_json_that_scripts_know(
    project: Project, wheelhouse: Path, alice: Key, tmp_path: Path
) -> None:
    make_wheel(wheelhouse, "alpha", requires=["beta>=1.1"], metadata_extra="License: MIT License")
    make_wheel(wheelhouse, "torch", "2.13.0", files=TORCH)
    (project.root / "stager.toml").unlink()
    (project.root / "requirements.in").write_text("alpha\ntorch\n")
    (project.root / "train.py").write_text("print('trained')\n")
    (project.root / "broken.py").write_text("raise ValueError('no such label')\n")
    reports = {"init": project.report("init")}
    project.settings("alpha", "torch", more='torch-backend = "none"\n[launch]\nbackend = "gloo"')

    reports["config"] = project.report("config")
    reports["lock"] = project.report("lock")
    reports["build"] = project.report("build", "--output", "copy.pkgs.tar")
    reports["inspect"] = of_one_layer(project.report("inspect", "--files"))
    licences = project.report("inspect", "--licenses")
    reports["inspect-licenses"] = of_the_environment(licences)
    reports["inspect-sbom"] = project.report("inspect", "--sbom", "-o", "project.cdx.json")
    mirror = ("mirror", "--offline", str(tmp_path / "mirror"))
    reports["mirror"] = of_the_lock(project.report(*mirror))
    carried = str(tmp_path / "carried.pkgs.tar")
    reports["export"] = project.report("export", "-o", carried)
    other = {"OFFLINE_ROOT": str(tmp_path / "other")}
    reports["import"] = project.report("import", carried, env=other)
    reports["estimate"] = project.report("estimate", "--nodes", "1,8")
    reports["verify"] = project.report("verify", *JOB)
    reports["run"] = project.report("run", *JOB, *TWO_RANKS, "--", "train.py")
    failed = project.report("run", *JOB, "--", "broken.py", code=3)
    reports["run-failed"] = failed
    reports["logs"] = project.report("logs", *LOGS, failed["job_id"])
    reports["diagnose"] = project.report("diagnose", *LOGS, failed["job_id"])
    reports["report"] = project.report("report", *LOGS, failed["job_id"])
    reports["support-list"] = project.report("support", "--list", *LOGS, failed["job_id"])
    reports["support"] = project.report("support", *LOGS, failed["job_id"])
    write_stacks(project.root / "logs", job_stacks(failed["job_id"]))
    reports["stacks"] = project.report("stacks", *LOGS, failed["job_id"])
    reports["replay"] = project.report("replay", *LOGS, failed["job_id"], code=1)
    reports["script"] = project.report("script", *LOGS, "--", "train.py")
    reports["clean"] = project.report("clean", "--dry-run", "--all", *LOGS)
    old = ("clean-node", "--dry-run", "--days", "0", str(tmp_path / "nodes"))
    reports["clean-node"] = project.report(*old)
    reports["error"] = project.report("run", *JOB, "--", "nosuch.py", code=1)

    keep_incidents(project.store, incidents_of({"n2": [FULL]}, ended=time() - 60), time())
    reports["nodes"] = project.report("nodes", "--forget", "n3")

    answers = {"sbatch": "cat >/dev/null; echo 4711", "sinfo": "true"}
    slurm = slurm_commands(tmp_path / "slurm", **answers)
    batch = ("run", "--batch", *LOGS)
    reports["run-planned"] = project.report(*batch, "--dry-run", "--", "train.py", env=slurm)
    reports["run-submitted"] = project.report(*batch, "--", "train.py", env=slurm)

    reports["sign"] = project.report("sign", "--key", str(alice.private))
    unread = {"extra/__init__.py": "", "extra/data/table": "x" * 500_000, "extra/core.py": ""}
    make_wheel(wheelhouse, "extra", files=unread)
    project.settings("extra")
    traced = project.report("build", "--trace", "--", "train.py")
    reports["build-trace"] = {**traced, "trace": without_counts(traced["trace"])}

    for name in ("verify", "run", "run-failed"):
        events = project.root / "logs" / f"events.{reports[name]['job_id']}.jsonl"
        check_golden(f"{name}.events.txt", event_keys(events))

    words = {
        failed["job_id"]: "<failed job>",
        reports["run"]["job_id"]: "<job>",
        traced["trace"]["job_id"]: "<job>",
        reports["verify"]["job_id"]: "<job>",
        str(tmp_path): "<tmp>",
        os.environ["HOME"]: "<home>",
        f"/stager-{os.getuid()}/": "/stager-<uid>/",
        HOST.platform: "<platform>",
        "{}.{}".format(*sys.version_info): "<python>",
        reports["sign"]["key"].split()[-1]: "<key>",
    }
    shown = {name: normalized(report, words) for name, report in reports.items()}
    if os.environ.get("WRITE_GOLDEN"):
        for name, report in shown.items():
            (GOLDEN / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    golden = {path.stem: json.loads(path.read_text()) for path in GOLDEN.glob("*.json")}
    assert set(golden) == set(shown), "a golden file for each report, and no other"
    for name, report in shown.items():
        assert report == golden[name], name
