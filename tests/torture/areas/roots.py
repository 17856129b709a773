"""Planted node roots: other owners, links, pipes, wrong modes, and what others left there.

A node root that others own or could replace is refused; what else lies there is healed or passed
over, and nothing is read or written through it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bundle.format.archive import BundleFile
from bundle.node.node_root import make_secure_root
from bundle.protocol.digest import Digest
from tests.support.nesting import nest

from ..checks import files_of
from ..damage import DAMAGES
from ..product import refused, sound, stager
from ..registry import Area
from ..rounds import HEALED, REFUSED, SAME, Round, require
from ..world import ANSWER, EXEC, VERIFY, tree_of

_STRANGER = 54321
_NAMES = ("envs", "incoming", "locks", "jobs")  # what is in a node root


def play(round_: Round) -> str:
    round_.use("project", "offline", "home")
    bundle = next((round_.offline / "bundles").glob("*.pkgs.tar"))
    with BundleFile(str(bundle)) as opened:
        plan = Plan(round_, opened.manifest.id)
    round_.strike(_PLANTS, plan)
    before = tree_of(plan.outside)
    argv: tuple[str, ...] = ("exec", "--bundle", str(bundle), *EXEC[1:])
    if round_.rng.random() < 0.2:
        argv = (*VERIFY, "--bundle", str(bundle))
    round_.did(f"stager {argv[0]}")
    done = sound(stager(round_, *argv, seconds=25))
    after = tree_of(plan.outside)
    if plan.base.is_symlink():  # whoever names the place may name it by a link
        after = {path: what for path, what in after.items() if path.split("/")[0] != plan.root.name}
    require(after == before, "nothing is written through a link", after)
    if done.code:
        refused(done)
        require(not plan.must_heal, "it heals, for nobody else is concerned", done)
        return REFUSED
    require(not plan.must_refuse, "a place that others own is refused", done)
    if argv[0] == "exec":
        require(done.out == ANSWER, "what runs is what the bundle holds", done)
    else:
        require(" OK " in done.out, "verify names the sound node", done)
    for path in (plan.root, *(plan.root / name for name in _NAMES)):
        status = path.lstat()
        ours = (status.st_uid, status.st_mode & 0o777) == (os.geteuid(), 0o700)
        require(ours, "the node root is ours, and closed", f"{path}: {status}")
    again = stager(round_, *argv, seconds=25)
    require(again.code == 0, "it works a second time", again)
    return HEALED if plan.must_heal else SAME


class Plan:
    def __init__(self, round_: Round, identity: Digest) -> None:
        self.rng, self.round, self.identity = round_.rng, round_, identity
        self.outside = round_.folder / "outside"
        self.outside.mkdir()
        (self.outside / "precious").write_text("precious\n")
        self.base = round_.nodes
        self.root = self.base / f"stager-{os.geteuid()}"
        self.must_refuse = self.must_heal = False

    def made(self) -> Path:
        make_secure_root(str(self.base))
        return self.root

    def unpacked(self) -> Path:
        self.round.use("nodes")
        return self.root

    def thing(self, path: Path) -> str:
        kind = self.rng.choice(
            ("file", "pipe", "link out", "link nowhere", "link in a circle", "socket", "device",
             "stranger's directory", "directory with things")
        )  # fmt: skip
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        if kind == "file":
            path.write_bytes(self.rng.choice((b"", b"x" * 100)))
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind.startswith("link"):
            ends = {"out": self.outside, "nowhere": self.outside / "nothing", "in a circle": path}
            path.symlink_to(ends[kind.removeprefix("link ")])
        elif kind == "socket":
            os.mknod(path, 0o140600)
        elif kind == "device":
            os.mknod(path, 0o20666, os.makedev(1, 3))
        elif kind == "stranger's directory":
            path.mkdir(mode=0o777)
            os.chown(path, _STRANGER, _STRANGER)
        else:
            (path / "things").mkdir(parents=True)
            (path / "things" / "x").write_text("x\n")
        return f"a {kind}"


# --- what is planted -----------------------------------------------------------------------------


def _at_the_node_root(plan: Plan) -> str:
    what = plan.thing(plan.root)
    plan.must_refuse = what != "a directory with things"
    return what


def _below_the_node_root(plan: Plan) -> str:
    name = plan.rng.choice(_NAMES)
    what = plan.thing(plan.made() / name)
    plan.must_refuse = what != "a directory with things"
    return f"{what} at {name}"


def _another_owner(plan: Plan) -> str:
    root = plan.unpacked()
    name = plan.rng.choice(("", "envs", "incoming", "locks"))
    os.chown(root / name, _STRANGER, -1)
    plan.must_refuse = True
    return name or "the root"


def _wrong_modes(plan: Plan) -> str:
    root = plan.unpacked()
    name = plan.rng.choice(("", *_NAMES))
    mode = plan.rng.choice((0o777, 0o755, 0o000, 0o1777, 0o500, 0o2770))
    (root / name).chmod(mode)
    plan.must_heal = True
    return f"mode {mode:o} of {name or 'the root'}"


def _the_place_of_the_root(plan: Plan) -> str:
    mode = plan.rng.choice((0o777, 0o1777, 0o755))
    plan.base.chmod(mode)
    plan.must_refuse = mode == 0o777
    return f"mode {mode:o} of the place it is made in"


def _no_directory(plan: Plan) -> str:
    what = plan.thing(plan.base)
    plan.must_refuse = what not in (
        "a link out", "a directory with things", "a stranger's directory"
    )  # fmt: skip
    return f"{what} where the node root is to be made"


def _at_the_environment(plan: Plan) -> str:
    what = plan.thing(plan.made() / "envs" / plan.identity)
    plan.must_heal = "stranger" not in what
    return what


def _an_empty_environment(plan: Plan) -> str:
    """Plant an environment that has the names which an environment has, and nothing in them."""
    env = plan.made() / "envs" / plan.identity
    (env / ".stager").mkdir(parents=True)
    (env / "bin").mkdir()
    (env / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (env / ".stager" / "manifest.json").write_bytes(plan.rng.choice((b"", b"{}", b"[]")))
    if plan.rng.random() < 0.5:
        (env / "bin" / "python").symlink_to("/bin/true")
    plan.must_heal = True
    return "empty names"


def _a_link_for_an_environment(plan: Plan) -> str:
    """Move a sound environment away, and put a link to it in its place."""
    root = plan.unpacked()
    env = root / "envs" / plan.identity
    shutil.rmtree(plan.outside)
    env.rename(plan.outside)
    env.symlink_to(plan.outside)
    plan.must_heal = True
    return "the environment lies elsewhere"


def _left_in_incoming(plan: Plan) -> str:
    """Leave in ``incoming`` what a killed unpack leaves there, or somebody plants."""
    root = plan.made()
    other = plan.rng.choice((plan.identity, "0" * 64, "f" * 64))
    name = plan.rng.choice((f"{other}.abc", other, "x", f"{other}.", ".hidden", f"{other}.12345"))
    what = plan.thing(root / "incoming" / name)
    plan.must_heal = "stranger" not in what
    return f"{what} called {name[:20]}"


def _too_deep(plan: Plan) -> str:
    root = plan.made()
    names = ("incoming", f"{plan.identity}.deep"), ("envs", str(plan.identity))
    place = root.joinpath(*plan.rng.choice(names))
    nest(place, 1200)
    plan.must_heal = True
    return f"1,200 directories in one another in {place.parent.name}"


def _at_a_lock(plan: Plan) -> str:
    root = plan.made()
    name = plan.rng.choice((f"{plan.identity}.lock", "root.lock", ".lock"))
    return f"{plan.thing(root / 'locks' / name)} called {name[:20]}"


def _an_older_environment(plan: Plan) -> str:
    """Damage an environment of another bundle, from which files could be taken by hard link."""
    root = plan.unpacked()
    env = root / "envs" / plan.identity
    older = env.with_name("0" * 64)
    env.rename(older)
    path = plan.rng.choice(files_of(older))
    how = plan.rng.choice([*sorted({*DAMAGES} - {"changed, its time put back"}), "a stranger's"])
    if how in DAMAGES:
        DAMAGES[how](path, plan.rng)
    else:
        os.chown(path, _STRANGER, -1)
    plan.must_heal = True
    return f"{path.relative_to(older)} {how} in an older environment"


def _other_things(plan: Plan) -> str:
    """Leave further things in the node root that are none of ours."""
    root = plan.unpacked()
    folder = root / plan.rng.choice(("", "envs", "locks", "jobs"))
    name = plan.rng.choice(("x", "a" * 255, "\n", "-rf", "0" * 64, ".x", "\udcff"))
    what = plan.thing(folder / name)
    plan.must_heal = "stranger" not in what
    return f"{what} called {name[:20]!r} in {folder.name}"


_PLANTS = (
    _at_the_node_root, _below_the_node_root, _another_owner, _wrong_modes, _the_place_of_the_root,
    _no_directory, _at_the_environment, _an_empty_environment, _a_link_for_an_environment,
    _left_in_incoming, _too_deep, _at_a_lock, _an_older_environment, _other_things,
)  # fmt: skip

AREA = Area(play, rounds=400, sample=2, root=True)
