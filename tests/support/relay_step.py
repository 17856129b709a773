"""A step whose agents take part in a relay as tests want, without a node: a program for srun."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from bundle.driver.transports.driver_channel import DriverChannel
from bundle.driver.transports.phase_run import PhaseAnswers, PhaseRun
from bundle.driver.transports.timeouts import Watch
from bundle.driver.transports.transport import Event, Requests

WELL = "well"
"""An agent that does all ..."""
FAILING = "failing"
"""... that reports that the file did not come ..."""
MUTE = "mute"
"""... that does not even listen ..."""
LATE = "late"
"""... that listens when the others have begun ..."""
FALLS_SILENT = "falls-silent"
"""... that listens, and says nothing more ..."""
KILLED = "killed"
"""... that listens, and is killed when it is asked ..."""
SLOW = "slow"
"""... that has the file after five questions ..."""
GIVES_UP = "gives-up "
"""... that reports that the file did not come once another file is there, whose path follows ..."""
REPORTING = "reporting"
"""... that is well, and reports that it unpacks ever since it listens."""
_REPO = Path(__file__).resolve().parents[2]
_SRUN = """\
import json, os, sys, threading, time
from bundle.channel.frames import FrameWriter

kinds = json.loads(sys.argv[1])
writers = {node: FrameWriter(f"{node}:0") for node in kinds}
writing = threading.Lock()

def say(nodes, event, **values):  # in one piece: nobody sees that one was later than another
    with writing:
        for node in nodes:
            message = json.dumps({"v": 1, "event": event, "node": node, **values})
            sys.stdout.buffer.write(writers[node].frames(message.encode()))
        sys.stdout.buffer.flush()

def ready(*wanted):
    nodes = [node for node, kind in kinds.items() if kind in wanted]
    say(nodes, "ready", address="127.0.0.1", port=9)

def report(nodes):
    while True:
        say(nodes, "unpacking")
        time.sleep(0.1)

def give_up():
    for node, kind in kinds.items():
        mark, _, path = kind.partition(" ")
        if mark == "gives-up":
            while not os.path.exists(path):
                time.sleep(0.02)
            say([node], "relayed", failure="no other node can be reached")

gives_up = [kind for kind in kinds.values() if kind.startswith("gives-up ")]
ready("well", "failing", "falls-silent", "killed", "slow", "reporting", *gives_up)
reporting = [node for node, kind in kinds.items() if kind == "reporting"]
threading.Thread(target=report, args=(reporting,), daemon=True).start()
threading.Thread(target=give_up, daemon=True).start()
questions = 0
for line in map(str.strip, sys.stdin):
    if line.startswith("relay"):
        ready("late")
        for node, kind in kinds.items():
            if kind in ("well", "reporting"):
                say([node], "relayed", seconds=1.0)
            if kind == "failing":
                say([node], "relayed", failure="no other node can be reached")
    if line == "report":
        questions += 1
        for node, kind in kinds.items():
            if kind == "killed" and questions == 1:
                print(f"srun: error: {node}: task 0: Killed", file=sys.stderr, flush=True)
            if kind == "slow" and questions < 5:
                say([node], "relaying")
            if kind == "slow" and questions == 5:
                say([node], "relayed", seconds=9.0)
"""


@contextlib.contextmanager
def relay_run(kinds: Mapping[str, str], events: list[Event] | None = None) -> Iterator[PhaseRun]:
    """Begin the phase in which agents unpack what comes.

    Args:
        kinds: what the agent of each node does.
        events: gets what the driver would show.
    """
    take = (events if events is not None else []).append
    nodes = cast("Requests", dict.fromkeys(kinds))
    argv = [sys.executable, "-c", _SRUN, json.dumps(dict(kinds))]
    env = {**os.environ, "PYTHONPATH": str(_REPO)}
    with DriverChannel(argv, env, b"") as step:
        watch = Watch("unpack", nodes, take)
        with contextlib.closing(watch):
            yield PhaseRun(step, PhaseAnswers(nodes, 1, watch.take, "unpack"), watch)
