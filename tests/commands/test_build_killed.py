"""Builds that are killed, interrupted, or run twice at a time: the store is always sound after."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.building import STAGER, Project, digests, left_in_tmp
from tests.support.processes import until
from tests.support.wheelhouse import make_wheel

FINAL = ("wheels", "layers", "bundles", "programs")
"""Folders of the store in which nothing may ever be half of what it should be."""


@pytest.fixture(scope="module")
def big_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four wheels that are slow to compress, made once."""
    folder = tmp_path_factory.mktemp("big-wheels")
    chance = random.Random(11)
    for number in range(4):
        data = bytes(chance.choices(b"abcdefgh", k=2 << 20))
        files = {f"big{number}/__init__.py": "", f"big{number}/data": data}
        make_wheel(folder, f"big{number}", files=files)
    return folder


@pytest.fixture
def heavy(project: Project, wheelhouse: Path, big_wheels: Path) -> Project:
    """A project whose build takes a second or two, in all of its phases."""
    for wheel in big_wheels.iterdir():
        (wheelhouse / wheel.name).symlink_to(wheel)
    return project.settings("alpha", "cli-tool", *(f"big{number}" for number in range(4)))


def start(project: Project, *arguments: str) -> subprocess.Popen[str]:
    """A build in a session of its own, as a terminal would give it."""
    return processes.start([*STAGER, "build", *arguments], cwd=project.root)


def marked(mark: str) -> dict[int, str]:
    """The processes that have a mark in their environment, with what they run."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
    return found


def all_end(mark: str) -> dict[int, str]:
    """What does not end by itself."""
    return {} if until(lambda: not marked(mark), 120) else marked(mark)


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    """Read a build's talk until it says this."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"the build never said {words!r}")


def wait_for_any(folder: Path, pattern: str) -> None:
    """Until something of this name is in the folder."""

    def is_there() -> bool:
        with contextlib.suppress(FileNotFoundError):  # the build removes the folder, too
            return next(folder.glob(pattern), None) is not None
        return False

    assert until(is_there, pause=0.005), pattern


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A build that was ended by a signal."""

    code: int
    out: str
    err: str


def ended(
    project: Project,
    reach: Callable[[subprocess.Popen[str]], None],
    end: Callable[[subprocess.Popen[str]], None],
) -> Ended:
    """End a build under way, from nothing. One that was done before is tried again."""
    root, fresh = project.store.root, project.root.parent / "fresh"
    shutil.copytree(root, fresh)
    for _ in range(5):
        process = start(project)
        reach(process)
        end(process)
        out, err = process.communicate(timeout=300)
        # `python -m` dies of SIGINT, which a shell shows as 130, too, if the interrupt came while a
        # text was executed, as dataclasses do: run_eval_code_obj in CPython's pythonrun.c notes it.
        code = 130 if process.returncode == -signal.SIGINT else process.returncode
        if code != 0:
            return Ended(code=code, out=out, err=err)
        shutil.rmtree(root)
        shutil.copytree(fresh, root)
        (project.root / "pylock.toml").unlink(missing_ok=True)
    raise AssertionError("it goes on to its end each time")


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A word in the environment of all that a test starts; nothing that has it may be left."""
    word = f"mark-{os.getpid()}-{time.time_ns()}"
    monkeypatch.setenv("STAGER_TEST_MARK", word)
    # This process has it too, but /proc shows the environment that it was started with.
    yield word
    left = all_end(word)
    assert left == {}, f"processes are left: {left}"


@pytest.mark.full
def test_kill_9_at_any_moment_leaves_a_sound_store(
    heavy: Project, mark: str, tmp_path: Path
) -> None:
    store = heavy.store
    started = time.monotonic()
    heavy.expect("build", "--json")
    whole = time.monotonic() - started
    good = {folder: digests(store.root / folder) for folder in FINAL}
    chance = random.Random(42)
    seen_half_way = 0
    for round_ in range(15):
        if round_ % 3 == 0:  # from nothing; else from where the last one was killed
            for folder in ("tmp", "layers", "bundles", "programs", "proofs", "seals", "projects"):
                shutil.rmtree(store.root / folder, ignore_errors=True)
        process = start(heavy)
        if round_ % 3:
            time.sleep(chance.uniform(0.15, 1) * whole)
        else:  # while layers are written, however quick or slow the machine is just now
            wait_for_any(store.root / "tmp", "spool-*")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert all_end(mark) == {}
        for folder in FINAL:
            found = digests(store.root / folder)
            assert found.items() <= good[folder].items(), f"{folder} holds what is not whole"
        seen_half_way += digests(store.root / "layers").keys() < good["layers"].keys()
    assert seen_half_way, "no build was killed half way"
    heavy.expect("build", "--json")
    assert {folder: digests(store.root / folder) for folder in FINAL} == good
    assert left_in_tmp(store) == []
    logs = tmp_path / "logs"
    argv = ["verify", "--allocation", "local", "--nodes", "1", "--json", "--log-dir", str(logs)]
    verified = heavy.expect(*argv)
    assert json.loads(verified.stdout)["ok"]


