"""Which rank is named first: real jobs under the real torchrun, whose ranks end in odd ways."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from bundle.launch.rank_monitor import SECONDS
from tests.support.processes import until
from tests.support.torch_project import TorchProject

# Each rank does as it is told, by `0=meets 1=leaves` or `all=meets`; only those that meet need more
# than Python.
PROGRAM = """\
import os, signal, sys, threading, time, traceback
rank = os.environ["RANK"]
asked = dict(word.split("=") for word in sys.argv[1:])
what = asked.get(rank, asked.get("all"))

def until_ended(other):
    while True:
        try:
            os.kill(int(open(f"pid.{other}").read() or 0) or os.getpid(), 0)
        except FileNotFoundError:
            pass
        except ProcessLookupError:
            return
        time.sleep(0.02)

def until_there(name, ranks):
    while not all(os.path.exists(f"{name}.{other}") for other in ranks):
        time.sleep(0.02)

with open(f"pid.{rank}", "w") as file:
    file.write(str(os.getpid()))
print("begun", flush=True)
if what == "terms":
    os.kill(os.getpid(), signal.SIGTERM)
elif what == "crashes":  # once no other rank listens to SIGTERM
    until_there("deaf", set(range(4)) - {int(rank)})
    os.kill(os.getpid(), signal.SIGSEGV)
elif what == "crashes-later":
    until_ended(1)
    os.kill(os.getpid(), signal.SIGSEGV)
elif what == "imports":  # once all are so far: who fails first ends those that have not begun
    until_there("pid", range(4))
    raise ImportError(f"cannot import name 'x' from 'alpha' ({os.environ['STAGER_ENV']}/a.py)")
elif what == "sleeps":
    time.sleep(600)
elif what == "is-deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"deaf.{rank}", "w").close()
    time.sleep(600)
elif what == "has-a-thread":
    threading.Thread(target=time.sleep, args=(600,), name="saver").start()
elif what in ("meets", "leaves", "goes-on", "mistakes"):
    import torch
    import torch.distributed as dist
    dist.init_process_group()
    dist.all_reduce(torch.ones(1))
    if what == "leaves":
        os._exit(0)
    if what == "mistakes":  # as Hydra ends its programs
        try:
            dist.all_reduce(torch.ones(1)) if rank != "1" else int("1x")
        except Exception:
            traceback.print_exc()
            sys.exit(1)
    if what == "goes-on":
        dist.destroy_process_group()
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
elif what == "meets-once":
    import torch
    import torch.distributed as dist
    dist.init_process_group()
    dist.all_reduce(torch.ones(1))  # who ends before all have joined breaks the others' joining
    dist.destroy_process_group()
elif what == "is-alone":
    import torch
"""


def ran(project: TorchProject, cwd: Path, *words: str, nodes: int = 2) -> dict[str, Any]:
    """What `stager diagnose` says of a job that failed; `run` has said the same."""
    done = project.run(PROGRAM, *words, cwd=cwd, options=("--nodes", str(nodes)))
    assert done.code == 3, done.stderr
    return _diagnosed(project, cwd, done.report)


def _diagnosed(project: TorchProject, cwd: Path, report: dict[str, Any]) -> dict[str, Any]:
    argv = ("diagnose", "--json", "--log-dir", cwd / "logs", str(report["job_id"]))
    found: dict[str, Any] = json.loads(project.stager(*argv, cwd=cwd).stdout)
    assert found["first_failure"] == report["first_failure"]
    assert found["consequences"] == report["consequences"]
    return found


def named(found: dict[str, Any]) -> tuple[str, int | None, int | None, str]:
    first = found["first_failure"]
    return first["node"], first["rank"], first["exit_code"], first["class"]


@pytest.mark.full
@pytest.mark.parametrize("others", [("all=sleeps",), ("2=crashes-later", "all=sleeps")])
def test_a_rank_that_a_signal_of_its_own_has_ended(
    torch_project: TorchProject, tmp_path: Path, others: tuple[str, ...]
) -> None:
    """Torchrun ends with the same signal what is left then; and another crash comes later."""
    found = ran(torch_project, tmp_path, "1=terms", *others)
    assert named(found) == ("local1", 1, -signal.SIGTERM, "killed")
    assert set(found["consequences"]) <= {0, 2, 3}
    assert 0 in found["consequences"]


def test_a_rank_that_leaves_while_the_others_wait_for_it(
    torch_project: TorchProject, tmp_path: Path
) -> None:
    found = ran(torch_project, tmp_path, "1=leaves", "all=meets")
    assert named(found) == ("local1", 1, 0, "hang")
    assert "while other ranks went on" in found["first_failure"]["cause"]
    assert set(found["consequences"]) <= {0, 2, 3}
    assert found["consequences"]


@pytest.mark.full
def test_a_rank_that_leaves_its_group_and_goes_on(
    torch_project: TorchProject, tmp_path: Path
) -> None:
    """The others lose it at once, and torchrun ends it with them."""
    found = ran(torch_project, tmp_path, "1=goes-on", "all=meets")
    assert named(found) == ("local1", 1, None, "hang")
    assert "it has left its process group" in found["first_failure"]["cause"]


def test_the_same_failure_on_all_ranks(torch_project: TorchProject, tmp_path: Path) -> None:
    """Its message has each node's own path; a rank that was ended before has said nothing."""
    found = ran(torch_project, tmp_path, "all=imports")
    first = found["first_failure"]
    assert first["cause"].startswith("ImportError: cannot import name 'x'")
    silent = set(range(4)) - {first["rank"], *found["alike"]}
    assert set(found["consequences"]) == silent
    other = {2, 3} if first["node"] == "local1" else {0, 1}
    assert other & set(found["alike"]), found


