"""One node's part: real agents asked for each phase, and how a launcher is attended to."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bundles import node_program
from jobs import ask, job_for
from processes import living
from torch_project import TorchProject

from bundle import agent, net
from bundle.manifest import Requires
from bundle.problem import NodeError
from stager.diagnose import first_failure
from stager.pack import Packed


def whats(event: dict[str, Any]) -> list[str]:
    return [problem["what"] for problem in event["problems"]]


# --- preflight -----------------------------------------------------------------------------------


def test_preflight_tells_all_that_later_phases_need(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    code, (event,) = ask(program, "preflight", job_for(single, tmp_path))
    assert (code, event["v"], event["event"], event["node"]) == (0, 1, "preflight", "local1")
    assert (event["ok"], event["problems"], event["proj"], event["pkgs"]) == (True, [], True, True)
    assert event["root"] == f"{os.environ['STAGER_NODE_ROOT']}/stager-{os.geteuid()}"
    assert os.access(event["python"], os.X_OK)
    assert event["address"] == "127.0.0.1"
    assert event["port"] == net.port_for("4711")
    assert event["host"]["cpus"] >= 1
    assert event["seconds"] >= 0


def test_preflight_reports_every_problem_at_once(
    single: Packed, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGER_NODE_ROOT", str(tmp_path / "absent"))
    job = job_for(
        single,
        tmp_path,
        requires=Requires(python="3.77", machine="pdp11", libc="glibc", libc_version="2.99"),
        run_dir=str(tmp_path / "gone"),
    )
    code, (event,) = ask(program, "preflight", job)
    assert (code, event["ok"]) == (3, False)
    assert whats(event) == [
        "no directory on this node can hold the environment",
        "there is no CPython 3.77, which the bundle was built for",
        "the bundle is for another machine",
        "the node's C library is too old",
        "the run directory is not visible",
    ]
    assert event["proj"] is False


def test_a_bundle_that_the_node_cannot_see_is_to_be_placed(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    job = job_for(single, tmp_path, bundle=str(tmp_path / "elsewhere.tar"))
    code, (event,) = ask(program, "preflight", job)
    assert (code, event["ok"], event["pkgs"]) == (0, True, False)


def test_a_port_that_is_taken_is_passed_over(single: Packed, program: Path, tmp_path: Path) -> None:
    preferred = net.port_for("4711")
    with socket.create_server(("127.0.0.1", preferred)):
        _, (event,) = ask(program, "preflight", job_for(single, tmp_path))
    assert event["ok"] is True
    assert event["port"] not in (0, preferred)
    assert net.FIRST_PORT <= event["port"] <= net.LAST_PORT


def test_only_the_head_is_asked_for_a_port(single: Packed, program: Path, tmp_path: Path) -> None:
    _, (event,) = ask(program, "preflight", job_for(single, tmp_path), node_rank=1)
    assert (event["address"], event["port"]) == ("", 0)


# --- unpack and probe ----------------------------------------------------------------------------


@pytest.fixture
def found(single: Packed, program: Path, tmp_path: Path) -> dict[str, Any]:
    """What the preflight found, as the driver passes it on."""
    _, (event,) = ask(program, "preflight", job_for(single, tmp_path))
    return {key: event[key] for key in ("root", "python")}


def test_unpack_and_probe(
    single: Packed, program: Path, tmp_path: Path, found: dict[str, Any]
) -> None:
    job = job_for(single, tmp_path)
    request = {**found, "bundle": str(single.path)}
    code, (first,) = ask(program, "unpack", job, **request)
    assert (code, first["ok"], first["reused"]) == (0, True, False)
    assert first["files_written"] > 0
    assert first["path"].startswith(f"{found['root']}/envs/")
    code, (again,) = ask(program, "unpack", job, **request)
    assert (again["path"], again["reused"], again["files_written"]) == (first["path"], True, 0)

    code, (event,) = ask(program, "probe", job, **found, head="127.0.0.1")
    assert (code, event["ok"], event["origin_ok"]) == (0, True, True)
    assert (event["interface"], event["address"]) == ("lo", "127.0.0.1")
    assert event["line"].startswith("NODE local1 OK -> PY 3.")


def test_a_damaged_bundle_is_a_problem_and_no_environment(
    single: Packed, program: Path, tmp_path: Path, found: dict[str, Any]
) -> None:
    data = bytearray(single.path.read_bytes())
    data[-1600] ^= 1
    (tmp_path / "damaged.tar").write_bytes(data)
    request = {**found, "bundle": str(tmp_path / "damaged.tar")}
    code, (event,) = ask(program, "unpack", job_for(single, tmp_path), **request)
    assert (code, event["ok"]) == (3, False)
    assert "damaged" in whats(event)[0]
    assert os.listdir(f"{found['root']}/envs") == []


def test_an_agent_that_is_told_to_end_says_nothing_more(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    argv = [sys.executable, "-I", "-S", str(program), "agent", "preflight"]
    waiting = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(1)  # it waits for its request
    waiting.terminate()
    out, err = waiting.communicate(timeout=20)
    assert (waiting.returncode, out, err) == (143, b"", b"")


# --- launch --------------------------------------------------------------------------------------


def attend(code: str, tmp_path: Path) -> tuple[int, list[str], list[str]]:
    """Attend to a Python program: its status, the last lines, and all lines."""
    lines: list[str] = []
    argv = [sys.executable, "-c", code]
    status, tail = agent._attend(
        argv, os.environ, str(tmp_path), lambda event: lines.extend(event["lines"])
    )
    return status, tail, lines


def test_all_lines_come_in_order_and_the_last_are_kept(tmp_path: Path) -> None:
    code = "for n in range(3000): print(n)\nimport sys; sys.stderr.write('no end')\nsys.exit(9)"
    status, tail, lines = attend(code, tmp_path)
    assert status == 9
    assert lines == [*map(str, range(3000)), "no end"]
    assert tail == lines[-200:]


def test_output_that_is_not_text_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    status, _, lines = attend(r"import os; os.write(1, b'a\xffb\n\n')", tmp_path)
    assert (status, lines) == (0, ["a\N{REPLACEMENT CHARACTER}b", ""])


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    """As of a progress bar, which returns to the beginning of its line."""
    code = "import sys\nfor n in range(3000): sys.stdout.write('\\r' + 'x' * 999)"
    _, _, lines = attend(code, tmp_path)
    assert "".join(lines) == ("\r" + "x" * 999) * 3000
    assert max(map(len, lines)) < 2 * agent._LONGEST_LINE


def test_the_programs_end_is_not_put_off_by_a_child_that_it_leaves(tmp_path: Path) -> None:
    child = "import time\nwhile True: print('still here', flush=True); time.sleep(0.01)"
    code = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "print('done')\n"
    )
    started = time.monotonic()
    status, _, lines = attend(code, tmp_path)
    assert time.monotonic() - started < 10
    assert (status, "done" in lines) == (0, True)
    assert living("still here") == []


def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, sys\n"
        "argv = [sys.executable, '-c', 'import time; time.sleep(601)']\n"
        "subprocess.Popen(argv, start_new_session=True)\n"
        "print('begun', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    status, _, lines = attend(code, tmp_path)
    assert (status, lines) == (128 + signal.SIGKILL, ["begun"])
    assert living("sleep(601)") == []


def test_a_launcher_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="the launcher cannot start"):
        agent._attend([str(tmp_path / "absent")], {}, str(tmp_path), lambda event: None)


def test_without_torch_the_launcher_says_so_and_nothing_is_left(
    single: Packed, program: Path, tmp_path: Path, found: dict[str, Any]
) -> None:
    job = job_for(single, tmp_path, action="run")
    ask(program, "unpack", job, **found, bundle=str(single.path))
    group = {"address": "127.0.0.1", "port": 61000, "backend": "gloo", "nproc": 1}
    code, events = ask(program, "launch", job, **found, group=group)
    assert code == 3
    assert [event["event"] for event in events] == ["started", "output", "launch"]
    assert events[0]["argv"][1:3] == ["-m", "torch.distributed.run"]
    last = events[-1]
    assert (last["ok"], last["exit_code"], last["failures"], last["problems"]) == (False, 1, [], [])
    assert "No module named" in last["tail"][-1]
    assert os.listdir(f"{found['root']}/jobs") == []


@pytest.mark.slow
@pytest.mark.network
def test_a_port_that_was_taken_in_between(torch_project: TorchProject, tmp_path: Path) -> None:
    """Between the preflight, which found it free, and the launch."""
    ran = torch_project.job("verify", "--nodes", "1", cwd=tmp_path)
    job = json.loads((ran.logs / f"job.{ran.report['job_id']}.json").read_text())
    job["launch"]["command"] = ["t.py"]
    (path,) = re.findall(r"(?:staged|reused) -> (\S+)", ran.log("local1"))
    program = node_program(torch_project.bundle, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        group = {"address": "127.0.0.1", "port": taken.getsockname()[1], "nproc": 1}
        group["backend"] = "gloo"
        request = {"root": path.partition("/envs/")[0], "python": "", "group": group}
        code, events = ask(program, "launch", job, **request)
    assert code == 3
    last = events[-1]
    result = {"exit_codes": {"local1": last["exit_code"]}, "tails": {"local1": last["tail"]}}
    failure = first_failure({**result, "failures": last["failures"]})
    assert failure is not None
    assert (failure.kind, failure.rank) == ("port", None)
    assert "address already in use" in failure.cause
