"""Rows about building: from wheels to one file, with ours and the peers in turn."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from bundle.format.archive import BundleFile

from . import peers
from .errors import BenchError
from .place import read_once, remove, settle
from .process import Ran, added
from .rounds import Samples, Step, Value, interleave
from .session import Session

_MAKING = ("build/ours", "build/pip", "build/uv", "rebuild/one")
"""The steps whose products later rows need."""


def measure(session: Session, names: Sequence[str] = ()) -> None:
    """All of ``build`` and ``rebuild``, or what is named, with as many rounds as asked for."""
    read_once(sorted(session.prepared.wheels.iterdir()))
    steps = [step for step in _steps(session) if not names or step.name in names]
    interleave(steps, session.rounds, session.samples, session.say)
    _finish(session)


def ensure(session: Session, names: Sequence[str] = _MAKING) -> None:
    """Make what later rows need, where no build was measured; its times are not kept."""
    if session.made.bundles and session.made.archives:
        return
    session.say("building once, unmeasured, for the rows that need it")
    wanted = [step for step in _steps(session) if step.name in names]
    interleave(wanted, 1, Samples(), lambda _line: None)
    _finish(session)


def sizes(session: Session) -> None:
    """The sizes of what the last round made."""
    ensure(session)
    made = session.made
    archives: dict[str, Path] = {
        name: made.archives[name] for name in ("pip", "uv") if name in made.archives
    }
    with BundleFile(str(made.bundles["first"])) as bundle:
        session.samples.add("size/ours", Value(value=bundle.manifest.size))
    for name, path in archives.items():
        session.samples.add(f"size/{name}", Value(value=path.stat().st_size))


def squashfs(session: Session) -> None:
    """The image of the tree that uv made, for the rows about unpacking."""
    ensure(session)
    made = session.made
    if "squashfs" not in made.archives:
        session.say("making the squashfs image, unmeasured")
        image = session.place.disk / "tree.sqsh"
        session.run(peers.squashfs(made.trees["uv"], image))
        made.archives["squashfs"] = image


def _steps(session: Session) -> list[Step]:
    ours = _Ours(session)
    steps = [
        Step(name="build/ours", prepare=ours.empty, measure=ours.cold, tidy=settle),
        Step(name="build/pip", prepare=settle, measure=lambda: _pip(session), tidy=settle),
        Step(name="rebuild/same", measure=ours.again),
        Step(
            name="build/uv",
            prepare=lambda: remove(session.place.disk / "uv-tree"),
            measure=lambda: _uv(session),
            tidy=settle,
        ),
        Step(name="rebuild/one", prepare=ours.change, measure=ours.one, tidy=settle),
    ]
    if session.pex:
        steps.append(Step(name="build/pex", measure=lambda: _pex(session), tidy=settle))
    return steps


class _Ours:
    """Our builds of a round: into an empty root, again, and with one package changed."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.root = session.place.disk / "offline"

    def empty(self) -> None:
        """An offline root with nothing but wheels, and the first pins."""
        self.session.prepared.new_root(self.root)
        self.session.prepared.choose("first")
        self.session.made.root = self.root

    def cold(self) -> Value:
        """The first build."""
        ran = self.session.build(self.root)
        self._note("first", ran)
        return ran.value

    def again(self) -> Value:
        """Nothing has changed."""
        ran = self.session.build(self.root)
        built = json.loads(ran.out)["layers_built"]
        if built:
            raise BenchError(f"{built} layers were made anew though nothing changed")
        return ran.value

    def change(self) -> None:
        """The other pins."""
        self.session.prepared.choose("changed")

    def one(self) -> Value:
        """One package has another version."""
        ran = self.session.build(self.root)
        self._note("changed", ran)
        return ran.value

    def _note(self, which: str, ran: Ran) -> None:
        self.session.made.bundles[which] = Path(json.loads(ran.out)["bundle"])


def _finish(session: Session) -> None:
    """Leave the project as the first build had it, and prove its bundle."""
    root = session.made.root
    if root is None:
        raise BenchError("nothing was built")
    session.prepared.choose("first")
    ran = session.build(root, prove=True)
    proof = json.loads(ran.out)["seconds"].get("proof")
    if proof is not None and "build/ours" in session.samples:
        session.samples.add("build/proof", Value(value=float(proof)))


def _pip(session: Session) -> Value:
    """``pip install --target`` and ``tar czf``."""
    tree = session.place.fresh("pip-tree")
    archive = session.place.disk / "pip.tar.gz"
    install = session.run(peers.pip_install(session.tools.python, session.wanted, tree))
    pack = session.run(peers.tar_gz(tree, archive))
    remove(tree)
    session.made.archives["pip"] = archive
    return added(install, pack)


def _uv(session: Session) -> Value:
    """``uv pip install --target`` with bytecode, and ``tar`` with zstd."""
    tree = session.place.disk / "uv-tree"
    cache = session.place.disk / "uv-cache"
    archive = session.place.disk / "uv.tar.zst"
    install = session.run(
        peers.uv_install(
            session.tools.program("uv"),
            session.node_python,
            session.wanted,
            ("--target", tree),
            cache,
        )
    )
    pack = session.run(peers.tar_zst(tree, archive))
    remove(cache)
    session.made.archives["uv"] = archive
    session.made.trees["uv"] = tree
    return added(install, pack)


def _pex(session: Session) -> Value:
    made = session.place.disk / "reference.pex"
    root = session.place.fresh("pex-root")
    program = session.tools.program("pex")
    argv = peers.pex(program, session.node_python, session.wanted, made)
    ran = session.run(argv, more={"PEX_ROOT": str(root), "TMPDIR": os.fspath(session.place.disk)})
    session.samples.add("size/pex", Value(value=made.stat().st_size))
    for path in (root, made):
        remove(path)
    return ran.value
