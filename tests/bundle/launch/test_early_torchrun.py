"""A launcher that waits: a small program stands where torchrun is, in a real environment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.launch import commands
from bundle.launch.commands import EarlyLauncher
from bundle.launch.program_variables import JobDirectories
from bundle.protocol.enumerations import Action, Launcher
from bundle.system import processes
from stager.core.store import Store
from stager.core.values import Wheel
from stager.pack.bundle import Packed
from tests.support.bundles import OWN, make_bundle, stage
from tests.support.jobs import LAUNCH, job_for
from tests.support.processes import living, until
from tests.support.wheelhouse import make_wheel

RUN = """\
import json, os, sys

if os.path.exists(os.path.join(os.environ["STAGER_ENV"], "..", "..", "broken")):
    raise ImportError("as wheels for another processor do")

def main():
    said = {"argv": sys.argv[1:], "cwd": os.getcwd(), "stdin": sys.stdin.read(), "pid": os.getpid()}
    said["path"], said["variables"] = sys.path, dict(os.environ)
    print(json.dumps(said), flush=True)
    sys.exit(7)

if __name__ == "__main__":
    main()
"""
ELASTIC = "torch/distributed/elastic"
EMPTY = (
    "torch/__init__.py",
    "torch/distributed/__init__.py",
    *(f"{ELASTIC}/{name}__init__.py" for name in ("", "agent/", "agent/server/", "rendezvous/")),
    f"{ELASTIC}/agent/server/local_elastic_agent.py",
    f"{ELASTIC}/rendezvous/static_tcp_rendezvous.py",
)


@pytest.fixture(scope="module")
def packed(
    store: Store, tmp_path_factory: pytest.TempPathFactory, zstd_wheel: Wheel | None
) -> Packed:
    wheel = make_wheel(
        tmp_path_factory.mktemp("torch"),
        "torch",
        files={**dict.fromkeys(EMPTY, ""), "torch/distributed/run.py": RUN},
    )
    return make_bundle(store, [wheel], decompressor=zstd_wheel, name="launching")


@pytest.fixture
def place(packed: Packed, base: Path) -> JobDirectories:
    environment = stage(packed, base).path
    root = str(base / OWN)
    return JobDirectories(root=root, environment=environment, job_dir=f"{root}/jobs/1")


@pytest.fixture
def waiting(place: JobDirectories) -> Iterator[EarlyLauncher]:
    launcher = EarlyLauncher(place)
    yield launcher
    launcher.close()
    assert living(place.environment) == []


def command(place: JobDirectories, *arguments: str) -> list[str]:
    return [f"{place.environment}/bin/python", "-m", "torch.distributed.run", *arguments]


def test_it_becomes_the_launcher_that_was_asked_for(
    place: JobDirectories, waiting: EarlyLauncher, tmp_path: Path
) -> None:
    variables = {"STAGER_ENV": place.environment, "ONLY": "these", "PATH": os.defpath}
    running = waiting.launch(command(place, "--nnodes=2", "t.py"), variables, str(tmp_path))
    assert running is not None
    assert running.stdout is not None
    said = json.loads(running.stdout.read())
    assert running.wait() == 7
    assert (said["argv"], said["cwd"]) == (["--nnodes=2", "t.py"], str(tmp_path))
    assert (said["stdin"], said["pid"]) == ("", running.pid)
    assert "" not in said["path"]  # the working directory hides no module
    assert str(tmp_path) not in said["path"]
    mark = said["variables"].pop(processes.MARK)
    assert mark.endswith(running.mark)
    assert variables.items() <= said["variables"].items()
    assert set(said["variables"]) - set(variables) <= {"LC_CTYPE", "PWD"}


def test_one_that_could_not_begin_is_not_used(place: JobDirectories, tmp_path: Path) -> None:
    """It is started the usual way then, and what it says is told as ever."""
    Path(place.root, "broken").touch()
    launcher = EarlyLauncher(place)
    assert until(lambda: launcher._running.poll() is not None)
    assert launcher.launch(command(place), {}, str(tmp_path)) is None
    launcher.close()


def test_another_command_or_interpreter_is_not_its_own(
    place: JobDirectories, waiting: EarlyLauncher, tmp_path: Path
) -> None:
    for argv in (["/usr/bin/python3", "-m", "torch.distributed.run"], ["python", "t.py"]):
        assert waiting.launch(argv, {}, str(tmp_path)) is None
    link = Path(place.environment, "bin", "python")
    link.unlink()
    link.symlink_to("/bin/true")
    assert waiting.launch(command(place), {}, str(tmp_path)) is None


def test_what_keeps_it_from_starting_is_left_to_the_launch(packed: Packed, tmp_path: Path) -> None:
    job = job_for(packed, tmp_path, action=Action.RUN)
    by_slurm = replace(LAUNCH, launcher=Launcher.SRUN)
    other = ({}, {"action": Action.VERIFY}, {"dry_run": True}, {"launch": by_slurm})
    for changes in other:  # the first as there is no environment yet
        assert commands.start_early_launcher(replace(job, **changes)) is None
