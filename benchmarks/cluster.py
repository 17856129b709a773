"""Rows about a real Slurm: from a command on the login side to the first step of a training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bundle.format.archive import BundleFile
from stager.forecast import MeasuredJob

from . import broadcasts, building, forecasts, ours, peers
from .place import GIB, available_memory, read_once, settle
from .process import Command, Ran, run
from .reference import HERE
from .rounds import Step, Value, interleave
from .session import Session
from .tools import REPO
from .unpacking import result_of, staging_seconds

SIZES = (1, 2, 3, 6)
JUDGED = 3
"""The number of nodes that the targets are for; the others are measured once."""
RANKS = 2
PROGRAM = "first_step.py"
FIRST_STEP = "FIRST STEP"
NODE_ROOM = 2.2 * GIB
"""Bytes of memory that a node's own tmpfs takes: an archive and what is unpacked from it."""
_CLEAN = "rm -rf /tmp/stager-* /tmp/handout* /tmp/bench-*; [ -d /tmp ]"
_SCRIPT = str(REPO / "scripts" / "cluster")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster that runs."""

    name: str
    """Ours alone."""
    nodes: int
    """How many nodes it has."""
    env: Mapping[str, str]
    """What points Slurm's commands at it."""

    def clean(self) -> None:
        """Take everything away that an earlier run left on the nodes."""
        step = ("srun", "--quiet", f"--nodes={self.nodes}", "--ntasks-per-node=1", "--chdir=/")
        env = {**os.environ, **self.env}
        run(Command(argv=(*step, "sh", "-c", _CLEAN), cwd=REPO, env=env))

    def limit(self, rate: str) -> None:
        """Hold the traffic of every node and of the login side to a rate, or to none.

        Args:
            rate: as tc(8) writes it; ``none`` lifts the limit.
        """
        _control("limit", rate, name=self.name)


def measure(session: Session) -> None:
    """Cold, warm and with one package changed, beside the handout's way, for each size."""
    building.ensure(session)
    made = session.made
    read_once([*made.bundles.values(), made.archives["pip"]])
    changed = changed_bytes(made.bundles["first"], made.bundles["changed"])
    session.samples.add("slurm/changed", Value(value=changed))
    fitting = [nodes for nodes in SIZES if nodes * NODE_ROOM < available_memory() - GIB]
    for nodes in SIZES:
        if nodes not in fitting:
            session.say(f"{nodes} nodes are left out: their tmpfs would not fit into memory")
    if not fitting:
        return
    project = _packed_project(session)
    seen: dict[int, list[MeasuredJob]] = {}
    with running(max(fitting), session.say) as cluster:
        for nodes in fitting:
            job = _Jobs(session, cluster, nodes, project)
            rounds = session.rounds if nodes == JUDGED else 1
            label = f"{nodes} nodes, round"
            interleave(job.steps(), rounds, session.samples, session.say, label=label)
            seen[nodes] = job.seen
        forecasts.compare(seen, session.samples, session.say)
        cluster.clean()
        broadcasts.measure(session, cluster.env, min(JUDGED, max(fitting)))


