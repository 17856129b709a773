"""Rows about the relay: one file to many nodes over slow links, ours beside ``sbcast``.

A time is that of the transfer alone, until the last node has the file. Ours is what the event
``sent`` of a whole ``stager verify`` says, so the nodes unpack what has come while the rest is on
its way, and share this machine's CPUs for it. ``sbcast`` by hand has its defaults and nothing else
to do. The wire is computed: the file's bytes over one link.
"""

from __future__ import annotations

import json
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

from stager.pack.members import copy_to

from . import ours
from .cluster import Cluster, running
from .errors import BenchError
from .place import GIB, Place, available_memory, read_once, settle
from .process import Command, run
from .reference import Prepared, Reference
from .rounds import Step, Value, interleave
from .rows import RELAY_NODES
from .session import Session
from .synthetic import Shape, make_wheels
from .tools import Tools
from .unpacking import result_of, staging_seconds

LINK = 200
"""Megabits that a link takes in a second, in each direction."""
SIZE, LARGE_SIZE = 40_000_000, 300_000_000
"""Bytes of a bundle, about: on slow links, and on links without a limit."""
LARGE_NODES = 3
WAYS = ("relay", "sbcast", "our-sbcast")
"""The relay, ``sbcast`` by hand, and the program with ``--transfer sbcast``."""
_OVERHEAD = 6_650_000
"""Bytes of a bundle without a project: mostly the decompressor."""
_SBCAST = """
import subprocess, sys, time
started = time.monotonic()
subprocess.run(["sbcast", "--force", "--compress=none", *sys.argv[1:]], check=True)
print("SECONDS", time.monotonic() - started)
"""
_SETTINGS = """\
[environment]
requirements = ["./synthetic000-1.0-py3-none-any.whl"]
imports = ["synthetic000"]
torch-backend = "none"
"""


def prepare(place: Place, tools: Tools) -> Prepared:
    """Make the project for slow links.

    Raises:
        BenchError: it cannot be built.
    """
    started = time.monotonic()
    bundle = build(place.fresh("relay"), SIZE, tools)
    name = f"the relay: {bundle.stat().st_size / 1e6:.1f} MB, links held to {LINK} Mbit/s"
    project = bundle.parents[2]
    return Prepared(
        reference=Reference(name=name, folder=project, imports=(), changed=("", "")),
        project=project,
        wheels=project / "offline" / "wheels",
        locks=project,
        seconds=time.monotonic() - started,
    )


def build(project: Path, size: int, tools: Tools) -> Path:
    """Make a project of random bytes, which do not shrink, and return its bundle of about a size.

    Raises:
        BenchError: it cannot be built.
    """
    make_wheels(Shape(packages=1, files=2, size=1000), project)
    (project / "stager.toml").write_text(_SETTINGS, encoding="utf-8")
    noise = random.Random(size)  # noqa: S311 - the same bytes each time
    with (project / "noise.bin").open("wb") as file:
        for start in range(0, size - _OVERHEAD, 1 << 20):
            file.write(noise.randbytes(min(1 << 20, size - _OVERHEAD - start)))
    env = {**os.environ, "OFFLINE_ROOT": str(project / "offline")}
    argv = ours.build(tools.program("stager"), offline=False)
    run(Command(argv=ours.lock(tools.program("stager")), cwd=project, env=env))
    built = json.loads(run(Command(argv=argv, cwd=project, env=env)).out)
    bundle = Path(built["bundle"])
    return copy_to(bundle, bundle)  # in one file, as sbcast needs it


def measure(session: Session) -> None:
    """Send the bundle to growing numbers of nodes, each way in turn; then the large one."""
    slow = [nodes for nodes in RELAY_NODES if _ways(session, f"relay/{nodes}")]
    large = [LARGE_NODES] if _ways(session, "relay/large") else []
    with running(max(slow + large), session.say) as cluster:
        if slow:
            cluster.limit(f"{LINK}mbit")
            (bundle,) = session.prepared.project.glob("offline/bundles/*.tar")
            seconds = bundle.stat().st_size * 8 / (LINK * 1e6)
            session.samples.add("relay/wire", Value(value=seconds))
            transfers = _Transfers(session, cluster, bundle)
        for nodes in slow:
            transfers.measure(nodes, f"relay/{nodes}")
        if large:
            cluster.limit("none")
            bundle = build(session.place.fresh("relay-large"), LARGE_SIZE, session.tools)
            _Transfers(session, cluster, bundle).measure(LARGE_NODES, "relay/large")