@pytest.mark.full
def test_a_rank_that_prints_its_error_and_exits_is_told_from_those_that_lose_it(
    torch_project: TorchProject, tmp_path: Path
) -> None:
    found = ran(torch_project, tmp_path, "all=mistakes")
    first = found["first_failure"]
    assert named(found) == ("local1", 1, 1, "python-error")
    assert first["cause"] == "ValueError: invalid literal for int() with base 10: '1x'"
    assert any('script.py", line ' in line for line in first["lines"])
    assert found["alike"] == []
    assert set(found["consequences"]) <= {0, 2, 3}
    assert 0 in found["consequences"]


@pytest.mark.full
@pytest.mark.parametrize(("word", "note"), [("is-alone", True), ("meets-once", False)])
def test_ranks_that_have_never_met(
    torch_project: TorchProject, tmp_path: Path, word: str, note: bool
) -> None:
    done = torch_project.run(PROGRAM, f"all={word}", cwd=tmp_path, options=("--nodes", "1"))
    assert (done.code, done.report["first_failure"]) == (0, None), done.stderr
    assert bool(done.report["notes"]) == note
    if note:
        assert "no rank joined a process group" in done.report["notes"][0]


# --- Ctrl-C --------------------------------------------------------------------------------------


def interrupted(
    project: TorchProject, cwd: Path, *words: str, after: tuple[str, int], seconds: float = 3600
) -> tuple[dict[str, Any], str]:
    """End a job by Ctrl-C once so many lines of its files match an expression; what is said then.

    After so many seconds a rank is said to linger.
    """
    (cwd / "script.py").write_text(PROGRAM)
    argv = ["run", "--bundle", project.bundle, "--allocation", "local", "--nodes", "2"]
    argv += ["--nproc-per-node", "2", "--log-dir", cwd / "logs", "--json", "--", "script.py"]
    env = {**project.env, SECONDS: str(seconds)}
    started = TorchProject(**{**vars(project), "env": env}).start(*argv, *words, cwd=cwd)

    def said() -> bool:
        found = [path for path in (cwd / "logs").glob("*") if path.suffix in (".out", ".jsonl")]
        text = "\n".join(path.read_text(errors="replace") for path in found)
        return len(re.findall(after[0], text)) >= after[1]

    try:
        assert until(lambda: said() or started.poll() is not None)
        time.sleep(1)  # what is in the log is shown a moment later
    finally:
        os.killpg(started.pid, signal.SIGINT)
        out, err = started.communicate(timeout=300)
    assert started.returncode == 130, err
    return _diagnosed(project, cwd, json.loads(out)), err


@pytest.mark.full
def test_ctrl_c_at_a_rank_that_does_not_end(torch_project: TorchProject, tmp_path: Path) -> None:
    """It is named while the job runs, and afterwards."""
    words = ("1=has-a-thread", "all=meets-once")
    after = (r'"lingering".*"rank": 1\b', 1)
    found, said = interrupted(torch_project, tmp_path, *words, after=after, seconds=1)
    assert named(found) == ("local1", 1, None, "hang")
    assert "it waits for thread saver" in found["first_failure"]["cause"]
    assert "local1 rank 1: its program has ended" in said
    assert "before that:" in said


@pytest.mark.full
def test_ctrl_c_after_a_failure_that_its_launcher_still_deals_with(
    torch_project: TorchProject, tmp_path: Path
) -> None:
    """Torchrun waits half a minute for a rank that does not listen, and then tells of both."""
    after = ("closing signal SIGTERM", 1)
    found, said = interrupted(torch_project, tmp_path, "1=crashes", "all=is-deaf", after=after)
    # How it ended is seen only if nobody asks the kernel before; see RankMonitor.vanished.
    crashed = ("local1", 1, -signal.SIGSEGV, "killed")
    assert named(found) in (crashed, ("local1", 1, None, "unknown"))
    assert "local1 rank 1 failed" in said
