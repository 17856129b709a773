"""What a person sees: where it goes, in which colours, and what a job's end looks like."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.job import Job, Launch
from bundle.manifest import Requires
from bundle.problem import Problem
from stager.console import Console
from stager.errors import StagerError
from stager.verify import Outcome

ESCAPE = "\x1b"
REPO = Path(__file__).resolve().parents[1]


def job() -> Job:
    launch = Launch(("t.py",), 2, "torchrun", "auto", "auto", None, 0)
    return Job(
        id="77", name="demo", allocation="local", nodes=("local1", "local2"), bundle="/b.tar",
        bundle_id="0" * 64, requires=Requires("3.11", "x86_64", "glibc", "2.28"), room=(1, 1),
        packages=(), imports=(), node_root="auto", run_dir="/w", log_dir="/logs", action="run",
        import_modules=False, python_hints=(), launch=launch,
    )  # fmt: skip


def outcome(**result: Any) -> Outcome:
    return Outcome(job=job(), bundle=Path("/b.tar"), result={"ok": False, "seconds": {}, **result})


def problem(where: str = "") -> dict[str, str]:
    return Problem("it does not fit", where, "needs 2 GB, 1 GB are free", "free some").to_json()


def test_talk_and_data_are_apart(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.say("talk")
    console.data("data")
    assert capsys.readouterr() == ("data\n", "talk\n")


def test_quiet_leaves_data_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=True)
    console.begin("unpack")
    console.step("torch", 1, 2)
    console.note("by the way")
    console.event({"event": "unpack", "node": "n", "ok": True, "reused": True, "path": "/p"})
    console.data("data")
    console.error(StagerError("what", hint="do this", context=["a line"]))
    assert capsys.readouterr() == ("data\n", "error: what\n  a line\nhint: do this\n")


def test_json_owns_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(as_json=True)
    console.data("NODE n OK")
    console.emit({"ok": True})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"schema": 1, "ok": True}
    assert err == "NODE n OK\n"


def test_an_error_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    Console(as_json=True).error(StagerError("what", hint="do this", context=["a line"]))
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "schema": 1,
        "ok": False,
        "error": {"message": "what", "hint": "do this", "context": ["a line"]},
    }
    assert err.startswith("error: what\n")


@pytest.mark.parametrize("verbose", [False, True])
def test_ranks_output_is_the_first_nodes_unless_verbose(
    verbose: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(verbose=verbose)
    for node, head in (("local1", True), ("local2", False)):
        console.event({"event": "output", "node": node, "head": head, "lines": [f"from {node}"]})
    shown = capsys.readouterr().out.splitlines()
    everything = ["local1: from local1", "local2: from local2"]
    assert shown == (everything if verbose else ["from local1"])


@pytest.mark.parametrize("restarts", [0, 1])
def test_torchruns_report_is_left_to_the_log(
    restarts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless ranks are started again: then more of the program's output follows it."""
    text = (REPO / "tests" / "samples" / "torchrun-2.13-sigkill.txt").read_text()
    console = Console(quiet=True)
    asked = job()
    console.job(replace(asked, launch=replace(asked.launch, max_restarts=restarts)), Path("/b"))
    lines = [*text.splitlines(), "the second attempt"]
    console.event({"event": "output", "node": "local1", "head": True, "lines": lines})
    shown = capsys.readouterr().out.splitlines()
    assert shown[:4] == lines[:4]
    assert not [line for line in shown if "multiprocessing/api.py" in line]
    assert ("the second attempt" in shown) == bool(restarts)
    assert len(shown) == 4 if not restarts else len(shown) > 4


@pytest.mark.parametrize("action", ["verify", "run"])
def test_node_lines_are_the_result_of_verify_and_talk_of_run(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(quiet=action == "verify")
    console.job(replace(job(), action=action), Path("/b"))
    capsys.readouterr()
    console.event({"event": "probe", "node": "n1", "ok": True, "line": "NODE n1 OK"})
    out, err = capsys.readouterr()
    assert (out, err) == (("NODE n1 OK\n", "") if action == "verify" else ("", "NODE n1 OK\n"))


def test_events_that_a_newer_far_side_may_send_are_passed_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Console().event({"event": "from-the-future", "node": "n"})
    assert capsys.readouterr() == ("", "")


def test_a_node_that_failed_its_check_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Console().event({"event": "probe", "node": "n7", "ok": False})
    assert capsys.readouterr().out == "NODE n7 FAILED\n"


def test_a_problem_of_several_nodes_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"local1": [problem()], "local2": [problem(), problem("/x")]}
    assert Console().verified(outcome(problems=found)) == 3
    assert capsys.readouterr().err.splitlines() == [
        "error: local1,local2: it does not fit; needs 2 GB, 1 GB are free; free some",
        "error: local2: /x: it does not fit; needs 2 GB, 1 GB are free; free some",
        "2 of 2 nodes cannot run it: local1,local2",
    ]


