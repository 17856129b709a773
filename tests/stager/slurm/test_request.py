"""Where nodes come from, the command that asks for them, and what no partition can satisfy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bundle.system.processes import CompletedCommand
from stager.config.load import parse
from stager.core.errors import ConfigError, StagerError
from stager.slurm.request import (
    COMMANDS,
    LISTING,
    Request,
    choose_source,
    explain_shortage,
    make_build_launcher,
    make_request,
    make_salloc_argv,
    query_nodes,
    read_nodes,
)

# --- The source of the nodes, and the request -----------------------------------------------------


def config(root: Path, **tables: Any) -> Any:
    raw = {"environment": {"requirements": []}, "project": {"name": "demo"}, **tables}
    return parse(raw, root=root, source=root / "stager.toml")


OPTION = "--hosts"
SETTINGS = "[cluster] hosts"


@pytest.mark.parametrize(
    ("asked", "nodes", "batch", "inside", "found", "hosts", "source"),
    [
        ("auto", 1, False, "", (), "", "local"),
        ("auto", 1, False, "", COMMANDS, "", "salloc"),
        ("auto", 4, False, "", COMMANDS, "", "salloc"),
        ("auto", 4, False, "77", COMMANDS, "", "inside"),
        # A compute node may lack the commands that ask for nodes.
        ("auto", 4, False, "77", ("srun", "sbcast", "scontrol", "squeue"), "", "inside"),
        ("auto", 4, True, "", COMMANDS, "", "sbatch"),
        ("auto", 4, True, "77", COMMANDS, "", "sbatch"),
        ("local", 4, False, "", (), "", "local"),
        # An option counts most, then the job that this runs in, then the settings.
        ("auto", 1, False, "77", COMMANDS, OPTION, "ssh"),
        ("auto", 1, False, "", COMMANDS, SETTINGS, "ssh"),
        ("auto", 1, False, "77", COMMANDS, SETTINGS, "inside"),
        ("ssh", 1, False, "77", COMMANDS, SETTINGS, "ssh"),
        ("slurm", 1, False, "", COMMANDS, SETTINGS, "salloc"),
        ("local", 1, False, "", COMMANDS, SETTINGS, "local"),
    ],
)
def test_where_the_nodes_come_from(
    asked: str, nodes: int, batch: bool, inside: str, found: Sequence[str], hosts: str, source: str
) -> None:
    chosen = choose_source(
        asked, nodes=nodes, batch=batch, inside=inside, found=found, hosts_from=hosts
    )
    assert chosen == source


SOME = ("salloc", "squeue")
ABSENT = "Slurm is not available here (not on PATH: sbatch, srun, sbcast, scontrol)"


@pytest.mark.parametrize(
    ("asked", "nodes", "batch", "inside", "found", "hosts", "said"),
    [
        ("auto", 2, False, "", SOME, "", f"the job needs 2 nodes: {ABSENT}"),
        ("slurm", 1, False, "", SOME, "", f"--allocation slurm: {ABSENT}"),
        ("auto", 1, True, "", SOME, "", f"--batch: {ABSENT}"),
        ("auto", 1, False, "77", SOME, "", f"job 77: {ABSENT.replace('sbatch, ', '')}"),
        ("local", 1, True, "", COMMANDS, "", "--batch and --allocation local"),
        ("cloud", 1, False, "", COMMANDS, "",
         "--allocation cloud is not one of auto, slurm, ssh, local"),
        ("ssh", 1, False, "", COMMANDS, "", "--allocation ssh: no hosts are named"),
        ("ssh", 1, True, "", COMMANDS, SETTINGS, "--batch and hosts over ssh"),
        ("slurm", 1, False, "", COMMANDS, OPTION, "--hosts and --allocation slurm"),
        ("local", 1, False, "", COMMANDS, OPTION, "--hosts and --allocation local"),
    ],
)  # fmt: skip
def test_what_contradicts_or_is_not_there(
    asked: str, nodes: int, batch: bool, inside: str, found: Sequence[str], hosts: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        choose_source(asked, nodes=nodes, batch=batch, inside=inside, found=found, hosts_from=hosts)
    assert caught.value.hint


def test_the_whole_command(tmp_path: Path) -> None:
    cluster = {
        "nodes": 3, "partition": "torch", "account": "lab", "time": "00:30:00",
        "exclude": ["node07", "node1[0-2]"], "cpus-per-task": 4, "gpus-per-node": "a100:2",
        "salloc-args": ["--mem=8G", "--exclude", "node20"],
    }  # fmt: skip
    env = {"SALLOC_OPTS": "--exclude=hpc42,node07 -xhpc43 -x=n9 --comment 'two words'"}
    asked = make_request(config(tmp_path, cluster=cluster), env, "26ae9588e83c" + "0" * 52)
    argv = make_salloc_argv(asked)
    assert shlex.join(argv) == (
        "salloc --job-name=demo --nodes=3 --ntasks-per-node=1 --cpus-per-task=4 "
        "--gpus-per-node=a100:2 --partition=torch --account=lab --time=00:30:00 "
        "'--exclude=node07,node1[0-2],node20,hpc42,node07,hpc43,n9' "
        "--comment=stager:26ae9588e83c --kill-command=TERM --no-kill --mem=8G "
        "--comment 'two words'"
    )


def test_what_is_not_said_is_left_to_slurm(tmp_path: Path) -> None:
    asked = make_request(config(tmp_path), {})
    assert asked.options() == ["--job-name=demo", "--nodes=1", "--ntasks-per-node=1"]
    elastic = make_request(config(tmp_path, cluster={"nodes": "2:4"}), {"SALLOC_OPTS": ""})
    assert "--nodes=2-4" in elastic.options()
    assert not [one for one in elastic.options() if "ntasks" in one]  # else Slurm gives two


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("exclusive", "--salloc-arg: exclusive is not an option of Slurm"),
        ("--comment=a b", "b is not an option"),
        ("--nodes=8", "--nodes=8 contradicts the job: the job has --nodes=2"),
        ("-N8", "-N8 contradicts"),
        ("-N 8", "-N 8 contradicts"),
        ("--ntasks 8", "one task is started on each node"),
        ("-p cpu", "the job has --partition=gpu"),
    ],
)
def test_arguments_that_slurm_would_misunderstand(
    tmp_path: Path, argument: str, message: str
) -> None:
    cluster = {"nodes": 2, "partition": "gpu", "salloc-args": argument.split()}
    with pytest.raises(ConfigError) as caught:
        make_request(config(tmp_path, cluster=cluster), {})
    assert message in str(caught.value)


def test_arguments_that_agree_or_that_the_job_does_not_decide(tmp_path: Path) -> None:
    words = ["-N2", "--exclusive", "--gres", "gpu:v100:4", "-J", "name", "-vv", "--mem=0"]
    asked = make_request(config(tmp_path, cluster={"nodes": 2, "salloc-args": words}), {})
    assert asked.salloc_args == tuple(words)
    own = {"SALLOC_OPTS": "-p debug --exclusive"}  # the user's own come last, and count
    assert make_request(config(tmp_path, cluster={"partition": "gpu"}), own).salloc_args[0] == "-p"
    for opts, said in (("debug", ": debug is not an option"), ("'x", " cannot be read: No clos")):
        with pytest.raises(ConfigError, match=f"SALLOC_OPTS{said}"):
            make_request(config(tmp_path), {"SALLOC_OPTS": opts})


# --- A build on a node ----------------------------------------------------------------------------


def test_a_build_is_a_job_of_its_own_or_a_step_of_the_allocation(tmp_path: Path) -> None:
    cluster = {"nodes": 4, "partition": "gpu", "gpus-per-node": 1, "salloc-args": ["--mem=8G"]}
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    build, env = config(tmp_path, cluster=cluster), {"PATH": str(tmp_path)}
    program, *own = make_build_launcher(build, env)
    assert program == "srun"
    assert {"--nodes=1", "--partition=gpu", "--gpus-per-node=1", "--mem=8G"} <= set(own)
    assert "--overlap" not in own
    inside = {**env, "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "16"}
    step = make_build_launcher(build, inside)
    assert step[:4] == ("srun", "--job-name=stager-build", "--nodes=1", "--ntasks=1")
    assert {"--cpus-per-task=16", "--overlap"} <= set(step)


# --- Requests that no partition can satisfy -------------------------------------------------------


LISTED = """\
torch* n1 4
torch* n2 4
torch* n3 16
big n3 16
big n4 64
odd n5 4+
"""


def asking(**changed: Any) -> Request:
    return Request(**{"name": "demo", "nodes": (1, 1), "cpus_per_task": None, **changed})


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (asking(nodes=(3, 3)), ""),
        (asking(nodes=(2, 5)), ""),
        (asking(nodes=(2, 2), cpus_per_task=64, partition="big,torch"),
         "the job asks for 2 nodes with 64 CPUs each, partition big, torch has "
         "1"),
        (asking(cpus_per_task=16), ""),
        (asking(cpus_per_task=16, exclude="n[2-3]"),
         "the job asks for 1 node with 16 CPUs each, partition torch has nodes "
         "of up to 4 besides the excluded n[2-3]"),
        (asking(cpus_per_task=17),
         "the job asks for 1 node with 17 CPUs each, partition torch has "
         "nodes of up to 16"),
        (asking(nodes=(4, 4)), "the job asks for 4 nodes, partition torch has 3"),
        (asking(nodes=(3, 3), exclude="n2"),
         "the job asks for 3 nodes, partition torch has 2 besides the excluded n2"),
        (asking(cpus_per_task=99, partition="cloud"), ""),
    ],
)  # fmt: skip
def test_what_there_is_not(request_: Request, why: str) -> None:
    assert explain_shortage(request_, read_nodes(LISTED)) == why


@pytest.mark.parametrize("up", [True, False])
def test_nodes_that_no_job_gets(up: bool) -> None:
    down = ["down*", "drained", "DRAINING", "failing", "powered_down", "maint", "unknown*"]
    for state in ("idle", "allocated", "mixed", "completing", "") if up else down:
        (node,) = read_nodes(f"torch* n1 4 {state}\n")
        assert node.is_up is up, state


def test_nodes_are_listed_where_slurm_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_nodes() is None
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho torch\\* n1 4 idle; echo $#\n")
    sinfo.chmod(0o755)
    assert [(node.name, node.state) for node in query_nodes() or ()] == [("n1", "idle")]

    def silent(argv: Sequence[str], **_: object) -> CompletedCommand:
        assert argv == LISTING
        raise StagerError("no answer")

    assert query_nodes(silent) == []
