"""``stager report``: from what real and other jobs have left to one file."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from bundle.protocol.codec import encode
from stager.core.errors import StagerError
from stager.logs.job_files import find_job_files
from stager.report.page import write_report
from stager.slurm import messages
from tests.support.building import Project
from tests.support.stacks import HANG, job_stacks, write_stacks
from tests.support.stories import T0, Parsed, Told, ran, reported, running, trainable, went_well

NODES = ["node01", "node02", "node03"]


def page_of(told: Told, **job: object) -> Parsed:
    """The page of a job."""
    made = write_report(told.write(**job))
    return Parsed(made.path.read_text(encoding="utf-8"))


def test_real_jobs_are_told(project: Project) -> None:
    trainable(project)
    good = ran(project, "metrics")
    assert good["ok"], good
    done = reported(project)
    path = project.root.parent / "logs" / f"report.{good['job_id']}.html"
    assert (done.returncode, done.stdout) == (0, f"{path}\n")
    assert done.stderr.startswith(f"newest job: {good['job_id']}, run of demo, 20")
    page = Parsed(path.read_text(encoding="utf-8"))
    assert page.title == f"Job {good['job_id']} (demo): ended well"
    facts = page.facts()
    assert (facts["Nodes"], facts["World size"]) == ("2: local1, local2", "4 ranks")
    assert (facts["Launcher"], facts["Backend"]) == ("torchrun", "gloo")
    assert facts["Command"] == "train.py metrics"
    assert facts["Log directory"] == str(path.parent)
    assert page.all("section", aria_labelledby="failure") == []
    bars = [bar.text for bar in page.all("rect", class_="span")]
    for node in ("local1", "local2"):
        for phase in ("preflight", "plan", "unpack", "probe", "launch", "train"):
            assert any(bar.startswith(f"{node}: {phase} ") for bar in bars), (node, phase)
    curves = [chart.given["aria-label"] for chart in page.all("svg", role="img")]
    assert any("2.3 at step 1, 0.2969 at step 60" in label for label in curves)
    assert any("501 at step 1, 560 at step 60" in label for label in curves)
    cells = [cell.text for cell in page.all("td")]
    assert cells.count("torch 2.0, beta 2.0") == 2
    assert "60.00%" in cells

    bad = ran(project, "fail")
    done = reported(project, str(bad["job_id"]), "--json", "-o", "here.html")
    said = json.loads(done.stdout)
    path = project.root / "here.html"
    told = {"report": str(path), "job_id": bad["job_id"], "bytes": path.stat().st_size}
    assert said == {"schema": 1, "ok": True, **told}
    page = Parsed(path.read_text(encoding="utf-8"))
    assert page.text("strong") == "The job failed."
    assert page.text("h2", id="failure") == "What failed first: local1, rank 1"
    facts = page.facts()
    assert (facts["Class"], facts["Exit status"]) == ("python-error", "1")
    assert facts["What"] == "ValueError: rank one is unhappy <b>"
    place, *_ = page.all("code", class_="place")
    assert re.fullmatch(rf"/.*/demo\.{bad['job_id']}\.local1\.1\.out:\d+", place.text)
    name, number = place.text.split(":")
    line = Path(name).read_text().splitlines()[int(number) - 1]
    assert line == "ValueError: rank one is unhappy <b>"
    assert [bar.text for bar in page.all("rect", class_="failed") if bar.text] == [
        bar.text for bar in page.all("rect", class_="phase-train") if "local1" in bar.text
    ]
    # The curves there are the first job's.
    assert [
        label for label in page.all("svg", role="img") if "Loss" in label.given["aria-label"]
    ] == []
    assert facts["Bundle"] == bad["bundle"]


def test_a_job_that_runs_is_said_to(project: Project) -> None:
    trainable(project)
    with running(project):
        path = Path(reported(project).stdout.strip())
        page = Parsed(path.read_text())
        assert page.title.endswith("(demo): still running")
        assert page.facts()["Duration"].endswith(" so far")
        assert [cell.text for cell in page.all("td", class_="state")] == ["not known"] * 2
        bars = [bar.text for bar in page.all("rect", class_="open") if bar.text]
        # Each twice where the ranks have run for so long that the beginning is drawn again.
        assert {bar.partition(": train ")[0] for bar in bars} == {"local1", "local2"}
        assert all(bar.endswith(" not ended") for bar in bars)
    assert reported(project).returncode == 0
    page = Parsed(path.read_text())
    assert page.title.endswith("(demo): interrupted")


def test_a_job_of_which_nothing_is_known(tmp_path: Path) -> None:
    told = Told(tmp_path).say("job", nodes=NODES).phase("preflight", 0.5, NODES)
    told.say("begin", phase="unpack").answer("unpack", "node02", 3.0, reused=False)
    page = page_of(told)
    assert page.text("strong").startswith("It is not known what became of the job")
    assert page.facts()["Duration"] == "0.50 s so far"
    states = [cell.text for cell in page.all("td", class_="state")]
    assert states == ["not known"] * 3
    # What a driver that was killed has left beside the logs.
    (tmp_path / f".job.{2**22 + 1}.1.json").write_text(json.dumps({"id": "77"}))
    assert page_of(told).text("strong").startswith("It is not known")


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        ("RUNNING", "still running"),
        ("COMPLETED", "ended well"),
        ("TIMEOUT", "failed"),
        ("", "unknown"),
    ],
)
def test_slurm_knows_of_a_job_without_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, verdict: str
) -> None:
    monkeypatch.setattr(messages, "read_job_state", lambda *_, **__: state)
    page = page_of(Told(tmp_path / "logs").say("job", nodes=NODES))
    assert page.title == f"Job 77 (demo): {verdict}"


def test_only_the_last_attempt_counts_and_times_are_those_of_the_driver(tmp_path: Path) -> None:
    told = Told(tmp_path).say("job", nodes=["old"]).phase("preflight", 1.0, ["old"], ok=False)
    told.clock += 1000
    told.lines += went_well(tmp_path, NODES).lines
    page = page_of(told)
    assert page.facts()["Attempts"] == "2; this is the last"
    assert page.facts()["Duration"] == "1 min 3 s"
    assert page.facts()["Started"] == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(T0))
    assert "old" not in page.text("main")


def test_where_the_ranks_of_a_hang_were(tmp_path: Path) -> None:
    told = went_well(tmp_path, NODES, ok=False, hang=encode(HANG), ended_by="time-limit")
    assert page_of(told).all("section", aria_labelledby="stacks") == []
    write_stacks(tmp_path, job_stacks())
    page = page_of(told)
    assert page.text("h2", id="failure") == "What failed first: node03, rank 5"
    assert (page.facts()["Class"], page.facts()["Missing from the collective"]) == (
        "hang",
        "rank 5",
    )
    shown = page.text("section", aria_labelledby="stacks")
    assert "the ranks hang: rank 5 on node03 has not entered all_reduce 4711" in shown
    assert "data/loader.py:88 read_shard" in shown


def test_nodes_that_were_left_out_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    problem = {"what": "no room", "where": "/tmp", "why": "1 GB is free", "fix": "free some"}
    told = Told(tmp_path).say("job", nodes=NODES).say("begin", phase="preflight")
    for node in NODES:
        bad = {"ok": False, "problems": [problem]} if node == "node02" else {}
        told.answer("preflight", node, 0.5, **bad)
    told.say("end", phase="preflight", seconds=0.5)
    told.say("left-out", nodes={"node02": ["/tmp: no room; 1 GB is free; free some"]})
    told.phase("probe", 0.2, ["node01", "node03"], packages={"torch": "2.13.0"}, python="3.11.7")
    told.say("result", ok=True, problems={})
    page = page_of(told)
    states = [cell.text for cell in page.all("td", class_="state")]
    assert states == ["\u2713 ok", "\u2212 left out", "\u2713 ok"]
    problems = [cell.text for cell in page.all("td", class_="problems")]
    assert problems == ["", "/tmp: no room; 1 GB is free; free some", ""]
    bars = [bar.text for bar in page.all("rect", class_="failed")]
    assert bars == ["", "node02: preflight 0.00 s failed"]  # the first is the legend's


def test_somebody_elses_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "foreign"
    logs.mkdir()
    (logs / "rank0.log").write_text("step 1\nValueError: no such label\n")
    (logs / "rank1.log").write_text("step 1\n")
    (logs / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n')
    monkeypatch.chdir(tmp_path)
    made = write_report(find_job_files(str(logs), tmp_path))
    assert (made.path, made.job_id) == (tmp_path / "report.html", "")
    page = Parsed(made.path.read_text())
    assert page.text("h1") == "Logs in foreign"
    assert page.facts()["Log directory"] == str(logs)
    assert "Read: 3 files." in page.text("main")
    keys = [link.given["href"] for link in page.all("a")]
    assert "#training" in keys
    assert "#timeline" not in keys


def test_the_result_counts_whatever_else_is_there(tmp_path: Path) -> None:
    """Events of another make are worth a page, as far as they can be read."""
    told = Told(tmp_path).say("job", nodes="node01").say("begin", phase=["x"])
    told.say("probe", node={"a": 1}, packages=[1], problems="many").say("unpack", node="node01")
    told.say("end", phase=7, seconds="long").say("left-out", nodes=["node01"])
    told.say("result", ok=False, problems=[], exit_codes="1", failures=7, world_size="four")
    told.lines += ["", "null", "[]", '{"event": 1}', '{"event": "end", "time": NaN}', '{"event"']
    page = page_of(told, launch=[], outputs="out", run_dir=7, bundle=["b"])
    assert page.text("strong") == "The job failed."


def test_the_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """A link is replaced by what it leads to; nothing is left of what could not be written."""
    files = went_well(tmp_path / "logs", NODES).write()
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text("old")
    link.symlink_to(target)
    with target.open() as reader:
        made = write_report(files, link)
        assert reader.read() == "old"  # whoever reads meanwhile has one of them, and all of it
    assert (made.path, link.is_symlink()) == (link, True)
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert made.size == target.stat().st_size
    for bad in (tmp_path, tmp_path / "none" / "r.html", target / "r.html"):
        with pytest.raises(StagerError, match=r"report|written") as caught:
            write_report(files, bad)
        assert "--output" in caught.value.hint
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"link.html", "logs", "nodes", "target.html"}


def test_a_pipe_in_place_of_the_job(tmp_path: Path) -> None:
    files = went_well(tmp_path / "logs", NODES).write()
    for name in (files.job.name, ".job.1.2.json"):
        (files.folder / name).unlink(missing_ok=True)
        os.mkfifo(files.folder / name)
    assert write_report(find_job_files(str(files.folder), tmp_path)).size
