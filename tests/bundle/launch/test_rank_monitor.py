"""What is known of a node's ranks: real processes under the real run wrapper, as they end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import bundle
from bundle.launch import output_reader, rank_results
from bundle.launch.output_reader import Outputs
from bundle.launch.rank_monitor import SECONDS, Rank, RankMonitor
from bundle.system import signals
from tests.support.processes import until

FAR_SIDE = Path(bundle.__file__).parent / "launch"
# In the place of torchrun: it starts the ranks, waits for them, and says nothing of how they ended.
LAUNCHER = """\
import os, subprocess, sys
started = []
for rank, word in enumerate(sys.argv[2:]):
    env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    argv = [sys.executable, sys.argv[1], "program.py", word]
    started.append(subprocess.Popen(argv, env=env))
sys.exit(max(one.wait() != 0 for one in started))
"""
PROGRAM = """\
import os, signal, sys, threading, time
what = sys.argv[1]

def wait():  # until the monitor has told that somebody goes on for too long
    while not os.path.exists("told"):
        time.sleep(0.02)

if what == "leave":
    os._exit(0)
elif what == "exit":
    os._exit(3)
elif what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "signal":
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
    os.kill(os.getppid(), signal.SIGUSR2)  # as Slurm, which sends it to all processes of a step
    open(f"ready{os.environ['RANK']}", "w").close()
    time.sleep(600)
elif what == "raise":
    raise ValueError("unhappy")
elif what == "wait":
    wait()
elif what == "thread":
    threading.Thread(target=wait, name="saver").start()
elif what == "garbage":
    with open(os.environ["STAGER_JOB_DIR"] + "/output/ranks", "w") as pipe:
        pipe.write('not json\\n[]\\n{"event": "started"}\\n{"event": "x", "rank": 9, "pid": 1}\\n')
