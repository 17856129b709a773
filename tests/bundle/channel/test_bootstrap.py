"""What runs first on a node, started as a step of Slurm's starts it, with a small program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bundle.channel.frames import FrameReader
from bundle.driver.transports.agent_program import MAIN, compress_modules, make_start_command
from bundle.protocol.problem import Problem
from bundle.system.own_program import read_source

BOOT = read_source("channel.bootstrap").decode()
PROGRAM = """\
import json, os, sys

def command(argv):
    assert argv == sys.argv[1:]
    print(json.dumps({
        "argv": argv[:3],
        "program": sys.argv[0],
        "python": sys.executable,
        "flags": [sys.flags.isolated, sys.flags.no_site],
        "request": json.load(os.fdopen(int(argv[3]))),
        "behind": sys.stdin.readline(),
        "file": __file__,
    }), flush=True)
    return 0
"""
MODULES = {
    "__main__.py": MAIN,
    "bundle/__init__.py": b"",
    "bundle/agent/__init__.py": b"",
    "bundle/agent/agent.py": PROGRAM.encode(),
}


def start(
    data: bytes, pythons: tuple[str, ...] = (sys.executable,), program: str = BOOT
) -> subprocess.CompletedProcess[bytes]:
    """Run the starter on a node with this standard input."""
    return subprocess.run(
        make_start_command(pythons, "probe", ("-c", program, "agent", "probe")),
        input=data,
        env={"PATH": os.defpath, "SLURMD_NODENAME": "n07", "SLURM_PROCID": "1"},
        capture_output=True,
        check=False,
        timeout=300,
        cwd="/",
    )


def opening(
    request: dict[str, Any], modules: Mapping[str, bytes] = MODULES, behind: bytes = b"go\n"
) -> bytes:
    asked, program = zlib.compress(json.dumps(request).encode()), compress_modules(modules)
    return b"%d %d 0\n" % (len(program), len(asked)) + program + asked + behind


def test_the_program_gets_the_request_and_the_rest_of_the_talk() -> None:
    request = {"common": {"job": {"id": "42"}}, "own": {"n08": {"root": "/b"}}}
    # It comes in many reads, and in several blocks.
    done = start(opening(request, {"noise": os.urandom(5 << 20), **MODULES}))
    assert (done.returncode, done.stderr) == (0, b"")
    said = json.loads(done.stdout)
    assert said["argv"] == ["agent", "probe", "--request"]
    assert said["flags"] == [1, 1]
    assert said["request"] == request
    assert said["behind"] == "go\n"
    assert said["program"].startswith("/proc/self/fd/")  # there is no file of it
    assert said["file"] == f"{said['program']}/bundle/agent/agent.py"


def noting(path: Path, ran: Path) -> Path:
    """A Python that notes each time that it runs."""
    path.write_text(f'#!/bin/sh\necho "$0" >>{ran}\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def test_the_python_of_the_request_runs_the_program(tmp_path: Path) -> None:
    own = noting(tmp_path / "own-python", tmp_path / "ran")
    request = {"common": {"python": "/no/such/python"}, "own": {"n07": {"python": str(own)}}}
    done = start(opening(request))
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "ran").read_text() == f"{own}\n"
    same = {"common": {"python": str(own)}, "own": {"n08": {"python": "/no/such/python"}}}
    assert start(opening(same)).returncode == 0
    done = start(opening({"common": {"python": "/no/such/python"}, "own": {}}))
    assert done.returncode == 1
    assert b"/no/such/python" in done.stderr or b"No such file" in done.stderr


@pytest.mark.parametrize("kept", [0, 5, 200])
def test_a_driver_that_goes_away_early_ends_it(kept: int) -> None:
    done = start(opening({"common": {}, "own": {}})[:kept])
    assert done.returncode == 1
    assert b"EOFError: the driver has gone" in done.stderr


def test_the_first_python_that_is_new_enough_is_taken(tmp_path: Path) -> None:
    old, new = tmp_path / "old", noting(tmp_path / "new", tmp_path / "ran")
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    request = {"common": {"python": sys.executable}, "own": {}}
    done = start(opening(request), pythons=("/no/python", str(old), str(new)))
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "ran").read_text() == f"{new}\n" * 2  # asked for its version, then used


def test_it_stands_alone() -> None:
    """Its source is an argument: no longer than one may be, and without our package."""
    assert len(BOOT.encode()) < 128 << 10
    assert "from ." not in BOOT


def test_where_memory_files_are_forbidden() -> None:
    """The vm.memfd_noexec setting: the program is then in a file without a name."""
    refusing = "def refuse(*_): raise PermissionError(13, 'memfd')\nos.memfd_create = refuse\n"
    broken = BOOT.replace("import zlib\n", f"import zlib\n{refusing}")
    assert broken != BOOT
    done = start(opening({"common": {"x": 1}, "own": {}}), program=broken)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["request"]["common"] == {"x": 1}


def test_the_shells_part_tells_that_there_is_no_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")  # one that is too old ends like this
    old.chmod(0o755)
    (tmp_path / "cat").symlink_to(shutil.which("cat") or "/bin/cat")  # it reads the input
    argv = make_start_command(["/no/python"], "preflight", ["-c", "print(1)"])
    env = {"PATH": str(tmp_path), "SLURMD_NODENAME": "n07", "SLURM_PROCID": "3"}
    done = subprocess.run(argv, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (3, b"")
    ((source, line),) = FrameReader().feed(done.stdout)
    event = json.loads(line)
    assert (source, event["v"], event["event"], event["node"]) == ("n07:3", 1, "preflight", "n07")
    assert not event["ok"]
    (problem,) = event["problems"]
    assert str(Problem.from_json(problem)) == (
        "n07: no Python 3.9 or newer was found; tried 7 names, python3 on PATH among them; "
        "install Python there, or leave the node out with --exclude=n07"
    )
