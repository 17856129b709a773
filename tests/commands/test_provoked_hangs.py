"""Real training jobs that hang are named meanwhile, and those that are only silent are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hanging_training import HANGS, PROGRAM, SILENCES, find_place
from tests.support.processes import run
from tests.support.torch_project import STAGER, Ran, TorchProject

SILENCE = 6.0
"""Seconds of silence after which the ranks are asked; PyTorch's import is no longer one."""
ENDS_AFTER = "00:00:16"
THREE_RANKS = (
    *("--allocation", "local", "--nodes", "1", "--nproc-per-node", "3"),
    *("--launcher", "processes"),
)
OWN_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def run_case(
    case: str, seconds: float, torch_project: TorchProject, folder: Path, *options: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a case; return its result, and the events that tell of its silence."""
    (folder / "script.py").write_text(PROGRAM)
    prefix = OWN_NETWORK if case == "the network" else ()
    where = ("--log-dir", folder / "logs", "--bundle", torch_project.bundle)
    program = ("--", "script.py", case, str(seconds))
    argv = [*prefix, STAGER, "run", "--json", *THREE_RANKS, *where, *options, *program]
    env = {**torch_project.env, "STAGER_SILENCE_SECONDS": str(SILENCE)}
    ran = Ran.of(run(argv, cwd=folder, env=env, seconds=300), folder / "logs")
    lines = (ran.logs / f"events.{ran.report['job_id']}.jsonl").read_text().splitlines()
    return ran.report, [json.loads(line) for line in lines]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("case", HANGS)
def test_each_hang_is_named(case: str, torch_project: TorchProject, tmp_path: Path) -> None:
    options = ("--hang-timeout", ENDS_AFTER)
    expected = HANGS[case]
    report, events = run_case(case, 600, torch_project, tmp_path, *options)
    # On a busy machine the ranks are silent for as long before they print anything.
    told = [at for at, event in enumerate(events) if event["event"] == "silent" and event["line"]]
    silent = events[told[0]]
    hang = next(event for event in events[told[0] :] if event["event"] == "hang")
    assert (hang["kind"], hang["rank"]) == (expected.kind, expected.rank)
    assert hang["place"].startswith(find_place(expected.mark))
    assert hang["time"] - silent["time"] < 5
    first = report["first_failure"]
    assert (first["class"], first["rank"]) == ("hang", expected.rank)
    assert torch_project.left_over() == []


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("case", SILENCES)
def test_a_silence_is_called_no_hang(
    case: str, torch_project: TorchProject, tmp_path: Path
) -> None:
    report, events = run_case(case, 4 * SILENCE, torch_project, tmp_path)
    assert report["ok"]
    assert any(event["event"] == "silent" for event in events)
    hangs = [event for event in events if event["event"] == "hang"]
    assert [hang for hang in hangs if hang["certain"] and hang["kind"] != "unknown"] == []
