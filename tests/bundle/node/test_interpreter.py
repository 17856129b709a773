"""The Python behind whatever PATH offers: installations, environments, shims that are broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.node import interpreter
from bundle.protocol.problem import NodeError
from bundle.system.processes import ProcessError
from tests.support.interpreters import other_pythons
from tests.support.needs import lacks
from tests.support.processes import run

REPO = Path(__file__).resolve().parents[3]
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"


def real_base() -> str:
    return os.path.realpath(Path(sys.base_prefix, "bin", f"python{OWN}"))


def find_with(python: Path, **env: str) -> str:
    """What ``find`` answers when this interpreter runs it, as the far side is run."""
    code = f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
    code += f"from bundle.node import interpreter\nprint(interpreter.find_base_python({OWN!r}))"
    done = run([python, "-I", "-S", "-c", code], env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("how", ["--symlinks", "--copies"])
def test_a_virtual_environment_leads_to_its_base(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", how, folder], check=True)
    assert find_with(folder / "bin" / "python") == real_base()


def another() -> tuple[str, Path]:
    """A version other than the running one, with its program, where this machine has one."""
    for found in map(Path, other_pythons()):
        return found.name.removeprefix("python"), found
    lacks("each python", "there is only one here")


def test_takes_a_hint_and_passes_over_shims_that_fail(tmp_path: Path) -> None:
    version, program = another()
    broken = script(
        tmp_path / "shims" / f"python{version}", "echo 'pyenv: command not found' >&2; exit 127"
    )
    mute = script(tmp_path / "shims" / "python3", "echo hello")
    env = {"PATH": f"{tmp_path}/shims:/bin"}
    hints = [str(broken), str(mute), str(program)]
    assert interpreter.find_base_python(version, hints, env) == os.path.realpath(program)
    script(mute, f'exec {program} "$@"')  # now it works
    assert interpreter.find_base_python(version, [], env) == os.path.realpath(program)


def test_an_environment_of_another_version_leads_to_its_base(tmp_path: Path) -> None:
    version, program = another()
    subprocess.run([program, "-m", "venv", "--without-pip", "--copies", tmp_path / "v"], check=True)
    hints = [str(tmp_path / "v" / "bin" / "python")]
    assert interpreter.find_base_python(version, hints, {"PATH": ""}) == os.path.realpath(program)


def test_a_failure_lists_every_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "TIMEOUT_SECONDS", 1.0)
    folder = tmp_path / "bin"
    script(folder / "python3.99", "echo 'python3.99: not installed' >&2; exit 127")
    script(folder / "python3", "echo hello")
    script(folder / "python", "exec /bin/sleep 60")
    hints = [sys.executable, str(tmp_path / "absent")]
    with pytest.raises(NodeError) as caught:
        interpreter.find_base_python("3.99", hints, {"PATH": str(folder)})
    text = str(caught.value)
    own = ".".join(str(part) for part in sys.version_info[:3])
    assert "there is no CPython 3.99" in text
    assert f"{sys.executable}: {own};" in text
    assert f"{tmp_path}/absent: cannot be started (No such file or directory)" in text
    assert f"{folder}/python3.99: exit status 127: python3.99: not installed" in text
    assert f"{folder}/python3: is not a Python interpreter: hello" in text
    assert f"{folder}/python: took more than 1 s" in text
    assert "[environment] python" in text


def test_other_implementations_and_free_threading_do_not_fit() -> None:
    def answer(version: str, implementation: str, flags: str) -> interpreter.InterpreterFacts:
        return interpreter.InterpreterFacts(
            version, implementation, flags, "/usr", "/usr/bin/python3"
        )

    assert answer("3.11.7", "cpython", "").explain_misfit("3.11") == ""
    assert answer("3.11.7", "cpython", "").explain_misfit("3.1") == "3.11.7"
    assert answer("3.11.7", "pypy", "").explain_misfit("3.11") == "pypy 3.11.7"
    assert answer("3.13.0", "cpython", "t").explain_misfit("3.13") == "3.13.0 free-threaded"


def test_an_environment_s_copy_is_never_taken_for_a_base(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--copies", folder], check=True)
    copy = str(folder / "bin" / "python")
    answer = interpreter.InterpreterFacts(f"{OWN}.0", "cpython", "", str(tmp_path / "gone"), copy)
    with pytest.raises(ProcessError, match="no program of its own"):
        interpreter.find_base_program(OWN, answer, os.environ)
