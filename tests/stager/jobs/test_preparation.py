"""A job made ready: the command's script, notes, the driver's start."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.enumerations import Action
from bundle.redaction.secret_names import is_secret
from stager.config.job_settings import JobOptions
from stager.core.errors import ConfigError
from stager.jobs.preparation import (
    Prepared,
    choose_source,
    make_driver_start,
    make_project_path,
    prefer_local_script,
    prepare,
    refuse_missing_program,
)
from tests.support.building import Project
from tests.support.demo_project import config, manifest

# --- Settings, options and notes ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _project_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script is in the working directory, so no test needs a real bundle; no secret is set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for name in filter(is_secret, list(os.environ)):
        monkeypatch.delenv(name)


def make(root: Path, *command: str, source: Any = "salloc", **more: Any) -> Prepared:
    tables = more.pop("tables", {})
    options = JobOptions(command=command, log_dir=root / "logs", **more)
    bundle = root / "demo.pkgs.tar", manifest("torch")
    bundle[0].write_bytes(b"x" * 1000)
    return prepare(config(root, **tables), options, bundle, action=Action.RUN, source=source)


def test_a_command_for_one_machine_becomes_one_for_each_rank(tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node=4 --max-restarts=2 --standalone train.py --lr 1"
    command = shlex.split(line)
    made = make(tmp_path, *command)
    assert made.job.launch.command == ("train.py", "--lr", "1")
    assert (made.job.launch.nproc_per_node, made.job.launch.max_restarts) == (4, 2)
    assert any("--standalone" in note for note in made.notes)
    assert made.config.launch.nproc_per_node == 4
    # The command line counts more than what the command says.
    assert make(tmp_path, *command, nproc_per_node=2).job.launch.nproc_per_node == 2
    in_settings = {"project": {"name": "demo", "command": ["python", "train.py", "-v"]}}
    assert make(tmp_path, tables=in_settings).job.launch.command == ("train.py", "-v")


@pytest.mark.parametrize(
    ("given", "named", "nodes", "expected"),
    [
        (("n[1-4]",), [], None, 4),  # hosts on the command line count more than a number elsewhere
        (("n[1-4]",), [], (3, 3), 3),
        ((), ["n[1-4]"], None, 2),
        ((), ["n[1-4]"], (3, 3), 3),
    ],
)
def test_how_many_of_the_hosts_are_used(
    given: tuple[str, ...], named: list[str], nodes: Any, expected: int, tmp_path: Path
) -> None:
    tables = {"cluster": {"nodes": 2, "hosts": named}}
    made = make(tmp_path, "train.py", source="ssh", hosts=given, nodes=nodes, tables=tables)
    assert list(made.job.nodes) == [f"n{number}" for number in range(1, expected + 1)]


@pytest.mark.parametrize(
    ("spares", "nodes", "expected", "spare"),
    [(1, None, 4, 1), (1, (2, 2), 3, 1), (2, (2, 2), 4, 2), (0, (2, 2), 2, 0)],
)
def test_spare_hosts_come_after_those_with_ranks(
    spares: int, nodes: Any, expected: int, spare: int, tmp_path: Path
) -> None:
    made = make(tmp_path, "train.py", source="ssh", hosts=("n[1-4]",), nodes=nodes, spares=spares)
    assert list(made.job.nodes) == [f"n{number}" for number in range(1, expected + 1)]
    assert made.job.spares == spare


@pytest.mark.parametrize(("spares", "nodes"), [(4, None), (9, None), (1, (4, 4)), (2, (3, 3))])
def test_more_spare_hosts_than_there_are(spares: int, nodes: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"4 hosts for a job that needs . and {spares} spare"):
        make(tmp_path, "train.py", source="ssh", hosts=("n[1-4]",), nodes=nodes, spares=spares)


@pytest.mark.parametrize(
    ("tables", "limit"),
    [
        ({}, 2_000_000_000),
        ({"launch": {"compile-cache": "read"}}, 0),
        ({"launch": {"compile-cache": "off"}}, None),
        ({"launch": {"compile-cache-limit": "1MB"}}, 1_000_000),
        ({"trust": {"allowed-signers": "signers", "require": True}}, None),
    ],
)
def test_compiled_code_is_used_where_no_signature_is_required(
    tables: dict[str, Any], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.jobs.preparation.decide_trust", lambda *_: (None, None))
    tables = {**tables, "assets": {"caches": ["CUDA_CACHE_PATH"]}}
    found = make(tmp_path, "train.py", tables=tables).job.code_store
    assert found is None or found.caches == ("CUDA_CACHE_PATH",)
    assert (found and found.limit) == limit
    assert found is None or found.path.endswith(f"/compiled-{os.geteuid()}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/my/own")
    assert make(tmp_path, "train.py", tables=tables).job.code_store is None


def test_what_the_site_has_fixed_is_used_and_not_changed(tmp_path: Path) -> None:
    site = replace(config(tmp_path, cluster={"hosts": ["n[1-2]"]}), fixed=("cluster.hosts",))
    options, bundle = JobOptions(command=("train.py",)), (tmp_path / "b.tar", manifest("torch"))
    made = prepare(site, options, bundle, action=Action.RUN, source="ssh")
    assert made.job.nodes == ("n1", "n2")
    with pytest.raises(ConfigError, match=r"fixed by your site in .*: cluster\.hosts"):
        choose_source(replace(options, hosts=("n9",)), site, batch=False)
    site = replace(site, fixed=("launch.max-restarts",))
    options = JobOptions(command=("torchrun", "--max-restarts=2", "train.py"))
    with pytest.raises(ConfigError, match=r"--max-restarts=2: launch.max-restarts is fixed by"):
        prepare(site, options, bundle, action=Action.RUN, source="salloc")


def test_a_variable_that_ranks_do_not_get_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name alone; what only Slurm's commands need is nothing that a user misses."""
    monkeypatch.setenv("SLURM_JWT", "hunter2")

    def notes(*pass_env: str) -> tuple[str, ...]:
        made = make(tmp_path, "train.py", pass_env=pass_env)
        assert "hunter" not in repr(made)
        return made.notes

    assert notes() == ()
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert notes() == ("MASTER_PORT of this shell not used: each job has its own",)
    monkeypatch.delenv("MASTER_PORT")
    unset = "pass-env: HF_TOKEN not set here, so no rank gets a value"
    assert notes("HF_TOKEN") == (unset,)
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    assert notes() == ("not given to the ranks: HF_TOKEN (give it with --pass-env HF_TOKEN)",)
    monkeypatch.setenv("API_KEY", "hunter3")
    several = "not given to the ranks: API_KEY, HF_TOKEN (give one with --pass-env NAME)"
    assert notes() == (several,)
    assert notes("HF_TOKEN", "API_KEY") == ()


