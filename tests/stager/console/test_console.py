"""What a person sees: where it goes, in which colours, and what a job's end looks like."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from bundle.protocol.codec import encode
from bundle.protocol.enumerations import Action, PhaseName, TransferWay
from bundle.protocol.events import PhaseBegins, Record
from bundle.protocol.messages import Started
from bundle.protocol.problem import Problem, ProblemCode, make_ending_problem
from stager.cleanup import CleanedItem, CleanResult
from stager.cli.application import boundary
from stager.config.template import InitResult
from stager.console.job_result import Console
from stager.console.tables import make_node_table
from stager.core.errors import StagerError
from stager.forecast import JobForecast, PhaseSeconds, PlannedJob
from stager.jobs.outcome import Outcome, make_run_result, make_verify_result
from tests.support.events import job_ends, record
from tests.support.outcomes import job, outcome, slurm_job, slurm_outcome
from tests.support.problems import worded
from tests.support.stacks import HANG

ESCAPE = "\x1b"
REPO = Path(__file__).resolve().parents[3]


def problem(where: str = "") -> dict[str, str]:
    return worded("it does not fit", where, "needs 2 GB, 1 GB are free", "free some").to_json()


def quiet(**launch: Any) -> Console:
    """The console of a local job that is launched in a certain way."""
    console = Console(quiet=True)
    console.job(replace(job(), launch=replace(job().launch, **launch)), Path("/b"))
    return console


def test_quiet_leaves_data_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=True)
    console.begin("unpack")
    console.step("torch", 1, 2)
    console.note("by the way")
    console.event(record("unpack", node="n", ok=True, reused=True, path="/p"))
    console.data("data")
    console.error(StagerError("what", hint="do this", context=["a line"]))
    assert capsys.readouterr() == ("data\n", "error: what\n  a line\nhint: do this\n")


def test_json_owns_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(as_json=True)
    console.data("NODE n OK")
    console.emit(InitResult(path=Path("/p"), requirements=()))
    out, err = capsys.readouterr()
    assert json.loads(out) == {"schema": 1, "path": "/p", "requirements": []}
    assert err == "NODE n OK\n"


def test_ranks_output_is_the_first_nodes_unless_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose, expected in (
        (False, ["from local1"]),
        (True, ["local1: from local1", "local2: from local2"]),
    ):
        console = Console(verbose=verbose)
        for node, head in (("local1", True), ("local2", False)):
            console.event(record("output", node=node, head=head, lines=[f"from {node}"]))
        assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("restarts", [0, 1])
def test_torchruns_report_is_left_to_the_log(
    restarts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless ranks are started again: then more of the program's output follows it."""
    text = (REPO / "tests" / "samples" / "torchrun-2.13-sigkill.txt").read_text()
    lines = [*text.splitlines(), "the second attempt"]
    console = quiet(max_restarts=restarts)
    console.event(record("output", node="local1", head=True, lines=lines))
    shown = capsys.readouterr().out.splitlines()
    assert shown[:4] == lines[:4]
    assert not [line for line in shown if "multiprocessing/api.py" in line]
    assert ("the second attempt" in shown) == (len(shown) > 4) == bool(restarts)


def test_node_lines_are_the_result_of_verify_and_talk_of_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "NODE n1 OK\n"
    for action, expected in ((Action.VERIFY, (said, "")), (Action.RUN, ("", said))):
        console = Console(quiet=action is Action.VERIFY)
        console.job(replace(job(), action=action), Path("/b"))
        capsys.readouterr()
        console.event(record("probe", node="n1", ok=True, line="NODE n1 OK"))
        assert capsys.readouterr() == expected


def test_a_slurm_job_is_named_when_it_has_its_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.data("data")
    console.job(slurm_job(), Path("/store/b.tar"))
    console.talk("salloc: Pending job allocation 12")
    console.talk("salloc: job 12 queued and waiting for resources")
    console.talk("salloc: Granted job allocation 12")
    nodes = [f"n{number:02}" for number in range(1, 11)]
    console.event(record("job", job_id="12", nodes=nodes, log_dir="/logs"))
    out, err = capsys.readouterr()
    assert out == "data\n"
    assert err.splitlines() == [
        "bundle b.tar",
        "  job 12 is waiting for nodes (Ctrl-C cancels it)",
        "  job 12: nodes allocated",
        "job 12: 10 nodes (n01,n02,n03,n04,n05,n06,n07,n08,...), logs: /logs",
    ]


