"""Few open files: all logs complete all the same, or an error before ranks are started."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.launch import run_ranks
from bundle.protocol.problem import NodeError
from stager.pack.bundle import Packed
from tests.support.jobs import job_for

REPO = Path(__file__).resolve().parents[3]
BEGIN = (
    f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
    "from bundle.system import processes\n"
    "from bundle.protocol.job import load_job\n"
    "from bundle.launch.output_reader import Outputs\n"
    "from bundle.driver.logs import Logs\n"
)


def limited(code: str, soft: int, hard: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program under a limit of open files."""
    shell = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"'
    argv = ["sh", "-c", shell, "sh", sys.executable, "-c", BEGIN + code, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)


def test_more_ranks_than_files_may_be_open(single: Packed, tmp_path: Path) -> None:
    """Each writes again and again, and something else holds most of the files.

    Soft and hard limit are the same, so nothing can be raised.
    """
    (tmp_path / "logs").mkdir()
    code = (
        "import os\n"
        "logs = Logs(load_job(sys.argv[1]))\n"
        "held = [os.open('/', os.O_RDONLY) for _ in range(50)]\n"
        "for turn in range(3):\n"
        "    for rank in range(100):\n"
        "        logs.output('n1', rank, b'rank %d turn %d\\n' % (rank, turn), ('n1', rank))\n"
        "print(logs.fault, sum(logs.lost.values()))\n"
    )
    given = tmp_path / "job.json"
    given.write_text(json.dumps(job_for(single, tmp_path).to_json()))
    done = limited(code, 64, 64, str(given))
    assert (done.stdout, done.stderr) == (" 0\n", "")
    for rank in range(100):
        log = tmp_path / "logs" / f"demo.4711.n1.{rank}.out"
        assert log.read_text() == "".join(f"rank {rank} turn {turn}\n" for turn in range(3))


def test_the_soft_limit_is_raised_and_what_is_started_has_the_old_one() -> None:
    code = (
        "processes.raise_open_files()\n"
        "shell = processes.run(['sh', '-c', 'ulimit -n'], timeout=9)\n"
        "print(processes.get_open_file_limit(), shell.stdout)\n"
    )
    assert limited(code, 100, 400).stdout.split() == ["400", "100"]
    assert limited(code, 100, 100).stdout.split() == ["100", "100"]


def test_too_many_pipes_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    code = (
        "import errno\n"
        "try: Outputs(sys.argv[1], [range(300)] * 300, 7)\n"
        "except OSError as exc: print(errno.errorcode[exc.errno])\n"
    )
    done = limited(code, 256, 256, str(tmp_path / "pipes"))
    assert (done.stdout, done.stderr) == ("EMFILE\n", "")
    assert not (tmp_path / "pipes").exists()


@pytest.mark.parametrize(
    ("number", "why", "fix"),
    [
        (errno.EMFILE, "a pipe is needed for 300 ranks", "ulimit -Hn"),
        (errno.ENOSPC, "No space left on device", "check the free space"),
    ],
)
def test_what_is_said_of_it(
    monkeypatch: pytest.MonkeyPatch, number: int, why: str, fix: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_ranks, "Outputs", fail)
    with pytest.raises(NodeError) as caught:
        run_ranks._open_outputs("/r/jobs/7.0.0", [range(1)] * 300, 7)
    assert why in caught.value.problem.why
    assert fix in caught.value.problem.fix
