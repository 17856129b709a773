"""Which Python of this machine a bundle brings, and which it refuses, with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.node import interpreter
from bundle.protocol.problem import NodeError, Problem, ProblemCode
from bundle.system.processes import CompletedCommand
from stager.core.errors import ConfigError, StagerError
from stager.core.values import Target
from stager.interpreter import candidates, find
from tests.support.building import HOST
from tests.support.needs import needs
from tests.support.own_pythons import movable_python


@pytest.fixture(scope="module")
def own():
    return movable_python()


def refused(setting, target):
    with pytest.raises(ConfigError) as caught:
        find(str(setting), target, os.environ)
    assert "environment.interpreter" in caught.value.message
    assert caught.value.hint
    return caught.value


def no_uv(argv, **_):
    raise StagerError(f"{argv[-1]}: uv is not here")


def test_a_program_or_its_folder_may_be_named(own):
    by_folder, by_program = find(str(own.prefix), own.target), find(str(own.program), own.target)
    assert by_folder == by_program == find(str(own.prefix / "bin"), own.target)
    assert (by_folder.prefix, by_folder.program) == (own.prefix, f"bin/{own.program.name}")
    assert by_folder.library == f"lib/python{own.target.python}"


def test_of_a_virtual_environment_its_base_is_taken(own, tmp_path):
    argv = [str(own.program), "-m", "venv", "--without-pip", str(tmp_path / "venv")]
    subprocess.run(argv, check=True)
    assert find(str(tmp_path / "venv"), own.target) == find(str(own.prefix), own.target)


def test_another_version_is_refused(own):
    error = refused(own.program, HOST)
    assert f"environment.python asks for {HOST.python}" in error.message
    assert f"uv python install {HOST.python}" in error.hint
    assert (
        f"there is no file {own.prefix}/bin/python{HOST.python}"
        in refused(own.prefix, HOST).message
    )


def test_what_is_no_python_is_refused(own, tmp_path):
    assert f"{tmp_path}/nowhere is not there" in refused(tmp_path / "nowhere", own.target).message
    (tmp_path / "link").symlink_to("nowhere")
    assert (
        "link is a link to nowhere, which is not" in refused(tmp_path / "link", own.target).message
    )
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho hello\n")
    assert str(script) in refused(script, own.target).message
    script.chmod(0o755)
    assert "is not a Python interpreter" in refused(script, own.target).message


def test_of_a_shim_that_has_no_version_the_reason_is_shown(own, tmp_path):
    """As of pyenv's, whose last line is about something else."""
    shim = tmp_path / own.program.name
    shim.write_text("#!/bin/sh\necho 'pyenv: not found' >&2\necho 'See pyenv help' >&2\nexit 127\n")
    shim.chmod(0o755)
    error = refused(shim, own.target)
    assert f"{shim} does not work: exit status 127: pyenv: not found" in error.message
    assert "pyenv prefix" in error.hint
    shim.write_text(f'#!/bin/sh\nexec {own.program} "$@"\n')
    assert find(str(shim), own.target).prefix == own.prefix


def test_a_program_for_another_processor_is_refused(own, tmp_path):
    program = bytearray(own.program.read_bytes())
    program[18:20] = (22 if HOST.machine != "s390x" else 21).to_bytes(2, "little")
    other = tmp_path / "python"
    other.write_bytes(program)
    other.chmod(0o755)
    machine = "s390x" if HOST.machine != "s390x" else "ppc64le"
    message = refused(other, own.target).message
    assert f"{other} is for {machine}; this machine is {HOST.machine}" in message


def test_a_systems_python_is_refused():
    needs("system python")
    system = Path("/usr/bin/python3")
    argv = [str(system), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    target = Target(python=done.stdout.strip(), platform=HOST.platform)
    error = refused(system, target)
    assert "belongs to the system in /usr, which cannot be moved" in error.message
    assert "uv python install" in error.hint


def test_a_link_leads_to_its_folder(own, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / own.program.name).symlink_to(own.program)
    assert find(str(tmp_path), own.target).prefix == own.prefix


def test_for_other_machines_there_is_none(own):
    for platform in ("manylinux_2_28_s390x", f"musllinux_1_2_{HOST.machine}"):
        error = refused(own.prefix, replace(own.target, platform=platform))
        assert "the Python of this machine is for" in error.message


def test_pyenvs_newest_is_found(own, tmp_path):
    versions = tmp_path / "versions"
    versions.mkdir()
    minor = own.target.python
    for name in (f"{minor}.0", f"{minor}.10", f"{minor}.9"):
        (versions / name / "bin").mkdir(parents=True)
    real = versions / f"{minor}.9" / "bin" / own.program.name
    real.symlink_to(own.program)
    broken = versions / f"{minor}.10" / "bin" / own.program.name
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    env = {**os.environ, "PYENV_ROOT": str(tmp_path)}
    assert find("bundled", own.target, env, run=no_uv).prefix == own.prefix
    real.unlink()
    with pytest.raises(ConfigError) as caught:
        find("bundled", own.target, env, run=no_uv)
    assert f"there is no Python {minor} here" in caught.value.message
    assert any(str(broken) in line for line in caught.value.context)
    assert f"uv python install {minor}" in caught.value.hint


def test_where_the_running_python_does_not_fit_there_is_none(own, tmp_path, monkeypatch):
    def find_none(*_):
        raise NodeError(Problem(ProblemCode.NO_CPYTHON, "here", {}))

    monkeypatch.setattr(interpreter, "find", find_none)
    env = {**os.environ, "PYENV_ROOT": str(tmp_path)}
    with pytest.raises(ConfigError, match="there is no Python"):
        find("bundled", replace(own.target, python=HOST.python), env, run=no_uv)


def test_of_uvs_builds_of_a_version_the_plain_one_comes_first(tmp_path):
    """The others need a newer processor, or another C library; the link is one of the folders."""
    names = [f"cpython-3.12.{number}-linux-{HOST.machine}" for number in (9, 11)]
    others = [f"{names[1]}{more}" for more in ("-gnu", "-musl", "_v3-gnu")]
    others.append(f"cpython-3.12.11+debug-linux-{HOST.machine}-gnu")
    for name in (f"{names[0]}-gnu", *others):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python3.12").touch()
    (tmp_path / f"cpython-3.12-linux-{HOST.machine}-gnu").symlink_to(others[0])

    def uv(argv, **_):
        return CompletedCommand(tuple(argv), 0, f"{tmp_path}\n", "")

    env = {"PYENV_ROOT": str(tmp_path / "none"), "PATH": ""}
    target = replace(HOST, python="3.12")
    found = [path.parents[1].name for path in candidates(target, env, uv)]
    assert found[0] == others[0]
    assert found[4] == f"{names[0]}-gnu"
    assert sorted(found[1:4]) == sorted(others[1:])


def test_uvs_come_first(own, tmp_path):
    minor = own.target.python
    kept = tmp_path / f"cpython-{minor}.4-linux-{HOST.machine}-gnu" / "bin"
    kept.mkdir(parents=True)
    (kept / own.program.name).symlink_to(own.program)
    asked = []

    def uv(argv, **_):
        asked.append(argv)
        return CompletedCommand(tuple(argv), 0, f"{tmp_path}\n", "")

    env = {**os.environ, "PYENV_ROOT": str(tmp_path / "none")}
    assert find("bundled", own.target, env, run=uv).prefix == own.prefix
    assert asked == [[sys.executable, "-m", "uv", "python", "dir"]]