def _ways(session: Session, at: str) -> list[str]:
    """The ways whose values the rows need."""
    return [way for way in WAYS if f"{at}/{way}" in session.names]


class _Transfers:
    """The transfers of one bundle."""

    def __init__(self, session: Session, cluster: Cluster, bundle: Path) -> None:
        self.session = session
        self.cluster = cluster
        self.bundle = bundle

    def measure(self, nodes: int, at: str) -> None:
        """Send it to so many nodes, each way once a round; nothing where memory is too small.

        Args:
            nodes: how many.
            at: the beginning of the values' names.
        """
        needed = nodes * (2 * self.bundle.stat().st_size + (1 << 25))  # as sent, and unpacked
        if needed > available_memory() - GIB:
            self.session.say(f"{nodes} nodes are left out: their tmpfs would not fit into memory")
            return
        read_once([self.bundle])
        steps = [
            Step(
                name=f"{at}/{way}",
                prepare=self._empty,
                measure=partial(self._by_hand, nodes)
                if way == "sbcast"
                else partial(self._ours, nodes, at, way),
            )
            for way in _ways(self.session, at)
        ]
        session = self.session
        interleave(steps, session.rounds, session.samples, session.say, label=f"{at}, round")

    def _empty(self) -> None:
        self.cluster.clean()
        settle()

    def _by_hand(self, nodes: int) -> Value:
        """``sbcast`` as its page has it."""
        program = (self.session.node_python, "-I", "-S", "-c", _SBCAST)
        sending = (*program, str(self.bundle), "/tmp/bench-relay")  # noqa: S108 - on the nodes
        argv = ("salloc", "--quiet", "--nodes", str(nodes), *sending)
        ran = self.session.run(argv, more=self.cluster.env)
        (line,) = [line for line in ran.out.splitlines() if line.startswith("SECONDS ")]
        return Value(value=float(line.split()[1]))

    def _ours(self, nodes: int, at: str, way: str) -> Value:
        """A whole ``stager verify`` with the relay, or with ``sbcast``."""
        job = ours.Job(
            allocation="slurm",
            nodes=nodes,
            ranks=1,
            bundle=self.bundle,
            logs=self.session.place.fresh("logs"),
            transfer="relay" if way == "relay" else "sbcast",
        )
        root = {"OFFLINE_ROOT": str(self.bundle.parents[1])}
        argv = ours.verify(self.session.stager, job)
        cwd = self.bundle.parents[2]
        self.session.run(argv, cwd=cwd, more={**root, **self.cluster.env})
        staged = staging_seconds(result_of(job.logs))
        self.session.samples.add(f"{at}/{way}/staged", Value(value=staged))
        return Value(value=sent_seconds(job.logs, relayed=way == "relay"))


def sent_seconds(logs: Path, *, relayed: bool) -> float:
    """Return the seconds of a job's only transfer, from the log directory that it had for itself.

    Raises:
        BenchError: it went another way, or not all nodes got the file at once.
    """
    events: list[dict[str, Any]] = []
    for file in logs.glob("events.*.jsonl"):
        events += map(json.loads, file.read_text(encoding="utf-8").splitlines())
    sent = [event for event in events if event["event"] == "sent"]
    if [bool(event.get("relayed")) for event in sent] != [relayed]:
        notes = [str(event.get("text")) for event in events if event["event"] == "note"]
        raise BenchError(
            f"not all nodes got the file by {'the relay' if relayed else 'sbcast'} at once",
            where=str(logs),
            why="\n    ".join([f"transfers: {len(sent)}", *notes]),
        )
    return float(sent[0]["seconds"])
