"""The far side's program, held in the middle of unpacking for as long as a test likes."""

from __future__ import annotations

from pathlib import Path

_PROGRAM = """\
import os, sys, time
sys.path.insert(0, {program!r})
from bundle.environment import unpack as layer_writer

share = layer_writer.run_tasks

def share_and_wait(count, work, processes, **settings):
    def work_and_wait(number):
        work(number)
        while number >= {written} and not os.path.exists({gate!r}):
            time.sleep(0.01)

    share(count, work_and_wait, processes, **settings)

layer_writer.run_tasks = share_and_wait
from bundle.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def gated(program: Path, folder: Path, gate: Path, written: int = 1) -> Path:
    """Return a ``node.pyz`` that stops in the middle of unpacking until a file exists."""
    path = folder / "gated.py"
    path.write_text(_PROGRAM.format(program=str(program), gate=str(gate), written=written))
    return path