def test_how_the_driver_starts(tmp_path: Path) -> None:
    env = {
        "PATH": "/bin", "HF_TOKEN": "hunter2", "RANK": "3", "SALLOC_OPTS": "-v",
        "SBATCH_ACCOUNT": "lab",
    }  # fmt: skip
    asks = make_driver_start(make(tmp_path, "train.py", nodes=(2, 2)), env)
    assert asks.argv[0] == "salloc"
    assert asks.argv[-3:] == ("--kill-command=TERM", "--no-kill", "-v")
    assert not {"HF_TOKEN", "RANK"} & set(asks.environment)
    assert asks.environment["SBATCH_ACCOUNT"] == "lab"
    passed = make_driver_start(make(tmp_path, "train.py", pass_env=("HF_TOKEN",)), env)
    assert passed.environment["HF_TOKEN"] == "hunter2"
    for source in ("local", "inside"):
        assert make_driver_start(make(tmp_path, "train.py", source=source), env) == ((), None)


# --- A script that is not there -------------------------------------------------------------------


CHECK = "check the name; project.exclude and .gitignore keep files out of the bundle"

BLANK = CHECK.replace("name;", "name, and the quotes around it;")


@pytest.fixture
def bundle(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose project has some scripts, seen from another directory."""
    (tmp_path / "train.py").unlink()
    for name in ("train.py", "tools/convert.py", "src/own/train.py", "app/__main__.py"):
        (project.root / name).parent.mkdir(parents=True, exist_ok=True)
        (project.root / name).write_text("")
    (project.root / "latest.py").symlink_to("train.py")
    made = project.build().packed.path
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "evaluate.py").write_text("")
    (elsewhere / "launch").write_text("#!/usr/bin/env python\n")
    (elsewhere / "run.sh").write_text("torchrun\n")
    (elsewhere / "program").write_bytes(b"\x7fELF\0")
    monkeypatch.chdir(elsewhere)
    return made


def test_what_is_there_or_cannot_be_known(bundle: Path) -> None:
    for command in (
        *("train.py", "./train.py", "tools/convert.py", "tools/../train.py", "app", "latest.py"),
        *("evaluate.py", "launch", "/opt/of/the/nodes/train.py", "-m tools.convert", "-m app"),
        *("-m own.train", "-m alpha.__init__", "-m trainer", "-m timeit"),
    ):
        refuse_missing_program(shlex.split(command), bundle)


def test_what_python_cannot_start(bundle: Path) -> None:
    for command, message, hint in (
        ("run.sh", "run.sh is not a Python script", "stager exec -- run.sh"),
        ("program", "program is not a Python script", "stager exec -- program"),
        ("/usr/bin/absent", "there is no script /usr/bin/absent", "check the name"),
        ("-m own.trian", "there is no module own.trian", "did you mean own.train?"),
        ("-m own", "there is no module own", "has a __main__.py"),
        ("-m alpha.absent", "there is no module alpha.absent", "has a __main__.py"),
        ("-m evaluate", "there is no module evaluate", "has a __main__.py"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            refuse_missing_program(shlex.split(command), bundle)
        assert hint in str(caught.value.hint)


def test_what_is_not_there(bundle: Path) -> None:
    for name, hint in (
        ("trian.py", "did you mean train.py?"),
        ("convert.py", "did you mean tools/convert.py?"),
        ("evalute.py", "did you mean evaluate.py?"),
        ("ls", "run starts Python scripts and modules; for other programs: stager exec -- ls"),
        ("x", CHECK),
        ("tools", CHECK),
        ("", CHECK),
        (".", CHECK),
        (" ", BLANK),
        ("torchrun train.py --epochs 3", BLANK),
        ("a\nb", CHECK),
        ("a\0b", CHECK),
        ("x" * 5000, CHECK),
    ):
        with pytest.raises(ConfigError, match="there is no script") as caught:
            refuse_missing_program([name], bundle)
        assert caught.value.hint == hint
        shown = str(caught.value)
        assert shown.isprintable()
        assert len(shown) < 400
        if name.endswith(".py"):
            assert f"there is no script {name}: neither here nor in the project" in shown


def test_a_script_of_the_project_is_named_by_its_place_there(
    project: Project, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts do not see this machine's files, but have a copy of the project."""
    root = project.root
    monkeypatch.chdir(root / "tools")
    for name, place in (
        (str(root / "train.py"), "train.py"),
        (str(root / "latest.py"), "latest.py"),
        ("../train.py", "train.py"),
        ("../tools/convert.py", "tools/convert.py"),
        ("convert.py", "convert.py"),
        (str(root / "absent.py"), str(root / "absent.py")),
        (str(root.parent / "elsewhere" / "evaluate.py"),) * 2,
        ("/opt/of/the/nodes/train.py",) * 2,
    ):
        assert make_project_path(name, root) == place


def test_a_script_of_this_folder_is_not_another_one_of_the_project(
    project: Project, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks look at the top of the project first."""
    root = project.root
    (root / "tools" / "train.py").write_text("")
    (Path.cwd() / "train.py").write_text("")
    assert prefer_local_script("train.py", root) == "train.py"
    monkeypatch.chdir(root / "tools")
    for name, place in (
        ("train.py", "tools/train.py"),
        ("./train.py", "tools/train.py"),
        ("../train.py", "../train.py"),
        ("convert.py", "convert.py"),
        ("-m", "-m"),
        ("a\0b", "a\0b"),
        ("x" * 5000, "x" * 5000),
    ):
        assert prefer_local_script(name, root) == place
    monkeypatch.chdir(root)
    assert prefer_local_script("train.py", root) == "train.py"