@pytest.mark.parametrize(
    "phase",
    [
        "big",
        *(
            pytest.param(phase, marks=pytest.mark.full)
            for phase in ("Pinning", "Fetching", "Proving")
        ),
    ],
)
def test_when_the_parent_alone_is_killed_its_children_end(
    phase: str, heavy: Project, mark: str
) -> None:
    process = start(heavy)
    wait_for(process, phase)
    time.sleep(0.1)
    process.kill()
    process.communicate()
    assert all_end(mark) == {}
    heavy.expect("build", "--json")
    assert left_in_tmp(heavy.store) == []


@pytest.mark.parametrize(
    ("phase", "to_all"),  # a terminal sends it to every process of the group
    [("Making", True), ("big", False),
     *(pytest.param(phase, True, marks=pytest.mark.full)
       for phase in ("Pinning", "Fetching", "big", "Proving"))],
)  # fmt: skip
def test_ctrl_c_ends_it_without_a_trace(
    phase: str, to_all: bool, heavy: Project, mark: str
) -> None:
    def reach(process: subprocess.Popen[str]) -> None:
        wait_for(process, phase)
        time.sleep(0.05)

    def interrupt(process: subprocess.Popen[str]) -> None:
        if to_all:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)

    done = ended(heavy, reach, interrupt)
    assert done.code == 130, done.err
    assert "Traceback" not in done.err + done.out
    assert "what was fetched and made is kept" in done.err
    assert "interrupted" in done.err
    assert done.out == ""
    assert all_end(mark) == {}
    assert not [path for path in left_in_tmp(heavy.store) if path.is_file()]
    with heavy.store.lock(waiting=lambda: pytest.fail("the store is still locked")):
        assert left_in_tmp(heavy.store) == []


def test_two_builds_at_a_time_both_succeed(heavy: Project, mark: str, tmp_path: Path) -> None:
    other = Project(root=tmp_path / "other", store=heavy.store)
    other.root.mkdir()
    other.settings("alpha", "cli-tool", "big0", "schemes")
    with heavy.store.lock():  # else one of them may be done before another has begun
        builds = [start(project, "--json") for project in (heavy, other, heavy)]
        for process in builds:
            wait_for(process, "waiting for another build")
    reports = []
    for process in builds:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        reports.append(json.loads(out))
    assert reports[0]["id"] == reports[2]["id"] != reports[1]["id"]
    assert sum(report["layers_built"] for report in reports) == 9 + 2
    assert all(Path(report["bundle"]).is_file() for report in reports)
    assert left_in_tmp(heavy.store) == []


def test_sighup_ends_it_without_a_trace(heavy: Project, mark: str) -> None:
    """A terminal that is closed, or an ssh connection that is gone."""
    done = ended(
        heavy,
        lambda process: wait_for_any(heavy.store.root / "tmp", "spool-*"),
        lambda process: process.send_signal(signal.SIGHUP),
    )
    assert done.code == 130, done.err
    assert "Traceback" not in done.err + done.out
    assert all_end(mark) == {}
    assert not [path for path in left_in_tmp(heavy.store) if path.name.startswith("spool-")]


def test_a_build_that_nohup_started_goes_on(project: Project, mark: str) -> None:
    argv = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *STAGER, "build", "--no-prove"]
    with subprocess.Popen(argv, cwd=project.root, stderr=subprocess.PIPE, text=True) as process:
        wait_for(process, "Making")
        process.send_signal(signal.SIGHUP)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


NEVER_DONE = """\
import sys
from pathlib import Path

from stager.core.store import Store
from stager.core.values import Digest, Target
from stager.layers.layer_build import make_layers
from stager.layers.source import LayerSource
from stager.layers.tree import Tree, TreeFile

if __name__ == "__main__":
    pipe, store = Path(sys.argv[1]), Store(Path(sys.argv[2]))
    file = TreeFile(path="data", source=pipe, mode=0o644, size=1)
    tree = Tree(files=(file,), links=(), skipped=())
    source = LayerSource(kind="asset", name="slow", size=1, digest=Digest.of(b"slow"), tree=tree)
    with store.lock():
        make_layers([source], store=store, target=Target.from_host(), jobs=1)
"""
"""Makes the layer of a file that is a pipe to which nobody writes."""


def test_a_layer_under_way_ends_with_a_build_that_is_killed(tmp_path: Path, mark: str) -> None:
    pipe, script = tmp_path / "pipe", tmp_path / "build.py"
    os.mkfifo(pipe)
    script.write_text(NEVER_DONE)
    repo = Path(__file__).resolve().parents[2]
    argv = [sys.executable, str(script), str(pipe), str(tmp_path / "store")]
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(repo)}) as process:
        # The build, the resource tracker, the server, the layer's.
        begun = until(lambda: len(marked(mark)) >= 4 or process.poll() is not None)
        time.sleep(0.3)
        ended_by_itself = process.poll() is not None
        process.kill()
    assert begun
    assert not ended_by_itself
    assert all_end(mark) == {}
