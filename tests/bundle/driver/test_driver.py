"""The driver: a job's phases on real local nodes, what it prints, keeps and returns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.format.archive import BundleFile
from bundle.protocol.digest import Digest
from bundle.protocol.enumerations import Action, Allocation, Launcher
from bundle.protocol.job import CodeStore
from stager.pack.bundle import Packed
from stager.pack.bundle_file import clear_away
from tests.support.bundles import forge
from tests.support.gated_program import gated
from tests.support.jobs import LAUNCH, drive, driver_argv, job_for
from tests.support.namespaces import REPO, entering
from tests.support.object_files import ELF
from tests.support.processes import living, run, until


def problems(result: dict[str, Any]) -> dict[str, list[str]]:
    return {node: [one["what"] for one in found] for node, found in result["problems"].items()}


def test_a_job_goes_through_its_phases_and_leaves_its_logs(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    code, events, said = drive(program, job_for(single, tmp_path))
    assert (code, said) == (0, "")
    assert all((event["v"], event["job_id"]) == (1, "4711") for event in events)
    begun = [event["phase"] for event in events if event["event"] == "begin"]
    ended = [event["phase"] for event in events if event["event"] == "end"]
    assert begun == ended == ["preflight", "place", "unpack", "probe"]
    for phase in ("preflight", "unpack", "probe"):
        answers = {event["node"]: event for event in events if event["event"] == phase}
        assert set(answers) == {"local1", "local2"}
        assert all(answer["ok"] and answer["phase"] == phase for answer in answers.values())
    result = events[-1]
    assert (result["event"], result["ok"], result["interrupted"]) == ("result", True, False)
    assert (result["problems"], result["bytes_broadcast"], result["logs_lost"]) == ({}, 0, [])
    assert set(result["seconds"]) == set(begun)
    kept = {path.name: path.read_text() for path in (tmp_path / "logs").glob("[!.]*")}
    assert [json.loads(line) for line in kept.pop("events.4711.jsonl").splitlines()] == events
    assert {"job.4711.json", "order.4711.tsv"} <= kept.keys()
    assert json.loads(kept.pop("job.4711.json")) == json.loads((tmp_path / "job.json").read_text())
    source = Path(__file__).resolve().parents[3] / "bundle/launch/wrapper.py"
    assert kept.pop("run_wrapper.4711.py") == source.read_text()
    for number, line in enumerate(kept.pop("preflight.4711.txt").splitlines(), 1):
        own = rf"root=\S+/local{number}/\S+ free=\S+ inodes=\S+ exec=ok python=/\S+"
        assert re.fullmatch(rf"local{number} proj=ok pkgs=ok {own}", line)
        lines = kept.pop(f"demo.4711.local{number}.{number - 1}.out").splitlines()
        assert lines[0].startswith(f"local{number} staged -> /")
        assert lines[1].startswith(f"NODE local{number} OK -> ")
    assert kept.keys() == {"order.4711.tsv"}


@pytest.mark.needs("strace")
def test_told_to_end_before_there_is_a_log_to_say_it_in(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    """The signal comes when the driver makes the directory of its logs."""
    at = ["-e", "trace=/^mkdir", "-e", "inject=/^mkdir:signal=SIGTERM:when=1"]
    strace = ["strace", "-o", "/dev/null", *at, "-P", str(tmp_path / "logs")]
    code, events, said = drive(program, job_for(single, tmp_path), *strace)
    assert (code, events) == (130, [])
    assert said == "stager: the job was stopped before it started\n"


def test_all_problems_of_all_nodes_are_told_and_kept(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    """Nothing is unpacked then."""
    other = forge(
        single.path,
        tmp_path / "other.tar",
        manifest=lambda raw: raw["requires"].update(python="3.77", machine="pdp11"),
    )
    with BundleFile(str(other)) as opened:
        made = {"bundle_id": opened.manifest.id, "requires": opened.manifest.requires}
    code, events, _ = drive(program, job_for(single, tmp_path, bundle=str(other), **made))
    expected = [
        "there is no CPython 3.77, which the bundle was built for",
        "the bundle is for another machine",
    ]
    assert (code, problems(events[-1])) == (3, {"local1": expected, "local2": expected})
    assert not events[-1]["of_driver"]
    assert [event["phase"] for event in events if event["event"] == "begin"] == ["preflight"]
    lines = (tmp_path / "logs" / "preflight.4711.txt").read_text().splitlines()
    assert lines[0].startswith("local1 proj=ok pkgs=ok root=")
    assert lines[1].startswith("local1 problem: ")
    assert [line.split()[0] for line in lines] == ["local1"] * 3 + ["local2"] * 3


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"bundle_id": Digest("0" * 64)}, "this is another bundle than the job was made for"),
        ({"bundle": "/no/such/bundle"}, "the bundle cannot be read"),
    ],
)
def test_a_bundle_that_is_another_or_gone(
    single: Packed, program: Path, tmp_path: Path, changed: dict[str, Any], fault: str
) -> None:
    code, events, _ = drive(program, job_for(single, tmp_path, **changed))
    assert code == 3
    assert problems(events[-1]) == {"local1": [fault], "local2": [fault]}
    assert events[-1]["of_driver"] is True  # no node is to blame


def test_a_problem_of_the_drivers_host_is_put_on_no_node(
    single: Packed, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not be one of them: it is where ``salloc`` ran, for example."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no srun
    code, events, _ = drive(program, job_for(single, tmp_path, allocation=Allocation.SLURM))
    assert code == 3
    assert problems(events[-1]) == {os.uname().nodename: ["srun failed"]}


def test_the_bundle_stays_while_a_job_uses_it(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    """Whoever clears bundles away asks for the lock that the driver holds."""
    gate = tmp_path / "gate"
    argv = driver_argv(gated(program, tmp_path, gate, written=0), job_for(single, tmp_path))
    started = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    started.stdout.readline()
    assert clear_away(single.path) is False
    gate.touch()
    started.communicate(timeout=300)
    assert started.returncode == 0
    assert single.path.exists()


def test_a_log_directory_that_cannot_be_made(single: Packed, program: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, events, said = drive(program, job_for(single, tmp_path, log_dir=str(tmp_path / "file")))
    assert (code, events) == (1, [])
    assert "the log directory cannot be written" in said
    assert "--log-dir" in said


def test_a_full_disk_costs_the_logs_and_not_the_job(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    mount = f"mount -t tmpfs -o size=16k none '{tmp_path}/logs'"
    code, events, _ = drive(program, job_for(single, tmp_path), *entering("-m", mount))
    assert code == 0
    assert "No space left on device" in events[-1]["logs_fault"]


def test_a_signal_while_a_failure_is_noted_leaves_a_result_all_the_same(
    single: Packed, tmp_path: Path
) -> None:
    """It comes where the driver asks for the place of the problem that it has met."""
    job = job_for(single, tmp_path, bundle=str(tmp_path / "gone"))
    code = (
        "import json, os, signal, sys\n"
        "from bundle.driver import driver\n"
        "from bundle.protocol.job import Job\n"
        "driver._find_problem_places = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "with open(sys.argv[1]) as stream: job = Job.from_json(json.load(stream))\n"
        "sys.exit(driver.drive(job))\n"
    )
    argv = [sys.executable, "-c", code, driver_argv(tmp_path, job)[-1]]
    done = run(argv, cwd=REPO)
    assert (done.returncode, done.stderr) == (130, "")
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["event"], result["interrupted"]) == ("result", True)


def test_a_job_cancelled_before_its_nodes_were_reached_was_cancelled(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    """Slurm sends SIGTERM while the driver asks for its version, which is the first it does."""
    (tmp_path / "bin").mkdir()
    state = "JobId=4711 JobState=CANCELLED Reason=None"
    for name, text in (("srun", "kill -TERM $PPID; exec sleep 60"), ("scontrol", f"echo {state}")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    job = job_for(single, tmp_path, allocation=Allocation.SLURM)
    slurm = (f"PATH={tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID=4711")
    _, events, _ = drive(program, job, "env", *slurm, "SLURM_JOB_NODELIST=local[1-2]")
    assert (events[-1]["ended_by"], events[-1]["interrupted"]) == ("cancelled", False)


def test_a_signal_ends_the_job_and_its_agents(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    program = gated(program, tmp_path, tmp_path / "no gate", written=0)
    started = subprocess.Popen(
        driver_argv(program, job_for(single, tmp_path)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    nodes = Path(os.environ["STAGER_NODE_ROOT"])
    assert until(lambda: len(list(nodes.glob("*/nodes/*/*/incoming/*/env"))) == 2)
    started.terminate()
    out, err = started.communicate(timeout=300)
    assert (started.returncode, err) == (130, "")
    result = json.loads(out.splitlines()[-1])
    assert (result["ok"], result["interrupted"], result["problems"]) == (False, True, {})
    assert until(lambda: not living(program), 120)
    assert list(nodes.glob("*/nodes/*/*/envs/*")) == []


def test_ranks_that_hang_are_named_and_ended_where_that_is_set(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    source = "import time\ndef read_shard():\n    time.sleep(3600)\nprint('begun', flush=True)\n"
    (tmp_path / "loader.py").write_text(f"{source}read_shard()\n")
    command, ranks = ("loader.py",), Launcher.PROCESSES
    launch = replace(LAUNCH, command=command, launcher=ranks, hang_timeout=4.0)
    job = job_for(single, tmp_path, action=Action.RUN, launch=launch)
    code, events, _ = drive(program, job, STAGER_SILENCE_SECONDS="1")
    silent = next(event for event in events if event["event"] == "silent")
    assert (silent["line"], silent["rank"] in (0, 1)) == ("begun", True)
    hang = [event for event in events if event["event"] == "hang"][-1]
    assert (hang["kind"], hang["ranks"], hang["ended"]) == ("unknown", [0, 1], True)
    assert hang["place"] == "loader.py:3 read_shard"
    result = events[-1]
    assert (code, result["ok"], result["interrupted"]) == (3, False, False)
    assert problems(result) == {"local1": ["the ranks hang"]}
    assert result["hang"] == {name: hang[name] for name in result["hang"]}
    kept = json.loads((tmp_path / "logs" / "stacks.4711.json").read_text())
    frames = [one["threads"][0]["frames"][0] for ranks in kept["nodes"].values() for one in ranks]
    assert frames == [f"{tmp_path}/loader.py:3 read_shard"] * 2
    assert living(program) == []


ONLY_ONCE = """
import os, signal, sys
attempt, rank = int(os.environ["STAGER_ATTEMPT"]), int(os.environ["RANK"])
print("begun", attempt, rank, os.environ["STAGER_NODE"], os.environ["WORLD_SIZE"],
      os.environ["MASTER_PORT"], flush=True)