def plan(sent: int) -> dict[str, Any]:
    return {
        "event": "plan", "why": "2 nodes lack 1 layer", "bytes": sent,
        "groups": [
            {"nodes": ["n1"], "how": "present", "bytes": 0, "layers": [], "work": None},
            {"nodes": ["n2", "n3"], "how": "sbcast", "bytes": sent, "layers": ["torch"],
             "work": None},
        ],
        "cpus": 2,
        "forecast": {"measured": False, "seconds": {
            "preflight": 0.42, "send": 2.4, "unpack": 3.66, "stage": 4.1, "probe": 0.7,
            "launch": 2.1, "total": 7.32,
        }},
    }  # fmt: skip


EXPECTED = (
    "  expected: preflight 0.4 s, send 2.4 s, unpack 3.7 s, stage 4.1 s, probe 0.7 s, "
    "launch 2.1 s, total 7.3 s"
)


def test_a_dry_run_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(verbose=True)
    asked = slurm_job(dry_run=True)
    console.job(asked, Path("/b"))
    console.event(record(**plan(3_000_000)))
    ended = Outcome(job=asked, bundle=Path("/b"), result=job_ends(ok=True))
    assert console.show_run(ended) == console.show_verify(ended) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "n1 present 0 bytes, 0 layers",
        "n2,n3 sbcast 3.0 MB, 1 layer: torch",
    ]
    assert "nothing was sent, changed or started" in err
    assert EXPECTED in err.splitlines()
    assert "  (rates assumed)" in err.splitlines()
    seconds = PhaseSeconds(**plan(0)["forecast"]["seconds"])
    forecast = JobForecast(nodes=3, basis="of 2 jobs", measured=True, seconds=seconds)
    console.show_plan(
        PlannedJob(
            argv=("salloc",), bundle=Path("/b"), id="0" * 64, transfer=TransferWay.SBCAST,
            bytes_at_most=5, nodes=(3, 3), log_dir=Path("/logs"), forecast=forecast,
        )
    )  # fmt: skip
    err = capsys.readouterr().err
    assert EXPECTED.replace("expected", "expected on 3 nodes that have nothing of it yet") in err
    assert "  (rates measured on earlier jobs)" in err
    assert "at most 5 bytes would be sent by sbcast: what the nodes already have" in err


def test_nodes_that_are_left_out_and_results_that_come_home(
    capsys: pytest.CaptureFixture[str],
) -> None:
    event = {
        "event": "collected", "node": "n1", "from": "/tmp/w", "to": "/home/me/p", "files": 3,
        "bytes": 2_500_000, "renamed": {"out": "out.1"}, "problems": [problem()],
    }  # fmt: skip
    console = Console()
    console.event(record("left-out", nodes={"n2": ["n2: the disk is full", "so is /tmp"]}))
    console.event(record(**event))
    assert capsys.readouterr().err.splitlines() == [
        "warning: n2 is left out: the disk is full; so is /tmp",
        "  n1: 3 files, 2.5 MB: /tmp/w -> /home/me/p",
        "  out has files that would be lost; the results of this job are out.1",
        "warning: n1: it does not fit; needs 2 GB, 1 GB are free; free some",
    ]


def test_nodes_to_exclude_are_ready_to_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"n2": [problem()], "n3": [problem("/x")]}
    assert Console().show_verify(slurm_outcome(problems=found)) == 3
    assert capsys.readouterr().err.splitlines()[-4:] == [
        "2 of 3 nodes cannot run it: n2,n3",
        "hint: to leave them out: --exclude=n2,n3",
        "logs: /logs",
        "more: stager diagnose 77 --log-dir /logs",
    ]
    Console().show_verify(slurm_outcome(problems={f"n{n}": [problem()] for n in (1, 2, 3)}))
    assert "--exclude" not in capsys.readouterr().err


def test_no_node_is_excluded_for_the_fault_of_the_drivers_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = slurm_outcome(problems={"login1": [problem("/shared/b.tar")]})
    assert Console().show_verify(outcome) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: login1: /shared/b.tar: ")
    assert lines[-1] == "no node is at fault, but login1, where the driver ran"
    assert not any("--exclude" in line for line in lines)
    assert make_verify_result(outcome).host_problems.keys() == {"login1"}


