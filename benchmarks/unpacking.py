"""Rows about the node's side: unpacking, and staging again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import building, ours, peers
from .errors import BenchError
from .peers import Argv
from .place import read_once, remove, settle
from .rounds import Step, Value, interleave
from .session import Made, Session

NAME = "unpacked"
STAGING = ("plan", "place", "unpack")
"""Phases of a job that together are its staging."""
_PEERS: dict[str, tuple[str, Callable[[Path, Path], Argv]]] = {
    "gz": ("pip", peers.untar_gz),
    "zst": ("uv", peers.untar_zst),
    "squashfs": ("squashfs", peers.unsquashfs),
}
"""Each peer's archive, and how it is unpacked."""


def measure(session: Session, names: Sequence[str] = ()) -> None:
    """Unpack to tmpfs and to the disk, with ours and three others, or what is named."""
    if not names or any("squashfs" in name for name in names):
        building.squashfs(session)
    made = session.made
    bundle = made.bundles["first"]
    read_once([bundle, *made.archives.values()])
    program = session.program(bundle)
    python = session.node_python

    for place, memory in (("tmpfs", True), ("disk", False)):
        parent = session.place.memory if memory else session.place.disk
        target = parent / NAME
        argvs = {"ours": ours.unpack(python, program, bundle, target), **_peers(made, target)}
        steps = [
            Step(
                name=f"unpack/{place}/{who}",
                prepare=_emptied(session, memory),
                measure=_timed(session, argv),
                tidy=_removed(target),
            )
            for who, argv in argvs.items()
            if not names or f"unpack/{place}/{who}" in names
        ]
        interleave(steps, session.rounds, session.samples, session.say)


def _peers(made: Made, target: Path) -> dict[str, Argv]:
    """Return the commands of the peers whose archives were made."""
    return {
        who: argv(made.archives[archive], target)
        for who, (archive, argv) in _PEERS.items()
        if archive in made.archives
    }


def restage(session: Session) -> None:
    """Stage three times on one node: nothing there, all there, all but one package there.

    What a job's driver takes for it: looking, deciding, and making the environment; where it is
    there already, comparing it with its listing, which is a part of the first look at the node.
    """
    building.ensure(session)
    bundles = session.made.bundles
    read_once(list(bundles.values()))
    base = session.place.memory / NAME
    more = {"STAGER_NODE_ROOT": str(base), "OFFLINE_ROOT": str(session.made.root)}

    def stage(which: str) -> Callable[[], Value]:
        def once() -> Value:
            logs = session.place.fresh("logs")
            job = ours.Job(allocation="local", nodes=1, ranks=1, bundle=bundles[which], logs=logs)
            argv = ours.verify(session.stager, job)
            session.run(argv, cwd=session.prepared.project, more=more)
            return Value(value=staging_seconds(result_of(logs)))

        return once

    first = Step(
        name="restage/first", prepare=_emptied(session, memory=True), measure=stage("first")
    )
    same = Step(name="restage/same", measure=stage("first"))
    one = Step(name="restage/one", measure=stage("changed"), tidy=_removed(base))
    interleave([first, same, one], session.rounds, session.samples, session.say)


def result_of(logs: Path) -> dict[str, Any]:
    """The last word of a job's driver, from the log directory that it had for itself.

    Raises:
        BenchError: there is none.
    """
    for file in logs.glob("events.*.jsonl"):
        for line in reversed(file.read_text(encoding="utf-8").splitlines()):
            event = json.loads(line)
            if event["event"] == "result":
                return dict(event)
    raise BenchError("the job left no result", where=str(logs))


def staging_seconds(result: Mapping[str, Any]) -> float:
    """Return a job's seconds for staging: in phases of its own, and for the check before them."""
    seconds = result["seconds"]
    phases = sum(float(seconds.get(phase, 0.0)) for phase in STAGING)
    return phases + float(result.get("check_seconds", 0.0))


def staged(session: Session) -> Path:
    """An environment of ours on the disk, ready for use; unmeasured."""
    building.ensure(session)
    base = session.place.fresh("staged")
    bundle = session.made.bundles["first"]
    program = session.program(bundle)
    done = session.run(ours.unpack(session.node_python, program, bundle, base))
    return Path(done.out.strip().splitlines()[-1])


def _timed(session: Session, argv: Argv) -> Callable[[], Value]:
    """The wall clock of the whole command, the start of its process included, for everyone."""
    return lambda: session.run(argv).value


def _emptied(session: Session, memory: bool) -> Callable[[], None]:
    def prepare() -> None:
        settle()
        session.place.fresh(NAME, memory=memory)

    return prepare


def _removed(path: Path) -> Callable[[], None]:
    return lambda: remove(path)