if attempt < int(sys.argv[2]) and rank == 1:
    print("step 7/20", flush=True)
    exec(sys.argv[1])
open(f"result.{rank}.txt", "a").write(f"{attempt}\\n")
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def drive_again(
    packed: Packed, program: Path, folder: Path, *words: str, spares: int = 0, **launch: Any
) -> tuple[int, list[dict[str, Any]]]:
    """Drive a program whose rank 1 does something in its first attempts."""
    (folder / "t.py").write_text(ONLY_ONCE)
    settings = replace(LAUNCH, command=("t.py", *words), launcher=Launcher.PROCESSES, **launch)
    nodes = tuple(f"local{number}" for number in range(1, 3 + spares))
    changed = {"action": Action.RUN, "launch": settings, "nodes": nodes, "spares": spares}
    done = run(driver_argv(program, job_for(packed, folder, **changed)))
    assert done.stderr == ""
    assert living(program) == []
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def attempts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "attempt"]


def test_a_rank_that_was_killed_runs_again(single: Packed, program: Path, tmp_path: Path) -> None:
    code, events = drive_again(single, program, tmp_path, KILL, "1", retries=1)
    assert (code, events[-1]["ok"], events[-1]["attempt"]) == (0, True, None)
    [again] = attempts(events)
    assert (again["number"], again["nodes"], again["left_out"]) == (1, ["local1", "local2"], [])
    failed = again["failed"]
    assert (failed["number"], failed["retry"], failed["class"]) == (0, "once", "killed")
    assert failed["cause"] == "rank 1 on local2 was killed (signal 9)"
    assert (failed["node"], failed["rank"], failed["progress"]) == ("local2", 1, "step 7")
    lines = (tmp_path / "logs" / "demo.4711.local2.1.out").read_text().splitlines()
    begun = [at for at, line in enumerate(lines) if line.startswith("begun")]
    mark = lines.index("stager: attempt 1: the ranks are started again")
    assert begun[0] < mark < begun[1]
    assert [lines[at].split()[:5] for at in begun] == [
        ["begun", "0", "1", "local2", "2"],
        ["begun", "1", "1", "local2", "2"],
    ]
    assert [(tmp_path / f"result.{rank}.txt").read_text() for rank in (0, 1)][1] == "1\n"


