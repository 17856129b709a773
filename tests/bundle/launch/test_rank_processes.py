"""The launcher of plain processes, started as the agent starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bundle.launch import rank_processes
from tests.support.processes import is_alive, until

LAUNCHER = Path(rank_processes.__file__)


def test_ranks_end_also_where_nobody_reads_what_the_launcher_says(tmp_path: Path) -> None:
    """So it is when the agent was killed: its end of the pipe is closed before the signal comes."""
    program = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    note = tmp_path / "pid"
    argv = [sys.executable, str(LAUNCHER), "1", "0", "7", "-c", program, str(note)]
    launcher = subprocess.Popen(argv, stderr=subprocess.PIPE)
    assert until(lambda: note.exists() and note.read_text() != "")
    assert launcher.stderr is not None
    launcher.stderr.close()
    launcher.terminate()
    assert launcher.wait(30) == 143
    assert not is_alive(int(note.read_text()))