class _Jobs:
    """The jobs on one number of nodes."""

    def __init__(self, session: Session, cluster: Cluster, nodes: int, project: Path) -> None:
        self.session = session
        self.cluster = cluster
        self.nodes = nodes
        self.project = project
        self.seen: list[MeasuredJob] = []
        """What the jobs showed that found nothing on the nodes."""

    def steps(self) -> list[Step]:
        """One round: everything of ours on nodes that had nothing, then the handout's."""
        at = f"slurm/{self.nodes}"
        steps = [
            Step(name=f"{at}/step/cold", prepare=self._empty, measure=self._ours("cold", "first")),
            Step(name=f"{at}/step/warm", measure=self._ours("warm", "first")),
            Step(name=f"{at}/step/delta", measure=self._ours("delta", "changed")),
            Step(name=f"{at}/step/handout", prepare=self._empty, measure=self._handout),
        ]
        if self.nodes == JUDGED:
            # After the delta both environments are there.
            steps.insert(3, Step(name=f"{at}/verify/warm", measure=self._verify))
        return steps

    def _empty(self) -> None:
        self.cluster.clean()
        settle()

    def _job(self, which: str) -> ours.Job:
        return ours.Job(
            allocation="slurm",
            nodes=self.nodes,
            ranks=RANKS,
            bundle=self.session.made.bundles[which],
            logs=self.session.place.fresh("logs"),
        )

    def _run(self, argv: tuple[str, ...], until: str, **more: str) -> Ran:
        variables = {"OFFLINE_ROOT": str(self.session.made.root), **self.cluster.env, **more}
        cwd = self.session.prepared.project
        return self.session.run(argv, cwd=cwd, until=until, more=variables)

    def _ours(self, state: str, which: str) -> Callable[[], Value]:
        def once() -> Value:
            job = self._job(which)
            ran = self._run(ours.run(self.session.stager, job, PROGRAM), FIRST_STEP)
            result = result_of(job.logs)
            shown = forecasts.seen(job.logs)
            if state == "cold" and shown is not None:
                self.seen.append(shown)
            at = f"slurm/{self.nodes}"
            seconds = result["seconds"]
            staging = Value(value=staging_seconds(result))
            self.session.samples.add(f"{at}/stage/{state}", staging)
            sent = Value(value=float(result["bytes_broadcast"]))
            self.session.samples.add(f"{at}/bytes/{state}", sent)
            self.session.say(f"    {state}: {json.dumps(seconds)} bytes {sent.value:,.0f}")
            return _first(ran)

        return once

    def _verify(self) -> Value:
        """Measure a verify of staged nodes, without the imports of its probe."""
        ran = self._run(ours.verify(self.session.stager, self._job("first")), "")
        probes = [float(node["seconds"] or 0.0) for node in json.loads(ran.out)["nodes"]]
        self.session.samples.add(f"slurm/{self.nodes}/verify/wall", ran.value)
        return Value(value=ran.seconds - max(probes))

    def _handout(self) -> Value:
        argv = peers.handout(HERE / "reference" / "handout.sh", self.nodes, RANKS)
        ran = self._run(
            argv,
            FIRST_STEP,
            HANDOUT_PYTHON=self.session.node_python,
            HANDOUT_PKGS=str(self.session.made.archives["pip"]),
            HANDOUT_PROJECT=str(self.project),
            HANDOUT_PROGRAM=PROGRAM,
            HANDOUT_IMPORTS=", ".join(self.session.prepared.reference.imports),
        )
        phases = [line.split()[1:] for line in ran.out.splitlines() if line.startswith("PHASE ")]
        told = " ".join(f"{name} until {float(at):.1f}" for name, at in phases)
        self.session.say(f"    handout: {told}")
        return _first(ran)


def changed_bytes(first: Path, changed: Path) -> int:
    """Bytes of the layers that only the second bundle has."""
    with BundleFile(str(first)) as old, BundleFile(str(changed)) as new:
        known = dict(old.manifest.members())
        return sum(size for name, size in new.manifest.members()[2:] if name not in known)


def _first(ran: Ran) -> Value:
    return Value(value=ran.first if ran.first is not None else ran.seconds)


def _packed_project(session: Session) -> Path:
    """The project as the handout's launcher sends it."""
    archive = session.place.disk / "project.tar.gz"
    session.run(peers.tar_gz(session.prepared.project, archive))
    return archive


@contextmanager
def running(nodes: int, say: Callable[[str], None], cpus: int = 4) -> Iterator[Cluster]:
    """A cluster of so many nodes, gone at the end whatever happens."""
    name = f"bench-{os.getpid()}"
    say(f"starting a Slurm of {nodes} nodes on this machine")
    try:
        _control("up", "--nodes", str(nodes), "--cpus", str(cpus), name=name)
        line = _control("env", name=name).strip()
        variable, _, value = line.removeprefix("export ").partition("=")
        yield Cluster(name=name, nodes=nodes, env={variable: value})
    finally:
        _control("down", name=name)


def _control(command: str, *words: str, name: str) -> str:
    """Call ``scripts/cluster``; its output.

    Raises:
        BenchError: it says why there is no cluster.
    """
    argv = (_SCRIPT, command, "--name", name, *words)
    return run(Command(argv=argv, cwd=REPO, env=dict(os.environ))).out
