"""The shell's part on a node: what it starts, and with what bound."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.driver.transports.agent_program import make_container_command, make_start_command
from bundle.protocol.job import Job
from tests.support.jobs import LAUNCH, PLAIN
from tests.support.namespaces import entering
from tests.support.processes import run

SAY = '#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n'


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an image, and with an ``apptainer`` on ``PATH`` that says what it is asked."""
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(SAY)
    program.chmod(0o755)
    (tmp_path / "lab.sif").touch()
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    for name in ("STAGER_NODE_ROOT", "SLURM_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def job_at(node: Path, image: str = "", mounts: tuple[str, ...] = (), **changed: object) -> Job:
    """A job in a container."""
    launch = replace(LAUNCH, container_image=image or f"{node}/lab.sif", container_mounts=mounts)
    fields = {"run_dir": str(node), "bundle": str(node / "bin" / "x.pkgs.tar"), **changed}
    return replace(PLAIN, launch=launch, **fields)  # type: ignore[arg-type]


def asked(argv: Sequence[str], before: Sequence[str] = (), **env: str) -> list[str]:
    """The words that the program is started with."""
    done = run([*before, *argv], env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_is_started_and_bound(node: Path) -> None:
    for name in ("scratch", "a,b", "a:b"):
        (node / name).mkdir()
    folders = (str(node / "a,b"), str(node / "a:b"), "/", "relative", str(node / "absent"))
    job = job_at(node, mounts=("/data:/inside:ro", "/x:/y"), node_root=str(node / "scratch"))
    argv = make_container_command(job, "verify", ["say", "it's", "a b"], folders=folders)
    assert asked(argv) == [
        *("exec", "--pwd", "/", "--bind"),
        f"{node}/scratch,{node},{node}/bin,/data:/inside:ro,/x:/y",
        *(f"{node}/lab.sif", "say", "it's", "a b"),
    ]
    # What only the node knows comes first; a directory is bound once.
    bound = asked(argv, TMPDIR=f"{node}/scratch", SLURM_TMPDIR="/var/tmp", STAGER_NODE_ROOT="")[4]
    assert bound == f"/var/tmp,{node}/scratch,{node},{node}/bin,/data:/inside:ro,/x:/y"
    auto = make_container_command(job_at(node, f"{node}/scratch/"), "verify", ["say"])
    assert asked(auto)[4:6] == [f"/tmp,/dev/shm,{node},{node}/bin", f"{node}/scratch"]
    by_node = job_at(node, node_root="$SCRATCH/x")
    assert asked(make_container_command(by_node, "verify", []))[4] == f"{node},{node}/bin"


def test_gpus_are_passed_on_where_there_are_any(node: Path) -> None:
    devices = "mount -t tmpfs none /dev; touch /dev/null /dev/nvidiactl"
    argv = make_container_command(job_at(node), "verify", ["say"])
    assert asked(argv, entering("-m", devices))[:5] == ["exec", "--pwd", "/", "--nv", "--bind"]


@pytest.mark.parametrize("framed", [True, False])
def test_what_is_missing_is_the_answer(node: Path, framed: bool) -> None:
    image = f'{node}/an"odd\\name.sif'
    argv = make_container_command(job_at(node, image), "session", ["say"], framed=framed)
    assert asked_and_refused(argv, framed) == {
        "code": "image-unreadable",
        "values": {"image": image},
    }
    (node / "bin" / "apptainer").unlink()
    assert asked_and_refused(argv, framed) == {"code": "no-container-program", "values": {}}
    (node / "bin" / "singularity").write_text(SAY)
    (node / "bin" / "singularity").chmod(0o755)
    assert asked_and_refused(argv, framed)["code"] == "image-unreadable"


def asked_and_refused(argv: Sequence[str], framed: bool) -> dict[str, object]:
    """The problem in the answer of a shell that starts nothing."""
    done = run(argv, env={**os.environ, "STAGER_NODE": "n1"})
    assert done.returncode == 3
    line = done.stdout
    if framed:
        head, _, line = line.partition(" - . ")
        assert head == "\x1en1:0 0 0"
    answer = json.loads(line)
    assert (answer["event"], answer["node"], answer["ok"]) == ("session", "n1", False)
    [problem] = answer["problems"]
    assert problem.pop("where") == "n1"
    return dict(problem)


def test_no_python_in_the_image(node: Path) -> None:
    argv = make_start_command((), "session", ["/node.pyz"], node="n1", framed=False)
    node.joinpath("bin", "cat").symlink_to("/usr/bin/cat")
    os.environ["PATH"] = f"{node}/bin"
    said = asked_and_refused(["/usr/bin/sh", *argv[1:]], framed=False)
    assert said == {"code": "no-python", "values": {"count": "6"}}


def test_over_ssh_it_is_one_line_and_never_ends_as_ssh_does(node: Path) -> None:
    argv = make_container_command(job_at(node), "verify", ["say"], stays=True)
    assert "\n" not in shlex.join(argv)  # of which csh takes none in quotes
    for code, expected in ((0, 0), (7, 7), (255, 1)):
        (node / "bin" / "apptainer").write_text(f"#!/bin/sh\nexit {code}\n")
        assert run(argv).returncode == expected