"""


@pytest.fixture
def job_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's directory on a node, with the wrapper in it.

    In its ranks no process goes on for too long, and none does for this node unless a test says so:
    a process that gets no processor for a while takes long to end.
    """
    monkeypatch.setenv(SECONDS, "3600")
    shutil.copy(FAR_SIDE / "wrapper.py", tmp_path / "run_wrapper.py")
    (tmp_path / "program.py").write_text(PROGRAM)
    for name in ("STAGER_PROJECT", "STAGER_ENV", "STAGER_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@contextlib.contextmanager
def pipes(job_dir: Path) -> Iterator[Outputs]:
    with contextlib.closing(Outputs(str(job_dir / "output"), (), 0)) as outputs:
        yield outputs


def watched(
    job_dir: Path,
    *words: str,
    seconds: float = 3600,
    meanwhile: Callable[[RankMonitor], None] | None = None,
    **variables: str,
) -> tuple[int, RankMonitor, list[Rank]]:
    """Run a rank for each word to the end: the launcher's status, and who went on for too long.

    That is so after ``seconds``; of nobody else later. ``meanwhile`` is done while the ranks run.
    """
    told: list[Rank] = []

    def note(rank: Rank) -> None:
        told.append(dataclasses.replace(rank))
        outputs.monitor._seconds = 3600
        (job_dir / "told").touch()

    variables = {**os.environ, "STAGER_JOB_DIR": str(job_dir), "STAGER_NODE": "n1", **variables}
    argv = [sys.executable, "-c", LAUNCHER, str(job_dir / "run_wrapper.py"), *words]
    with pipes(job_dir) as outputs:
        outputs.monitor.on_lingering = note
        outputs.monitor._seconds = seconds
        acting = threading.Thread(target=meanwhile or (lambda _: None), args=(outputs.monitor,))
        acting.start()
        status, recent = output_reader.run_launcher(
            argv, variables, str(job_dir), outputs, lambda rank, lines: None
        )
        acting.join()
        (job_dir / "said").write_text("\n".join(recent.tail))
        return status, outputs.monitor, told


def test_when_each_rank_ended_and_how(job_dir: Path) -> None:
    begun = time.time()
    status, monitor, told = watched(job_dir, "leave", "exit", "kill", "nothing")
    assert (status, told) == (1, [])
    known = [monitor.ranks[rank] for rank in range(4)]
    assert all(begun < (one.ended or 0.0) < time.time() for one in known)
    # The launcher may be quicker to ask for one of them, and then nobody else can see it.
    wanted = [0, 3, -signal.SIGKILL, 0]
    assert all(one.code in (None, code) for one, code in zip(known, wanted, strict=True))
    assert [one.status if one.finished else None for one in known] == [None, None, None, 0]
    assert sorted(one.rank for _, one in monitor.list_departed({1, 2})) == [0, 3]


def test_a_signal_of_the_user_reaches_each_rank(
    job_dir: Path, request: pytest.FixtureRequest
) -> None:
    for number in signals.USER_SIGNALS:
        request.addfinalizer(partial(signal.signal, number, signal.getsignal(number)))
    signals.receive_user_signals()

    def send(monitor: RankMonitor) -> None:
        until(lambda: all((job_dir / f"ready{rank}").exists() for rank in range(2)))
        os.kill(os.getpid(), signal.SIGUSR2)

    status, monitor, _ = watched(job_dir, "signal", "signal", meanwhile=send)
    assert status == 0
    assert [monitor.ranks[rank].status for rank in range(2)] == [0, 0]


def test_a_thread_that_keeps_the_process_is_named_and_its_status_stays(job_dir: Path) -> None:
    status, monitor, told = watched(job_dir, "thread", **{SECONDS: "0.2"})
    assert status == 0
    assert [(one.rank, one.lingers) for one in told] == [(0, ("thread saver",))]
    assert (
        "stager: rank 0 on n1 has ended its program, but its process goes on 0.2 s later: "
        in (job_dir / "said").read_text()
    )
    assert monitor.list_lingering() == []  # it has ended since


def test_who_goes_on_for_too_long(tmp_path: Path) -> None:
    """Not the ranks of a node that have all left their group: the program is made that way."""
    told: list[int] = []
    with pipes(tmp_path) as outputs:
        monitor, before = outputs.monitor, time.time() - 9
        monitor.on_lingering = lambda rank: told.append(rank.rank)
        monitor._seconds = 1
        monitor.ranks = {number: Rank(number, number, 1, left=before) for number in range(2)}
        monitor.take()
        assert told == []
        monitor.ranks[1].left = None  # it may wait for the other one
        monitor.take()
        assert told == [0]
        monitor.ranks = {0: Rank(0, 0, 1, ended=before, code=0), 1: Rank(1, 1, 1)}
        monitor.take()
        assert told == [0, 1], "it goes on after the others"


@pytest.mark.parametrize(("word", "expected"), [("raise", 1), ("garbage", 0)])
def test_nobody_waits_for_the_watch(job_dir: Path, word: str, expected: int) -> None:
    begun = time.monotonic()
    status, monitor, _ = watched(job_dir, word)
    assert time.monotonic() - begun < 600
    assert (status, monitor.ranks[0].status) == (expected, expected)


def test_without_an_agent_the_rank_runs_as_ever(job_dir: Path) -> None:
    (job_dir / "output").mkdir()
    os.mkfifo(job_dir / "output" / "ranks")
    argv = [sys.executable, "run_wrapper.py", "program.py", "nothing"]
    for job in (str(job_dir), str(job_dir / "absent"), ""):
        env = {**os.environ, "STAGER_JOB_DIR": job}
        done = subprocess.run(argv, cwd=job_dir, env=env, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


def test_what_failed_before_the_launcher_was_to_end_is_known(job_dir: Path) -> None:
    """Its launcher still waits for the others, and says nothing."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    hook = sys.unraisablehook
    argv = [sys.executable, "-c", LAUNCHER, str(job_dir / "run_wrapper.py")]
    variables = {**os.environ, "STAGER_JOB_DIR": str(job_dir)}
    with pipes(job_dir) as outputs:
        monitor = outputs.monitor

        def end() -> None:
            until(lambda: 1 in monitor.ranks and monitor.ranks[1].ended is not None, 120)
            os.kill(os.getpid(), signal.SIGTERM)

        signals.end_on_signals()
        ending = threading.Thread(target=end)
        ending.start()
        try:
            words = ["wait", "kill"]
            code, _ = output_reader.run_launcher(
                [*argv, *words], variables, str(job_dir), outputs, lambda rank, lines: None
            )
        finally:
            ending.join()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            sys.unraisablehook = hook
    assert (code, monitor.stopped) == (signals.TERMINATED, True)
    (failed,) = monitor.list_unreported(())
    assert (failed.rank, failed.code) == (1, -signal.SIGKILL)
    assert monitor.list_unreported({1}) == []
    seen = rank_results.make_record("n1", 1, 1, -signal.SIGKILL, ["last"], failed.ended or 0.0)
    (record,) = rank_results.complete_records([seen], monitor, [])
    assert (record.told_to_end, record.lines) == (False, ("last",))


def test_a_rank_whose_end_nobody_has_seen(tmp_path: Path) -> None:
    """Its launcher had waited for it before it could be looked at."""
    with pipes(tmp_path) as outputs:
        monitor, now = outputs.monitor, time.time()
        monitor.ranks = {
            0: Rank(0, 0, 100, ended=now - 9),
            1: Rank(1, 1, 101, ended=now - 9, finished=now - 10),
            2: Rank(2, 2, 102, ended=now - 9, code=3),
            3: Rank(3, 3, 103),
        }
        assert monitor.list_vanished(()) == []
        departed = {one.rank: one for _, one in monitor.list_departed({2})}
        assert sorted(departed) == [0, 1]
        assert not departed[0].has_left_and_gone_on
        monitor.note_launcher_end(stopped=True)
        assert [one.rank for one in monitor.list_vanished(())] == [0]
        assert [one.rank for one in monitor.list_unreported(())] == [2]
        assert [one.rank for _, one in monitor.list_departed({2})] == [1]


# --- whose wish it was ---------------------------------------------------------------------------

REPORT = """\
W0101 10:00:00.000000 1 torch/distributed/elastic/x.py:9] Sending process 100 closing signal SIGTERM
E0101 10:00:00.100000 1 torch/x.py:9] failed (exitcode: -15) local_rank: 1 (pid: 101) of binary: p
Failures:
[1]:
  time      : 2026-01-01_10:00:00
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 100)
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_10:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 101)
"""


@pytest.mark.parametrize(
    ("report", "known"),
    [
        (REPORT, True),
        (REPORT, False),  # no pidfd: then torchrun's own naming counts
        ("\n".join(REPORT.splitlines()[1:]), True),  # nor what it says of its signals
    ],
)
def test_a_rank_that_its_launcher_did_not_end(tmp_path: Path, report: str, known: bool) -> None:
    lines = report.splitlines()
    records = rank_results.find_failures(str(tmp_path), "n1", lines, 99.0)
    with pipes(tmp_path) as outputs:
        if known:
            for rank, ended in ((0, 11.5), (1, 11.25)):
                outputs.monitor.ranks[rank] = Rank(rank, rank, 100 + rank, ended=ended, code=-15)
        found = {
            one.rank: one for one in rank_results.complete_records(records, outputs.monitor, lines)
        }
    assert [found[rank].told_to_end for rank in (0, 1)] == [True, False]
    assert [found[rank].root_cause for rank in (0, 1)] == [False, True]
    weigh = rank_results.weigh_exit
    weights = [weigh(-15, "", "", found[rank].told_to_end) for rank in (0, 1)]
    assert weights == [rank_results.ENDED, rank_results.CAUSE]
    assert [found[rank].time for rank in (0, 1)] == ([11.5, 11.25] if known else [99.0, 99.0])
