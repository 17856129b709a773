"""A step whose agents take part in a relay as tests want, without a node: a program for srun."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from bundle.driver.transports import slurm_text
from bundle.driver.transports.driver_channel import DriverChannel
from bundle.driver.transports.liveness import Liveness
from bundle.driver.transports.phase_run import PhaseAnswers, PhaseRun
from bundle.driver.transports.transport import Event, Requests

WELL = "well"  # an agent that does all ...
FAILING = "failing"  # ... that reports that the file did not come ...
MUTE = "mute"  # ... that does not even listen ...
LATE = "late"  # ... that listens when the others have begun ...
FALLS_SILENT = "falls-silent"  # ... that listens, and says nothing more ...
KILLED = "killed"  # ... that listens, and is killed when the relay begins ...
SLOW = "slow "  # ... that sends heartbeats, and has the file once the one that follows is there ...
GIVES_UP = "gives-up "  # ... that reports that the file did not come, then ...
REPORTING = "reporting"  # ... that is well, and sends heartbeats ever since it listens
_REPO = Path(__file__).resolve().parents[2]
_SRUN = """\
import json, os, sys, threading, time
from bundle.channel.frames import FrameWriter, heartbeat

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

def beat():
    while True:
        with writing:
            for node, kind in kinds.items():
                if kind == "reporting" or kind.startswith("slow "):
                    sys.stdout.buffer.write(heartbeat(f"{node}:0"))
            sys.stdout.buffer.flush()
        time.sleep(0.1)

def await_files():
    for node, kind in kinds.items():
        mark, _, path = kind.partition(" ")
        while path and not os.path.exists(path):
            time.sleep(0.02)
        if mark == "gives-up":
            say([node], "relayed", failure="no other node can be reached")
        if mark == "slow":
            say([node], "relayed", seconds=9.0)

with_path = [kind for kind in kinds.values() if " " in kind]
ready("well", "failing", "falls-silent", "killed", "reporting", *with_path)
threading.Thread(target=beat, daemon=True).start()
threading.Thread(target=await_files, daemon=True).start()
for line in map(str.strip, sys.stdin):
    if line.startswith("relay"):
        ready("late")
        for node, kind in kinds.items():
            if kind in ("well", "reporting"):
                say([node], "relayed", seconds=1.0)
            if kind == "failing":
                say([node], "relayed", failure="no other node can be reached")
            if kind == "killed":
                print(f"srun: error: {node}: task 0: Killed", file=sys.stderr, flush=True)
"""


@contextlib.contextmanager
def relay_run(kinds: Mapping[str, str], events: list[Event] | None = None) -> Iterator[PhaseRun]:
    """Begin the phase in which agents unpack what comes."""
    take = (events if events is not None else []).append
    nodes = cast("Requests", dict.fromkeys(kinds))
    argv = [sys.executable, "-c", _SRUN, json.dumps(dict(kinds))]
    env = {**os.environ, "PYTHONPATH": str(_REPO)}
    with DriverChannel(argv, env, b"", slurm_text) as step:
        liveness = Liveness("unpack", nodes, take, step.heartbeats)
        with contextlib.closing(liveness):
            yield PhaseRun(step, PhaseAnswers(nodes, 1, liveness.take, "unpack"), liveness)