@pytest.mark.parametrize(
    ("ended_by", "kind", "said", "hint"),
    [
        ("time-limit", "time-limit", "the time limit was reached", "--time"),
        ("cancelled", "killed", "was cancelled from outside", "sacct --jobs=77"),
        ("node-failure", "node-failure", "a node of the job was lost", "--exclude"),
        ("preempted", "preemption", "another job took the nodes", "--requeue"),
        ("moonlight", "unknown", "Slurm ended the job: moonlight", "scontrol show job 77"),
    ],
)
@pytest.mark.parametrize("interrupted", [False, True])
def test_jobs_that_slurm_ends(
    ended_by: str, kind: str, said: str, hint: str, interrupted: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """However the driver saw it: only a user's own Ctrl-C is an interrupt."""
    end = make_ending_problem(ended_by, "77").to_json()
    ended = slurm_outcome(ended_by=ended_by, interrupted=interrupted, problems={"n1": [end]})
    for show in (Console(quiet=True).show_run, Console(quiet=True).show_verify):
        assert show(ended) == 3
        shown = capsys.readouterr().err
        assert shown.count(said) == 1
        assert hint in shown
    result = make_run_result(ended)
    assert (result.first_failure.kind, result.ended_by) == (kind, ended_by)


def test_silent_ranks_are_named_and_where_they_are_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = quiet()
    console.event(record("silent", seconds=312.0, usual=9.5, rank=3, line="step 7\rstep 8"))
    console.event(record("silent", seconds=240.0))
    console.event(record("hang", **encode(HANG)))
    console.event(record("hang", text="some ranks work", certain=False))
    console.event(record("hang", text="no rank shows why", certain=False, ended=True))
    asked = "`stager stacks 77 --log-dir /logs` shows where each rank is"
    assert capsys.readouterr().err.splitlines() == [
        "warning: no rank has printed anything for 5 min 12 s (longest before: 9.5 s); the last "
        "line, of rank 3: step 8",
        "warning: no rank has printed anything for 4 min 0 s",
        f"warning: the ranks hang: {HANG.text}; {asked}",
        f"warning: the ranks may hang: some ranks work; {asked}",
        "warning: the ranks may hang: no rank shows why; the job is ended for it "
        "(launch.hang-timeout)",
    ]


@pytest.mark.parametrize("how", ["", "time-limit", "interrupted"])
def test_a_hang_is_named_once_however_the_job_was_ended(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = Problem(ProblemCode.RANKS_HANG, "node03", {"seconds": "900", "why": HANG.text})
    ends = {"ended_by": how} if how == "time-limit" else {"interrupted": bool(how)}
    found = {"node03": [problem.to_json()]} if not how else {}
    ended = slurm_outcome(problems=found, hang=encode(HANG), exit_codes={}, **ends)
    assert Console(quiet=True).show_run(ended) == (130 if how == "interrupted" else 3)
    shown = capsys.readouterr().err
    assert shown.count(HANG.text) == 1
    retry = "retry: once: a hang may depend on timing"
    assert f"class: hang\n{retry}\nhint: see what that rank does at this line" in shown
    assert "--exclude" not in shown


def test_a_job_that_slurm_starts_again_has_no_result_yet() -> None:
    ended = slurm_outcome()
    ended.take(record("job", job_id="78", nodes=["n5"], log_dir="/other"))
    assert (ended.result, ended.job.id, ended.job.nodes) == (None, "78", ("n5",))
    assert ended.job.log_dir == "/other"


def test_the_table_of_a_verification() -> None:
    ended = slurm_outcome(problems={"n2": [problem("[bold]/tmp")]})
    facts = {"python": "3.11", "packages": {"torch": "2.13.0", "transformers": "5.1"}}
    for node, ok in (("n1", True), ("n2", False)):
        seen = {"interface": "eth0", "seconds": 1.25, "address": "10.0.0.1", **facts}
        ended.take(record("probe", node=node, ok=ok, origin_ok=ok, **seen))
    screen = io.StringIO()
    RichConsole(file=screen, width=160).print(make_node_table(make_verify_result(ended).nodes))
    lines = [line.split() for line in screen.getvalue().splitlines()]
    titles = "node state python torch tfm interface address seconds problem"
    assert lines[0] == titles.split()
    row = ["3.11", "2.13.0", "5.1", "eth0", "10.0.0.1", "1.2"]
    assert lines[1] == ["n1", "OK", *row]
    assert lines[2][:9] == ["n2", "FAILED", *row, "[bold]/tmp:"]
    assert lines[3][:2] == ["n3", "FAILED"]


def test_a_problem_of_several_nodes_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"local1": [problem()], "local2": [problem(), problem("/x")]}
    assert Console().show_verify(outcome(problems=found)) == 3
    assert capsys.readouterr().err.splitlines() == [
        "error: local1,local2: it does not fit; needs 2 GB, 1 GB are free",
        "error: local2: /x: it does not fit; needs 2 GB, 1 GB are free",
        "hint: free some",
        "2 of 2 nodes cannot run it: local1,local2",
        "logs: /logs",
        "more: stager diagnose 77 --log-dir /logs",
    ]


def test_many_findings_have_a_line_each_and_this_host_is_not_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    candidates = [f"/opt/python{number}/bin/python3: 3.{number}.0" for number in range(6, 9)]
    values = {"version": "3.12", "listed": "; ".join(candidates)}
    told = [Problem(ProblemCode.NO_CPYTHON, os.uname().nodename, values).to_json()]
    Console().show_verify(outcome(problems={"local1": told, "local2": told}))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:4] == [
        "error: local1,local2: there is no CPython 3.12, which the bundle was built for",
        f"  found {candidates[0]}",
        *(f"  {line}" for line in candidates[1:]),
    ]
    assert lines[4].startswith("hint: put python3.12 on PATH")


