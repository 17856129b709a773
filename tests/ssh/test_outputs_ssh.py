"""Results of a bundle that is run where no project is, on hosts that do not see the folder."""

from __future__ import annotations

from pathlib import Path

from tests.support.ssh_hosts import SshHosts

NOTHING = "nothing is brought back: name results with --outputs or in [project] outputs"


def test_what_is_named_comes_home(hosts: SshHosts, project: Path) -> None:
    """The project names its own; elsewhere the command line does, and else the job says so."""
    (bundle,) = (hosts.hidden / "offline" / "bundles").glob("*.pkgs.tar")
    nowhere = hosts.hidden / "nowhere"
    nowhere.mkdir()
    options = ["--hosts", "node[01-02]", "--log-dir", str(hosts.hidden / "logs")]
    options += ["--bundle", str(bundle), "--launcher", "processes", "--backend", "gloo"]
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
