"""The commands of ``node.pyz``, run as on a node: ``python3 -I -S node.pyz COMMAND``."""

import fcntl
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stager.pack.bundle import Packed
from tests.support.bundles import BASE_PYTHON, CLEAN, HERE, OWN, forge, node_program, run_node
from tests.support.interpreters import OTHERS
from tests.support.processes import until

SITE = f"lib/python{HERE.python}/site-packages"
VERSION = ".".join(map(str, sys.version_info[:3]))


# --- unpack --------------------------------------------------------------------------------------


def test_unpack_prints_the_path_and_nothing_else(
    standard: Packed, program: Path, base: Path
) -> None:
    done = run_node(program, "unpack", standard.path, base, "--id", standard.manifest.id)
    place = base / OWN / "envs" / standard.manifest.id
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{place}\n", "")
    assert (place / "pyvenv.cfg").exists()


def test_failures_are_one_message(standard: Packed, program: Path, base: Path) -> None:
    for arguments, what in [
        ((base / "absent.tar", base), "the bundle cannot be read"),
        ((program, base), "damaged or not a bundle"),
        ((standard.path, base / "absent"), "no directory on this node can hold"),
        ((standard.path, "relative"), "no directory on this node can hold"),
        ((standard.path, base, "--id", "0" * 64), "another bundle than the job was made for"),
    ]:
        done = run_node(program, "unpack", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("stager: ")
        assert what in done.stderr
    said = json.loads(run_node(program, "unpack", *arguments, "--json").stdout)
    assert (said["v"], said["ok"]) == (1, False)
    assert what in said["problem"]["what"]
    assert set(said["problem"]) == {"code", "where", "values", "what", "why", "fix"}
    assert all(said["problem"].values())


@pytest.mark.parametrize(
    "arguments", [[], ["explode"], ["unpack"], ["exec", "b", "r"], ["exec", "b", "r", "--"]]
)
def test_usage_errors_are_2(program: Path, arguments: list[str]) -> None:
    done = run_node(program, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: node.pyz" in done.stderr


# --- another Python starts it --------------------------------------------------------------------


@pytest.mark.parametrize("python", OTHERS)
def test_under_another_python_the_right_one_takes_over(
    standard: Packed, program: Path, base: Path, python: str
) -> None:
    done = run_node(program, "unpack", standard.path, base, "--python", BASE_PYTHON, python=python)
    assert (done.returncode, done.stderr) == (0, "")
    said = run_node(
        program, "exec", "--python", BASE_PYTHON, standard.path, base, "--", "python", "-V",
        python=python,
    )  # fmt: skip
    assert said.stdout == f"Python {VERSION}\n"


@pytest.mark.parametrize("python", [sys.executable, *OTHERS])
def test_where_the_right_one_is_missing_it_is_refused(
    single: Packed, base: Path, tmp_path: Path, python: str
) -> None:
    def other(raw: dict[str, Any]) -> None:
        raw["requires"]["python"] = "3.99"

    path = forge(single.path, tmp_path / "forged.tar", manifest=other)
    done = run_node(node_program(path, tmp_path), "unpack", path, base, python=python)
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no CPython 3.99, which the bundle was built for" in done.stderr
    assert "put python3.99 on PATH on every node" in done.stderr
    assert os.listdir(base) == []


# --- probe ---------------------------------------------------------------------------------------


def test_probe_says_what_is_there(standard: Packed, program: Path, env: Path) -> None:
    base = env.parents[2]
    done = run_node(program, "probe", standard.path, base)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["v"], said["ok"], said["path"], said["problems"]) == (1, True, str(env), [])
    assert said["python"] == VERSION
    assert said["prefix"] == str(env)
    assert said["packages"] == {"alpha": "1.0", "my-odd-name": "1.0"}
    assert said["origins"]["alpha"] == str(env / SITE / "alpha" / "__init__.py")
    assert said["origin_ok"] is True


def test_probe_says_what_cannot_be_imported(extension: Packed, program: Path, base: Path) -> None:
    place = Path(run_node(program, "unpack", extension.path, base).stdout.strip())
    library = next((place / SITE).glob("native_ext*.so"))
    before = library.stat()
    with library.open("r+b") as handle:
        handle.write(b"not a library")  # as a failing disk does: its length and times stay
    os.utime(library, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = run_node(program, "probe", extension.path, base, "--json")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["ok"] is False
    text = json.dumps(said["problems"])
    assert "native_ext" in text
    assert "the module cannot be imported" in text


# --- exec ----------------------------------------------------------------------------------------


def started(
    program: Path, packed: Packed, place: Path, *command: str, **settings: Any
) -> subprocess.Popen[str]:
    """A command in the environment, under way."""
    argv = [sys.executable, "-I", "-S", program, "exec", packed.path, place.parents[2], "--"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(
        [*map(str, argv), *command], text=True, **{"env": CLEAN, **pipes, **settings}
    )


def test_exec_becomes_the_command(standard: Packed, program: Path, env: Path) -> None:
    code = "import json, os, sys; print(json.dumps([os.getpid(), os.getcwd(), sys.argv, "
    code += "sys.prefix, dict(os.environ)]))"
    command = ("python", "-c", code, "--", "a b", "--json", "")
    variables = {**CLEAN, "PYTHONPATH": "/decoy", "RANK": "3", "MINE": "1"}
    running = started(program, standard, env, *command, env=variables, cwd="/usr")
    said = json.loads(running.communicate(timeout=300)[0])
    pid, cwd, arguments, prefix, variables = said
    assert (pid, cwd, prefix) == (running.pid, "/usr", str(env))
    assert arguments == ["-c", "--", "a b", "--json", ""]
    assert variables["STAGER_ENV"] == variables["VIRTUAL_ENV"] == str(env)
    assert variables["PATH"].split(":")[0] == str(env / "bin")
    assert variables["MINE"] == variables["STAGER_PATCHES"] == "1"
    assert variables["RANK"] == "3"  # who is a rank already stays one
    assert variables["PYTHONPATH"] == str(env / ".stager" / "site")  # the trainer's, no decoy


def test_exec_of_what_cannot_run_says_why(
    standard: Packed, program: Path, env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status in other cases: tests/commands/test_cli.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for command, status, says in (
        ("cli-tool", 0, ""),
        ("absent-program", 127, "error: cannot run absent-program: No such file or directory"),
        ("train.py", 127, "hint: for a script write: python train.py\n"),
        ("/dev/null", 126, "error: cannot run /dev/null: Permission denied"),
        ("", 126, "error: cannot run : "),
    ):
        done = run_node(program, "exec", standard.path, env.parents[2], "--", command)
        assert (done.returncode, bool(done.stderr)) == (status, bool(says))
        assert says in done.stderr


def test_a_signal_reaches_the_command(standard: Packed, program: Path, env: Path) -> None:
    running = started(program, standard, env, "sh", "-c", "echo ready; exec sleep 60")
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    running.terminate()
    running.communicate(timeout=300)
    assert running.returncode == -15


def test_exec_keeps_the_environment_from_being_removed(
    standard: Packed, program: Path, env: Path
) -> None:
    lock = env.parents[1] / "locks" / f"{env.name}.lock"
    running = started(program, standard, env, "sh", "-c", "echo ready; read line")
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    with lock.open() as handle:

        def is_free() -> bool:
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        assert not is_free()
        running.communicate("done\n", timeout=300)
        assert until(is_free, 120)


# --- drive and agent -----------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, "", "[]", '{"v": 2}'])
def test_drive_refuses_what_is_no_job(program: Path, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "job.json"
    if content is not None:
        path.write_text(content)
    done = run_node(program, "drive", path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the job description cannot be read" in done.stderr
