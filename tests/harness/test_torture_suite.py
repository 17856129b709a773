"""The torture suite's own promises: its rounds repeat, what is broken is told, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import run
from tests.support.torture_rounds import breaks, fails, hangs, leaves, round_of
from tests.torture.rounds import BROKEN

REPO = Path(__file__).resolve().parents[2]


def test_what_a_round_does_depends_on_seed_area_and_number_alone(tmp_path: Path) -> None:
    one, two, other = (round_of(tmp_path, number).rng.random() for number in (0, 0, 1))
    assert one == two != other


@pytest.mark.parametrize(
    ("attempt", "promise"),
    [
        (hangs, "it ends within 1 seconds"),
        (breaks, "it holds"),
        (leaves, "no process is left behind"),
        (fails, "no exception but the product's own errors"),
    ],
)
def test_a_broken_promise_is_told(attempt: object, promise: str, tmp_path: Path) -> None:
    seconds, left = 1 if attempt is hangs else 300, 1 if attempt is leaves else 300
    code = (
        "import json; from pathlib import Path; from tests.support import torture_rounds as t; "
        "from tests.torture import isolation; isolation.adopt_orphans(); "
        f"isolation._LEFT_SECONDS = {left}; "
        f"r = t.round_of(Path({str(tmp_path)!r})); "
        f"print(json.dumps(isolation.play(t.{attempt.__name__}, r, seconds={seconds}, own=False)))"  # type: ignore[attr-defined]
    )
    done = run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(REPO)})
    told = json.loads(done.stdout)
    assert (told["outcome"], told["promise"]) == (BROKEN, promise)
    if attempt in (hangs, breaks):
        assert told["steps"]


def test_ctrl_c_ends_the_suite_and_leaves_nothing(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.torture", "settings", "--seconds", "300", "-v"]
    with subprocess.Popen(argv, cwd=REPO, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("settings"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=300)[1]
    assert process.returncode == -signal.SIGINT, said
    assert not list(Path("/var/tmp").glob(f"stager-torture-{process.pid}-*"))