def test_a_job_that_a_node_could_not_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert Console().ran(outcome(problems={"local2": [problem()]})) == 3
    assert capsys.readouterr().err.splitlines() == [
        "error: local2: it does not fit; needs 2 GB, 1 GB are free; free some",
        "logs: /logs",
    ]


def test_a_job_whose_rank_failed(capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "node": "local2", "rank": 3, "local_rank": 1, "exit_code": 1, "exception": "KeyError",
        "message": "'x'", "lines": ["Traceback", "KeyError: 'x'"], "time": 1.0,
    }  # fmt: skip
    ended = outcome(problems={"local2": []}, failures=[record], exit_codes={"local2": 1})
    assert Console(quiet=True).ran(ended) == 3
    assert capsys.readouterr().err.splitlines() == [
        "error: local2 rank 3 failed (exit status 1): KeyError: 'x'",
        "  | Traceback",
        "  | KeyError: 'x'",
        "class: python-error",
        "hint: the traceback names the line in your program",
        "logs: /logs",
    ]


def test_a_job_that_went_well(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"preflight": 0.25, "launch": 60.0}
    assert Console().ran(outcome(ok=True, world_size=4, seconds=seconds)) == 0
    assert capsys.readouterr().err.splitlines() == [
        "done: 4 ranks; preflight 0.2 s, launch 60.0 s",
        "logs: /logs/demo.77.*.out",
    ]


def test_an_interrupted_job(capsys: pytest.CaptureFixture[str]) -> None:
    ended = outcome(interrupted=True)
    assert Console().ran(ended) == Console().verified(ended) == 130
    assert capsys.readouterr().err.count("interrupted; nothing is left running; logs: /logs\n") == 2


def test_logs_that_are_not_complete_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    lost = "demo.77.local1.0.out: No space left on device"
    Console().ran(outcome(ok=True, world_size=1, logs_lost=lost))
    assert f"warning: the logs are not complete: {lost}\n" in capsys.readouterr().err


def test_what_standard_output_has_no_letters_for_is_escaped() -> None:
    code = r"from stager.console import Console; Console().data('a \u2603 \udcff')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"a \\u2603 \\udcff\n"), done.stderr


SHOWN = """\
import time
from stager.console import Console
from stager.errors import StagerError
console = Console()
console.begin("layers")
for done in range(1, 4):
    console.step("torch 2.13.0 [bold]", done, 3)
    time.sleep(0.15)
console.data("/bundle.tar")
console.error(StagerError("what [red]"))
"""


def on_terminal(**env: str) -> str:
    """What the lines above look like on a terminal."""
    leader, follower = pty.openpty()
    started = subprocess.Popen(
        [sys.executable, "-c", SHOWN],
        cwd=REPO,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", **env},
        stdout=subprocess.PIPE,
        stderr=follower,
    )
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 65536):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(leader)
    out, _ = started.communicate(timeout=20)
    assert (started.returncode, out) == (0, b"/bundle.tar\n")
    return shown.decode()


def test_a_terminal_gets_colours_and_a_bar() -> None:
    shown = on_terminal()
    assert f"{ESCAPE}[1mMaking the layers{ESCAPE}[0m" in shown
    assert f"{ESCAPE}[31;1merror: what [red]{ESCAPE}[0m" in shown
    assert "torch 2.13.0 [bold]" in shown
    assert "3/3" in shown


def test_no_color_is_respected() -> None:
    shown = on_terminal(NO_COLOR="1")
    assert "Making the layers\r\n" in shown
    assert "error: what [red]\r\n" in shown
    assert f"{ESCAPE}[1m" not in shown
    assert f"{ESCAPE}[3" not in shown


def test_a_dumb_terminal_gets_plain_lines() -> None:
    shown = on_terminal(TERM="dumb")
    assert ESCAPE not in shown
    assert "  torch 2.13.0 [bold] (2/3)\r\n" in shown