def test_a_spare_node_takes_the_place_of_one_whose_rank_was_killed(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    code, events = drive_again(single, program, tmp_path, KILL, "1", retries=2, spares=1)
    assert (code, events[-1]["ok"], events[-1]["left_out"]) == (0, True, ["local2"])
    assert events[-1]["world_size"] == 2
    first, again = attempts(events)
    assert (first["number"], first["spares"], first["failed"]) == (0, ["local3"], None)
    assert (again["nodes"], again["spares"]) == (["local1", "local3"], [])
    assert again["left_out"] == ["local2"]
    [left] = [event for event in events if event["event"] == "left-out"]
    assert left["nodes"] == {"local2": ["rank 1 on local2 was killed (signal 9)"]}
    text = (tmp_path / "logs" / "demo.4711.local3.1.out").read_text()
    assert "begun 1 1 local3 2" in text


@pytest.mark.parametrize("statement", ["raise ValueError('NaN')", "import no_such_module"])
def test_a_failure_of_the_program_is_not_tried_again(
    single: Packed, program: Path, tmp_path: Path, statement: str
) -> None:
    code, events = drive_again(single, program, tmp_path, statement, "9", retries=5)
    assert (code, attempts(events), events[-1]["attempt"]["retry"]) == (3, [], "no")


def test_a_node_whose_agent_is_killed_gets_another_agent(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    """The node itself is alive, and there is no other: the preflight shows that it can be used."""
    parents = "pid = os.getppid()\nos.kill(int(open(f'/proc/{pid}/stat').read().split()[3]), 9)"
    words = (f"{parents}\nos.kill(pid, 9)\nos.kill(os.getpid(), 9)", "1")
    code, events = drive_again(single, program, tmp_path, *words, retries=1)
    assert (code, events[-1]["ok"]) == (0, True)
    [again] = attempts(events)
    assert (again["failed"]["retry"], again["failed"]["node"]) == ("yes", "local2")
    assert again["nodes"] == ["local1", "local2"]


@pytest.mark.full
def test_a_hang_that_is_ended_is_tried_again(
    single: Packed, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGER_SILENCE_SECONDS", "1")
    words = ("import time; time.sleep(3600)", "1")
    code, events = drive_again(
        single, program, tmp_path, *words, retries=1, spares=0, hang_timeout=3.0
    )
    assert (code, events[-1]["ok"], events[-1]["hang"]) == (0, True, None)
    [again] = attempts(events)
    assert (again["failed"]["class"], again["failed"]["retry"]) == ("hang", "once")


def test_a_job_that_is_ended_between_two_attempts(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text("import os\nos._exit(7)\n")
    launch = replace(LAUNCH, command=("t.py",), launcher=Launcher.PROCESSES, retries=3)
    job = job_for(single, tmp_path, action=Action.RUN, launch=launch)
    started = subprocess.Popen(driver_argv(program, job), stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    answers = 0
    for line in started.stdout:
        answers += json.loads(line)["event"] == "launch"
        if answers == 2:
            break
    started.terminate()
    rest = started.stdout.read()
    assert started.wait(120) == 130
    result = json.loads(rest.splitlines()[-1])
    assert (result["event"], result["interrupted"]) == ("result", True)
    assert until(lambda: not living(program), 60)


COMPILES = """
import os, pathlib, signal, sys
folder = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
found = sorted(path.name for path in folder.rglob("*.so"))
print("found", found, flush=True)
print("step 1", flush=True)
if found and "crash" in sys.argv and os.environ["STAGER_ATTEMPT"] == "0":
    os.kill(os.getpid(), signal.SIGSEGV)
for name in sys.argv[1:2]:
    (folder / name).mkdir(parents=True, exist_ok=True)
    file = folder / name / f"{name}.so"
    file.write_bytes(ELF)
    if "fail" in sys.argv:
        os.utime(file, (0, 0))  # nothing writes to it any more
        (folder / name / "now.so").write_bytes(ELF)
        os._exit(1)
""".replace("ELF", repr(ELF))


def compile_in_job(
    packed: Packed, program: Path, folder: Path, *words: str, number: str = "1", **changed: Any
) -> tuple[list[str], list[dict[str, Any]]]:
    """Drive a program that finds compiled code and makes some; return what it found."""
    (folder / "t.py").write_text(COMPILES)
    launch = replace(LAUNCH, command=("t.py", *words), launcher=Launcher.PROCESSES, retries=1)
    store = CodeStore(str(folder / "compiled"), Digest.of(b"torch"), 1 << 20)
    changed = {"code_store": store, "nodes": ("local1",), "id": number, **changed}
    job = job_for(packed, folder, action=Action.RUN, launch=launch, **changed)
    code, events, _ = drive(program, job)
    assert code == (3 if "fail" in words else 0), events
    text = (folder / "logs" / f"demo.{number}.local1.0.out").read_text()
    return re.findall(r"^found (.*)", text, re.MULTILINE), events


def remarks(events: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for event in events if event["event"] == "note"]


def test_code_that_one_job_has_compiled_is_used_by_the_next(
    single: Packed, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, events = compile_in_job(single, program, tmp_path, "one")
    [made] = [event for event in events if event["event"] == "compiled"]
    assert (found, made["new_kernels"], made["used_from"]) == (["[]"], 1, [])
    # On a node that has never compiled.
    monkeypatch.setenv("STAGER_NODE_ROOT", str(tmp_path / "another"))
    (tmp_path / "another").mkdir()
    found, events = compile_in_job(single, program, tmp_path, "two", number="2")
    [made] = [event for event in events if event["event"] == "compiled"]
    assert found == ["['one.so']"]
    assert (made["used_from"], made["sent_to"], made["new_kernels"]) == (["1"], ["local1"], 1)
    assert "compiled code of job 1 (64 bytes, 1 kernel) is used, and sent to local1" in remarks(
        events
    )
    found, events = compile_in_job(single, program, tmp_path, number="3")
    [made] = [event for event in events if event["event"] == "compiled"]
    assert found == ["['one.so', 'two.so']"]
    assert (made["used_from"], made["sent_to"], made["new_bytes"]) == (["1", "2"], [], 0)
    # Other software, or none at all.
    other = CodeStore(str(tmp_path / "compiled"), Digest.of(b"torch 3"), 1 << 20)
    found, events = compile_in_job(single, program, tmp_path, number="4", code_store=other)
    assert found == ["[]"]
    found, events = compile_in_job(single, program, tmp_path, "x", number="5", code_store=None)
    assert (found, [event for event in events if event["event"] == "compiled"]) == (["[]"], [])


def test_a_job_whose_program_fails_keeps_what_it_has_compiled(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    _, events = compile_in_job(single, program, tmp_path, "one", "fail")
    [made] = [event for event in events if event["event"] == "compiled"]
    assert (made["new_kernels"], events[-1]["ok"]) == (1, False)
    assert len(list((tmp_path / "compiled").glob("*/*.code"))) == 1


def test_a_job_may_read_compiled_code_and_keep_none(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    store = CodeStore(str(tmp_path / "compiled"), Digest.of(b"torch"), 0)
    _, events = compile_in_job(single, program, tmp_path, "one", code_store=store)
    assert not [event for event in events if event["event"] == "compiled"]
    assert not (tmp_path / "compiled").exists()


@pytest.mark.full
def test_after_a_crash_with_compiled_code_ranks_compile_anew(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    compile_in_job(single, program, tmp_path, "one")
    found, events = compile_in_job(single, program, tmp_path, "two", "crash", number="2")
    assert found == ["['one.so']", "[]"]
    assert any("another attempt compiles anew" in text for text in remarks(events))
    assert not [event for event in events if event["event"] == "compiled"]


@pytest.mark.full
def test_a_node_without_a_compiler_is_named_where_jobs_compile(
    single: Packed, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_in_job(single, program, tmp_path, "one")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    _, events = compile_in_job(single, program, tmp_path, number="2")
    [warning] = [event for event in events if event["event"] == "note" and event["warning"]]
    assert warning["text"].startswith("local1: there is no C++ compiler")


def test_what_cannot_be_kept_fails_no_job(single: Packed, program: Path, tmp_path: Path) -> None:
    (tmp_path / "compiled").write_text("in the way")
    _, events = compile_in_job(single, program, tmp_path, "one")
    assert any("what the ranks have compiled was not kept" in text for text in remarks(events))
