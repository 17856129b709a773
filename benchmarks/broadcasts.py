"""Several ``sbcast`` at a time against one: the time until a bundle is on the nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from bundle.driver.transports.slurm_text import choose_fanout

from .place import settle
from .rounds import Step, Value, interleave
from .session import Session

AT_A_TIME = (1, 2, 4)
"""How many are started together; each has as much of the bundle as the others."""
# Runs inside the allocation: all begin at once, and the last one's end counts.
_PROGRAM = """
import subprocess, sys, time
width, *parts = sys.argv[1:]
argv = ["sbcast", "--force", "--compress=none", "-F" + width]
started = time.monotonic()
running = [subprocess.Popen([*argv, p, f"/tmp/bench-part{n}"]) for n, p in enumerate(parts)]
codes = [one.wait() for one in running]
print("SECONDS", time.monotonic() - started)
sys.exit(max(codes))
"""


def measure(session: Session, slurm: Mapping[str, str], nodes: int) -> None:
    """Send the bundle to so many nodes whole and in pieces, in turn.

    Args:
        session: what is measured.
        slurm: what points Slurm's commands at the cluster.
        nodes: how many are sent it.
    """
    bundle = session.made.bundles["first"]
    steps = []
    for count in AT_A_TIME:
        parts = split(bundle, session.place.fresh(f"parts-{count}"), count)
        once = partial(_send, session, dict(slurm), nodes, parts)
        name = f"slurm/{nodes}/sbcast/{count}"
        steps.append(Step(name=name, prepare=settle, measure=once))
    interleave(steps, session.rounds, session.samples, session.say, label="sbcast, round")


def split(file: Path, folder: Path, count: int) -> list[Path]:
    """Cut a file into pieces of the same size, in order."""
    size = -(-file.stat().st_size // count)
    parts = []
    with file.open("rb") as source:
        for number in range(count):
            part = folder / f"part{number}"
            with part.open("wb") as target:
                left = min(size, os.fstat(source.fileno()).st_size - number * size)
                while left:
                    left -= os.sendfile(target.fileno(), source.fileno(), None, left)
            parts.append(part)
    return parts


def _send(session: Session, slurm: dict[str, str], nodes: int, parts: list[Path]) -> Value:
    width = str(choose_fanout(nodes, (0, 0)))
    program = (session.node_python, "-I", "-S", "-c", _PROGRAM, width, *map(str, parts))
    ran = session.run(("salloc", "--quiet", "--nodes", str(nodes), *program), more=slurm)
    (line,) = [line for line in ran.out.splitlines() if line.startswith("SECONDS ")]
    return Value(value=float(line.split()[1]))