def test_seals_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    items = tuple(
        CleanedItem(place="offline root", path=Path(f"/root/{name}"), bytes=121, kind=kind,
                    why="unused")
        for kind, name in (("seal", "seals/a.txt"), ("layer", "layers/b"), ("seal", "seals/c.txt"))
    )  # fmt: skip
    result = CleanResult(ok=True, dry_run=False, nodes_skipped=None, items=items, bytes=363)
    Console().show_clean(result)
    assert capsys.readouterr().out.splitlines() == [
        "offline root: 121 bytes  /root/layers/b  unused",
        "offline root: 242 bytes  /root/seals  2 seals of bundles that are gone",
    ]


def test_a_job_whose_rank_failed(capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "node": "local2", "rank": 3, "local_rank": 1, "exit_code": 1, "exception": "KeyError",
        "message": "'x'", "lines": ["Traceback", "KeyError: 'x'"], "time": 1.0,
    }  # fmt: skip
    ended = outcome(problems={"local2": []}, failures=[record], exit_codes={"local2": 1})
    assert Console(quiet=True).show_run(ended) == 3
    assert capsys.readouterr().err.splitlines() == [
        "error: local2 rank 3 failed (exit status 1): KeyError: 'x'",
        "  | Traceback",
        "  | KeyError: 'x'",
        "class: python-error",
        "retry: no: the program does the same again",
        "hint: the traceback names the line in your program",
        "logs: /logs",
        "more: stager diagnose 77 --log-dir /logs",
    ]


def test_an_agent_that_was_ended_for_another_node_is_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {"phase": "launch", "log_dir": "/logs", "first": "local2"}
    followed = Problem(ProblemCode.NO_ANSWER_FOLLOWED, "local1", values).to_json()
    record = {"node": "local2", "rank": 3, "exit_code": 7, "time": 1.0}
    ended = outcome(problems={"local1": [followed]}, failures=[record])
    assert Console(quiet=True).show_run(ended) == 3
    assert "local1" not in capsys.readouterr().err
    # Alone, it is all that is known.
    assert Console(quiet=True).show_run(outcome(problems={"local1": [followed]})) == 3
    assert "error: local1: launch gave no answer; it was ended" in capsys.readouterr().err


def test_the_training_is_told_apart_from_its_launch(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"preflight": 0.25, "launch": 60.0, "collect": 1.0}
    ended = outcome(ok=True, world_size=4, seconds=seconds)
    begins = PhaseBegins(PhaseName.LAUNCH)
    for event, time in ((begins, 100.0), (Started("local1"), 101.0), (Started("local2"), 102.5)):
        ended.take(Record(event, time=time))
    assert Console().show_run(ended) == 0
    done = capsys.readouterr().err.splitlines()[0]
    assert done == "done: 4 ranks; preflight 0.2 s, launch 2.5 s, train 57.5 s, collect 1.0 s"
    assert make_run_result(ended).seconds == seconds, "scripts rely on these keys"


def test_an_interrupted_job(capsys: pytest.CaptureFixture[str]) -> None:
    ended = outcome(interrupted=True)
    assert Console().show_run(ended) == Console().show_verify(ended) == 130
    assert capsys.readouterr().err.count("interrupted; nothing is left running; logs: /logs\n") == 2


