"""Rows about what is staged already: imports, calls to shared paths, and how fast a job begins."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import building, ours, peers, unpacking
from .errors import BenchError
from .place import remove
from .rounds import Step, Value, interleave
from .session import Session
from .tools import REPO

RANKS = 2
BANNER = "[RANK "
_PATH = re.compile(r'"((?:[^"\\]|\\.)*)"')
_STARTED = re.compile(r"= (\d+)$")


def imports(session: Session) -> None:
    """The same imports in our environment and in a plain one, both on the disk and read before."""
    env, plain = unpacking.staged(session), _plain(session)
    code = f"import {', '.join(session.prepared.reference.imports)}"
    argvs = {
        "import/ours": (str(env / "bin" / "python"), "-c", code),
        "import/venv": (str(plain / "bin" / "python"), "-c", code),
    }
    for argv in argvs.values():
        session.run(argv)

    def step(name: str) -> Step:
        return Step(name=name, measure=lambda: session.run(argvs[name]).value)

    # Short, and the two are nearly equal: more values cost little.
    interleave([step(name) for name in argvs], 3 * session.rounds, session.samples, session.say)


def calls(session: Session) -> None:
    """Path calls of a rank under anything shared; and of the import from a shared tree."""
    job = _job(session)
    # The node's own: its root, and the directory that the job runs in.
    nodes = session.place.fresh("nodes", memory=True)
    work = session.place.fresh("work", memory=True)
    _staged_job(session, job, nodes)
    trace = session.place.disk / "trace"
    script = "first_line.py"
    traced = ("strace", "-f", "-qq", "-s", "4096", "-e", "trace=%file,%process", "-o", str(trace))
    session.run(
        (*traced, *ours.run(session.stager, job, script)),
        cwd=work,
        more=_variables(session, nodes),
    )
    shared = [session.place.disk, REPO, session.prepared.project]
    with trace.open(errors="replace") as lines:
        made = list(rank_calls(lines))
    if not made:
        raise BenchError("no rank was seen in the trace", where=str(trace))
    touched = [line for line in made if under(line, shared)]
    for line in touched[:5]:
        session.say(f"  under a shared path: {line.strip()[:150]}")
    session.samples.add("calls/ours", Value(value=len(touched)))
    session.samples.add("calls/all", Value(value=len(made)))
    plain = _plain(session)
    code = f"import {', '.join(session.prepared.reference.imports)}"
    session.run((*traced, str(plain / "bin" / "python"), "-c", code))
    with trace.open(errors="replace") as lines:
        count = sum(under(line, [plain]) for line in lines)
    session.samples.add("calls/tree", Value(value=count))
    for path in (trace, nodes, work):
        remove(path)


def start(session: Session) -> None:
    """From the command to the first line of a program whose ranks have met."""
    job = _job(session)
    nodes = session.place.fresh("nodes")
    _staged_job(session, job, nodes)
    plain = _plain(session)
    project = session.prepared.project
    script = "first_line.py"

    def ours_once() -> Value:
        return _first(session, ours.run(session.stager, job, script), _variables(session, nodes))

    def bare_once() -> Value:
        argv = peers.torchrun(plain, project / script, RANKS, free_port())
        return _first(session, argv, {"OMP_NUM_THREADS": "1"})

    def help_once() -> Value:
        return session.run((session.stager, "--help")).value

    ours_once(), bare_once(), help_once()
    steps = [
        Step(name="start/ours", measure=ours_once),
        Step(name="start/torchrun", measure=bare_once),
        Step(name="start/help", measure=help_once),
    ]
    interleave(steps, session.rounds, session.samples, session.say)


def rank_calls(lines: Iterable[str]) -> Iterator[str]:
    """The calls of the processes that become ranks, and of those that they start, from a trace.

    Args:
        lines: as ``strace -f`` writes them: a process, then its call.
    """
    ranks: set[str] = set()
    for line in lines:
        process, _, call = line.partition(" ")
        call = call.strip()
        launcher = "distributed.run" in call or "torchrun" in call
        if call.startswith("execve(") and "run_wrapper.py" in call and not launcher:
            ranks.add(process)
        elif process in ranks:
            yield call
            if call.startswith(("clone", "fork", "vfork", "<... clone", "<... vfork")):
                child = _STARTED.search(call)
                ranks |= {child[1]} if child else set()


def under(call: str, places: Iterable[Path]) -> bool:
    """Return whether a call names a path that is one of these or below one."""
    return any(_within(path, place) for path in _PATH.findall(call) for place in places)


def _within(path: str, place: Path) -> bool:
    return path == str(place) or path.startswith(f"{place}/")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _first(session: Session, argv: tuple[str, ...], more: dict[str, str]) -> Value:
    ran = session.run(argv, cwd=session.prepared.project, until=BANNER, more=more)
    return Value(value=ran.first if ran.first is not None else ran.seconds, cpu=ran.cpu)


def _job(session: Session) -> ours.Job:
    building.ensure(session)
    return ours.Job(
        allocation="local",
        nodes=1,
        ranks=RANKS,
        bundle=session.made.bundles["first"],
        logs=session.place.fresh("logs"),
    )


def _variables(session: Session, nodes: Path) -> dict[str, str]:
    return {"STAGER_NODE_ROOT": str(nodes), "OFFLINE_ROOT": str(session.made.root)}


def _staged_job(session: Session, job: ours.Job, nodes: Path) -> None:
    argv = ours.verify(session.stager, job)
    session.run(argv, cwd=session.prepared.project, more=_variables(session, nodes))


def _plain(session: Session) -> Path:
    """A plain virtual environment with the same packages, compiled; made once."""
    folder = session.place.disk / "plain"
    if not folder.exists():
        session.say("making the plain virtual environment, unmeasured")
        session.run(peers.venv(session.node_python, folder))
        python = folder / "bin" / "python"
        cache = session.place.fresh("uv-cache")
        uv = session.tools.program("uv")
        where = ("--python", python)
        session.run(peers.uv_install(uv, str(python), session.wanted, where, cache))
    return folder
