"""Across an air gap: outside there is everything, inside one file and a plain Python."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from stager.carrying.tool import install_program
from stager.core.values import Target
from stager.pack.members import copy_to
from tests.support.building import STAGER, Project
from tests.support.namespaces import entering
from tests.support.processes import Done, run, until

TRAIN = """\
import os
import alpha
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], alpha.__name__)
"""


class Inside:
    """A machine behind the gap: an empty home, no network, the system's programs."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        self.home = home
        self.nodes = home / "nodes"
        self.nodes.mkdir()
        self.tool = home / ".local" / "share" / "stager" / "bin" / "stager"

    def run(self, *argv: str | Path) -> Done:
        """Run a program there."""
        return run(
            [*entering("-n", "ip link set lo up"), *map(str, argv)],
            cwd=self.home,
            env={
                "HOME": str(self.home),
                "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
                "STAGER_NODE_ROOT": str(self.nodes),
            },
        )

    def stager(self, *arguments: str | Path) -> Done:
        """Run the tool that was installed there."""
        return self.run(self.tool, *arguments)


@pytest.fixture
def inside(tmp_path: Path) -> Inside:
    """The machine."""
    return Inside(tmp_path / "inside")


def test_from_nothing_to_a_job(
    project: Project, inside: Inside, pip_settings: Mapping[str, str], tmp_path: Path
) -> None:
    """The whole way: build and export outside; inside install, import, verify and run."""
    (project.root / "train.py").write_text(TRAIN)
    project.expect("build")
    file = tmp_path / "stick" / "lab.carry.tar"
    file.parent.mkdir()
    # The project's packages come from its own wheels, the tool's from the index of this machine.
    argv = ["export", "--with-tool", "-o", str(file), "--json"]
    done = run(
        [*STAGER, *argv],
        cwd=project.root,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("PIP_")}, **pip_settings},
    )
    assert done.returncode == 0, done.stderr
    exported = json.loads(done.stdout)
    assert exported["with_tool"]
    shutil.rmtree(project.store.root)
    shutil.rmtree(project.root)

    _interrupt_an_install(inside, file)
    installed = inside.run(sys.executable, file, "install")
    assert installed.returncode == 0, installed.stderr
    assert installed.stdout == f"{inside.tool}\n"
    imported = inside.stager("import", file, "--id", exported["id"][:12])
    assert imported.returncode == 0, imported.stderr
    # Its lock lies beside it, and the library that writes bills came along.
    bill = inside.stager("inspect", "--sbom", imported.stdout.strip())
    assert (bill.returncode, bill.stderr) == (0, ""), bill.stderr
    names = {one["name"] for one in json.loads(bill.stdout)["components"]}
    assert {"alpha", "beta", "trainer", "node.pyz"} <= names
    job = ("--allocation", "local", "--nodes", "2", "--id", exported["id"][:12])
    verified = inside.stager("verify", *job)
    assert verified.returncode == 0, verified.stderr
    ran = inside.stager("run", *job, "--launcher", "processes", "--", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert "rank 0 of 2 alpha" in ran.stdout
    logs = [path.read_text() for path in (inside.home / "slurm_logs").glob("*.out")]
    assert any("rank 1 of 2 alpha" in log for log in logs)
    # A second time is refused, and leaves what is there.
    again = inside.run(sys.executable, file, "install")
    assert again.returncode == 1
    assert f"error: {inside.tool.parents[1]} is there already" in again.stderr
    assert inside.stager("--version").returncode == 0


def _interrupt_an_install(inside: Inside, file: Path) -> None:
    """End the installation on its way, as a session that is closed does: nothing is left."""
    place = inside.home / "half made"
    argv = [sys.executable, str(file), "install", str(place)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as started:
        assert until(lambda: (place / "pyvenv.cfg").exists() or started.poll() is not None)
        started.send_signal(signal.SIGHUP)
        _, talk = started.communicate()
    assert (started.returncode, talk.splitlines()[-1]) == (130, "interrupted")
    assert not place.exists()


def test_what_the_program_in_the_file_says(
    project: Project, inside: Inside, tmp_path: Path
) -> None:
    """Usage; a file without the tool; another Python; damage."""
    project.expect("build", "--no-prove")
    file = tmp_path / "lab.carry.tar"
    done = project.expect("export", "-o", str(file))
    assert f"stager import {file.name}" in done.stderr
    assert done.stdout == f"{file}\n"
    program = install_program(Target.from_host())
    with_program = tmp_path / "program.carry.tar"
    with_program.write_bytes(file.read_bytes() + program)
    usage = inside.run(sys.executable, with_program)
    assert (usage.returncode, usage.stdout) == (2, "")
    assert "usage: python3 FILE install [DIR]" in usage.stderr
    empty = inside.run(sys.executable, with_program, "install")
    assert empty.returncode == 1
    assert f"error: {with_program} is damaged" in empty.stderr
    assert not inside.tool.exists()
    other = install_program(replace(Target.from_host(), python="3.99"))
    with_program.write_bytes(file.read_bytes() + other)
    refused = inside.run(sys.executable, with_program, "install")
    assert refused.returncode == 1
    assert "this file carries stager for Python 3.99 on" in refused.stderr
    assert f"start it with that Python: python3.99 {with_program} install" in refused.stderr
    platform = Target.from_host().platform.replace(os.uname().machine, "riscv64")
    elsewhere = install_program(replace(Target.from_host(), platform=platform))
    with_program.write_bytes(file.read_bytes() + elsewhere)
    refused = inside.run(sys.executable, with_program, "install")
    assert refused.returncode == 1
    assert f"on riscv64; this is Python {Target.from_host().python} on" in refused.stderr
    assert "export on the other side for this one" in refused.stderr


def test_errors(project: Project, tmp_path: Path) -> None:
    absent = project.expect("import", str(tmp_path / "absent.carry.tar"), code=1)
    assert "absent.carry.tar cannot be read: No such file or directory" in absent.stderr
    early = project.expect("export", code=1)
    assert "make one with `stager build`" in early.stderr
    project.expect("build", "--no-prove")
    mine = project.expect("export", "-o", "mine.tar", code=1)
    assert "let its name end in .carry.tar" in mine.stderr
    # In the project it is no part of the next bundle, and neither is who signed it.
    project.expect("export")
    [carried] = project.root.glob("*.carry.tar")
    carried.with_name(f"{carried.name}.sig").touch()
    assert "has changed" not in project.stager("export").stderr


def test_a_bundle_is_used_where_no_project_is(project: Project, tmp_path: Path) -> None:
    """By its file alone, under any name; a file that carries one is not taken for it."""
    built = project.report("build", "--no-prove")
    carried = tmp_path / "lab.carry.tar"
    project.expect("export", "-o", str(carried))
    bundle = tmp_path / "stick.tar"
    copy_to(Path(built["bundle"]), bundle)
    nowhere = replace(project, root=tmp_path / "nowhere")
    nowhere.root.mkdir()
    empty = {"OFFLINE_ROOT": str(tmp_path / "empty")}
    train = ("--allocation", "local", "--nodes", "2", "--launcher", "processes", "--", "train.py")
    ran = nowhere.expect("run", "--bundle", str(bundle), *train, env=empty)
    assert "alpha 1.0" in ran.stdout
    for command in ("run", "verify", "exec", "inspect"):
        given = ("--bundle", str(carried)) if command != "inspect" else (str(carried),)
        refused = nowhere.stager(command, *given, *(train[-2:] * (command == "exec")), env=empty)
        assert (refused.returncode, refused.stdout) == (1, ""), command
        assert f"{carried}, which `stager export` wrote" in refused.stderr
        assert f"stager import {carried}" in refused.stderr


def test_a_bundle_that_is_named_is_exported(project: Project, tmp_path: Path) -> None:
    """An older one of the project; one that was imported, where no project is; nothing is built."""
    first = project.report("build", "--no-prove")
    kept = tmp_path / "kept.pkgs.tar"
    copy_to(Path(first["bundle"]), kept)
    (project.root / "train.py").write_text("print('changed')\n")
    older = project.expect("export", "--bundle", str(kept), "-o", str(tmp_path / "1.carry.tar"))
    assert "building it again" not in older.stderr

    nowhere = replace(project, root=tmp_path / "nowhere")
    nowhere.root.mkdir()
    middle, last = ({"OFFLINE_ROOT": str(tmp_path / name)} for name in ("middle", "last"))
    for source, root in (("1.carry.tar", middle), ("nowhere/2.tar", last)):
        imported = nowhere.report("import", str(tmp_path / source), env=root)
        assert imported["id"] == first["id"]
        assert Path(imported["bundle"]).read_bytes() == kept.read_bytes()
        if root == middle:
            nowhere.expect("export", "--id", first["id"][:12], "-o", "2.tar", env=root)
    named = nowhere.stager("export", "--id", first["id"][:12], env=last)
    assert named.stdout == f"project-{first['id'][:12]}.carry.tar\n" or named.stdout.endswith(
        f"/project-{first['id'][:12]}.carry.tar\n"
    )


def test_a_bundle_whose_lock_is_not_here_is_not_exported(project: Project, tmp_path: Path) -> None:
    built = project.report("build", "--no-prove")
    kept = tmp_path / "kept.pkgs.tar"
    copy_to(Path(built["bundle"]), kept)
    nowhere = replace(project, root=tmp_path / "nowhere")
    nowhere.root.mkdir()
    for place in (nowhere, project):
        (project.root / "pylock.toml").unlink(missing_ok=True)
        refused = place.expect("export", "--bundle", str(kept), code=1)
        assert f"the lock that {kept} was made from is not here" in refused.stderr
        assert "carry the file itself" in refused.stderr
    assert [*nowhere.root.iterdir()] == []