def test_lost_output_is_a_warning_unless_it_is_the_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault = "demo.77.local1.0.out: No space left on device"
    lost = [{"node": "local1", "rank": rank, "bytes": 5, "why": fault} for rank in range(20)]
    source = {"source": "rank 3 (5 bytes)", "why": "no disk"}
    error = Problem(ProblemCode.OUTPUT_NOT_LOGGED, "local1", source).to_json()
    Console().show_run(outcome(ok=True, world_size=1, logs_fault=fault, logs_lost=lost))
    said = capsys.readouterr().err
    assert f"warning: the logs are not complete: {fault}\n" in said
    assert "warning: local1: output of rank 7 (5 bytes) is lost\n" in said
    assert "rank 8" not in said
    assert "warning: and output of 12 more ranks\n" in said
    Console().show_verify(outcome(problems={"local1": [error]}, logs_lost=lost))
    said = capsys.readouterr().err
    assert said.count("local1: output of rank 3 (5 bytes) is lost") == 1
    assert "error: local1: output of rank 3 (5 bytes) is lost; no disk\nhint: the ranks" in said
    assert "warning: local1: output of rank 4 (5 bytes) is lost\n" in said


def test_what_standard_output_has_no_letters_for_is_escaped() -> None:
    code = r"from stager.console.job_result import Console; Console().data('a \u2603 \udcff')"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=REPO, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"a \\u2603 \\udcff\n"), done.stderr


def test_a_file_that_is_printed_is_whole_or_an_error(tmp_path: Path) -> None:
    """Without a buffer a write may take a part only, as on a disk that becomes full."""
    code = (
        "import resource; from stager.console.job_result import Console\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "Console().text('x' * 300_000)\n"
    )
    with (tmp_path / "script").open("wb") as out:
        argv = [sys.executable, "-u", "-c", code]
        done = subprocess.run(argv, cwd=REPO, stdout=out, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert b"File too large" in done.stderr


SHOWN = """\
from stager.console.job_result import Console
from stager.core.errors import StagerError
console = Console()
console.begin("layers")
console.show_pulse("4 s, a sign of life")
for done in range(1, 4):
    console.step("torch 2.13.0 [bold]", done, 3)
console.data("/bundle.tar")
console.error(StagerError("what [red]"))
"""


def on_terminal(**env: str) -> str:
    """What the lines above look like on a terminal."""
    leader, follower = pty.openpty()
    argv = [sys.executable, "-c", SHOWN]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **env}
    out = subprocess.PIPE
    done = subprocess.run(argv, cwd=REPO, env=env, stdout=out, stderr=follower, check=True)
    os.close(follower)
    assert done.stdout == b"/bundle.tar\n"
    shown = b""
    with suppress(OSError):  # the other end is closed
        while chunk := os.read(leader, 65536):
            shown += chunk
    os.close(leader)
    return shown.decode()


def test_a_terminal_gets_colours_and_a_bar() -> None:
    shown = on_terminal()
    assert f"{ESCAPE}[1mMaking the layers{ESCAPE}[0m" in shown
    assert f"{ESCAPE}[31;1merror: what [red]{ESCAPE}[0m" in shown
    assert "torch 2.13.0 [bold]" in shown
    assert "3/3" in shown
    assert f"4 s, a sign of life\r{ESCAPE}[2K" in shown  # before the bar stands in its place
    assert f"{ESCAPE}{ESCAPE}" not in shown
    plain = on_terminal(NO_COLOR="1")
    assert "Making the layers\r\n" in plain
    assert "error: what [red]\r\n" in plain
    assert f"{ESCAPE}[1m" not in plain
    assert f"{ESCAPE}[3" not in plain
    dumb = on_terminal(TERM="dumb")
    assert ESCAPE not in dumb
    assert "  torch 2.13.0 [bold] (2/3)\r\n" in dumb


def test_an_interrupted_command_has_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(as_json=True)
    with pytest.raises(KeyboardInterrupt), boundary(console):
        raise KeyboardInterrupt
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert (result["schema"], result["ok"]) == (1, False)
    assert result["error"]["message"] == "interrupted"
    assert said.err == "interrupted\n"
    with pytest.raises(KeyboardInterrupt), boundary(console):  # its result is there
        raise KeyboardInterrupt
    assert capsys.readouterr().out == ""
