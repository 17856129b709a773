"""Results of a bundle that is run where no project is, on hosts that do not see the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.ssh_hosts import SshHosts

NOTHING = "nothing is brought back: name results with --outputs or in [project] outputs"


def test_what_is_named_comes_home(hosts: SshHosts, project: Path) -> None:
    """The project names its own; elsewhere the command line does, and else the job says so."""
    nowhere = hosts.hidden / "nowhere"
    nowhere.mkdir()
    options = ["--hosts", "node[01-02]", "--log-dir", str(hosts.hidden / "logs")]
    options += ["--bundle", str(hosts.bundle), "--launcher", "processes", "--backend", "gloo"]
    command = ("--", "train.py")
    silent = hosts.stager("run", *options, *command, folder=nowhere)
    assert silent.code == 0, silent.talk
    assert [*nowhere.iterdir()] == []
    before, _, after = silent.talk.partition("[RANK 0]")
    assert f"the nodes do not see {nowhere}; {NOTHING}" in " ".join(before.split()), silent.talk
    assert NOTHING in " ".join(after.split()), silent.talk
    named = hosts.stager("run", *options, "--outputs", "out/*.txt", *command, folder=nowhere)
    assert named.code == 0, named.talk
    assert NOTHING not in named.talk
    assert (nowhere / "out" / "world.txt").read_text() == "2"
    outside = hosts.stager("run", *options, "--outputs", "../out", *command, folder=nowhere)
    assert (outside.code, "--outputs" in outside.talk) == (2, True), outside.talk


@pytest.mark.full
def test_what_is_not_named_stays_on_the_hosts(hosts: SshHosts, project: Path) -> None:
    """The job says where, and which of the names nobody wrote."""
    nowhere = hosts.hidden / "unnamed"
    nowhere.mkdir()
    where = ["--hosts", "node[01-02]", "--bundle", str(hosts.bundle)]
    options = [*where, "--log-dir", str(hosts.hidden / "logs"), "--backend", "gloo"]
    options += ["--launcher", "processes", "--outputs", "results"]
    done = hosts.stager("run", *options, "--", "train.py", folder=nowhere)
    talk = " ".join(done.talk.split())
    assert done.code == 0, done.talk
    assert "node01: no rank has written results, which is named as an output" in talk
    _, _, place = talk.partition("what the ranks wrote is still on node01 in ")
    work = place.partition(";")[0]
    assert hosts.on("node01", "cat", f"{work}/out/world.txt") == "2", talk
    assert hosts.on("node02", "ls", work, check=False) == "", "nothing was written there"


@pytest.mark.full
def test_a_relative_path_finds_the_projects_file_where_no_host_sees_the_folder(
    hosts: SshHosts, project: Path
) -> None:
    options = ["--hosts", "node[01-02]", "--log-dir", str(hosts.hidden / "logs")]
    for folder, path in ((project, "conf/lr.txt"), (project / "conf", "lr.txt")):
        done = hosts.stager("run", *options, "--", "train.py", "read", path, folder=folder)
        assert (done.code, "read lr is 1" in done.talk) == (0, True), done.talk
        assert (folder / "out" / "world.txt").exists()
    shutil.rmtree(project / "conf" / "out")


def test_a_job_finds_what_earlier_ones_have_left_and_adds_to_it(
    hosts: SshHosts, project: Path
) -> None:
    """Files are replaced, added and deleted as if the hosts saw the folder."""
    options = ["--hosts", "node[01-02]", "--log-dir", str(hosts.hidden / "logs")]
    started = project / "out" / "old"
    started.mkdir(parents=True)
    for name in ("step", "kept", "old/checkpoint"):
        (project / "out" / name).write_text("1")
    kept = (project / "out" / "kept").stat().st_ino
    done = hosts.stager("run", *options, "--", "train.py", "resume", folder=project)
    assert done.code == 0, done.talk
    assert "sending earlier results to the nodes: out (3 files, 3 bytes)" in done.talk
    assert "step 1" in done.talk, done.talk
    [collected] = done.report["collected"]
    assert (collected["files"], collected["renamed"]) == (2, {}), done.talk
    found = {path.name: path.read_text() for path in (project / "out").iterdir()}
    assert found == {"step": "2", "kept": "1", "world.txt": "2"}
    assert (project / "out" / "kept").stat().st_ino == kept
    assert "1 file removed, which the job has deleted on node01" in " ".join(done.talk.split())
