"""Planted node roots: other owners, links, pipes, wrong modes, and what others left there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from bundle.node.node_root import make_secure_root
from bundle.protocol.digest import Digest
from tests.support.nesting import nest

from ..product import Done, refused, sound, stager
from ..registry import Area
from ..rounds import HEALED, REFUSED, SAME, Round, require
from ..world import ANSWER, PROGRAM, tree_of

_STRANGER = 54321


def play(round_: Round) -> str:
    """Plant something where the node root is, or will be, and then use it."""
    round_.use("project", "offline", "home")
    bundle = next(iter((round_.offline / "bundles").iterdir()))
    round_.nodes.mkdir()
    outside = round_.folder / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious\n")
    plan = Plan(round_, _identity(bundle), outside)
    kind = round_.rng.choice(sorted(_PLANTS))
    round_.did(f"{kind}: {_PLANTS[kind](plan)}")
    before = tree_of(outside)
    argv: tuple[str, ...] = ("exec", "--bundle", str(bundle), "--", "python", "-c", PROGRAM)
    if round_.rng.random() < 0.2:
        argv = ("verify", "--allocation", "local", "--bundle", str(bundle))
    round_.did(f"stager {argv[0]}")
    done = sound(stager(round_, *argv, seconds=25))
    if plan.base.is_symlink():  # whoever names the place may name it by a link
        own = plan.root.name
        after = {path: what for path, what in tree_of(outside).items() if path.split("/")[0] != own}
    else:
        after = tree_of(outside)
    require(after == before, "nothing is written through a link", after)
    if done.code:
        refused(done)
        require(not plan.must_heal, "it heals, for nobody else is concerned", done)
        return REFUSED
    require(not plan.must_refuse, "a place that others own is refused", done)
    _sound_answer(done, argv)
    _closed(plan.root)
    again = stager(round_, *argv, seconds=25)
    require(again.code == 0, "it works a second time", again)
    return HEALED if plan.must_heal else SAME


def _sound_answer(done: Done, argv: tuple[str, ...]) -> None:
    if argv[0] == "exec":
        require(done.out == ANSWER, "what runs is what the bundle holds", done)
    else:
        require(" OK " in done.out, "verify names the sound node", done)


def _closed(root: Path) -> None:
    """Hold that a node root in use is ours alone."""
    for path in (root, *(root / name for name in ("envs", "incoming", "locks", "jobs"))):
        status = path.lstat()
        ours = (status.st_uid, status.st_mode & 0o777) == (os.geteuid(), 0o700)
        require(ours, "the node root is ours, and closed", f"{path}: {status}")


def _identity(bundle: Path) -> Digest:
    from bundle.format.archive import BundleFile

    with BundleFile(str(bundle)) as opened:
        return opened.manifest.id


class Plan:
    """Where things are planted."""

    def __init__(self, round_: Round, identity: Digest, outside: Path) -> None:
        self.rng: Random = round_.rng
        self.round = round_
        self.identity = identity
        self.outside = outside
        self.base = round_.nodes
        self.root = self.base / f"stager-{os.geteuid()}"
        self.must_refuse = False
        self.must_heal = False

    def made(self) -> Path:
        """Make the node root as it should be."""
        make_secure_root(str(self.base))
        return self.root

    def unpacked(self) -> Path:
        """Lay a sound node root out."""
        self.round.use("nodes")
        return self.root

    def thing(self, path: Path) -> str:
        """Put something that is no directory of ours at a path."""
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
        elif kind == "link out":
            path.symlink_to(self.outside)
        elif kind == "link nowhere":
            path.symlink_to(self.outside / "nothing")
        elif kind == "link in a circle":
            path.symlink_to(path)
        elif kind == "socket":
            os.mknod(path, 0o140600)
        elif kind == "device":
            os.mknod(path, 0o20666, os.makedev(1, 3))
        elif kind == "stranger's directory":
            path.mkdir(mode=0o777)
            os.chown(path, _STRANGER, _STRANGER)
        else:
            path.mkdir()
            (path / "things").mkdir()
            (path / "things" / "x").write_text("x\n")
        return f"a {kind}"


# --- what is planted -----------------------------------------------------------------------------


def _at_root(plan: Plan) -> str:
    what = plan.thing(plan.root)
    plan.must_refuse = what != "a directory with things"
    return what


def _below(plan: Plan) -> str:
    name = plan.rng.choice(("envs", "incoming", "locks", "jobs"))
    what = plan.thing(plan.made() / name)
    plan.must_refuse = what != "a directory with things"
    return f"{what} at {name}"


def _strangers(plan: Plan) -> str:
    """Give a part of a used node root to somebody else."""
    root = plan.unpacked()
    name = plan.rng.choice(("", "envs", "incoming", "locks"))
    os.chown(root / name, _STRANGER, -1)
    plan.must_refuse = True
    return name or "the root"


def _modes(plan: Plan) -> str:
    root = plan.unpacked()
    name = plan.rng.choice(("", "envs", "incoming", "locks", "jobs"))
    mode = plan.rng.choice((0o777, 0o755, 0o000, 0o1777, 0o500, 0o2770))
    (root / name).chmod(mode)
    plan.must_heal = True
    return f"mode {mode:o} of {name or 'the root'}"


def _open_base(plan: Plan) -> str:
    mode = plan.rng.choice((0o777, 0o1777, 0o755))
    plan.base.chmod(mode)
    plan.must_refuse = mode == 0o777
    return f"mode {mode:o} of the place it is made in"


def _no_base(plan: Plan) -> str:
    what = plan.thing(plan.base)
    plan.must_refuse = what not in (
        "a link out", "a directory with things", "a stranger's directory"
    )  # fmt: skip
    return f"{what} where the node root is to be made"


def _env_thing(plan: Plan) -> str:
    """Put something where the environment goes."""
    what = plan.thing(plan.made() / "envs" / plan.identity)
    plan.must_heal = "stranger" not in what
    return what


def _env_empty(plan: Plan) -> str:
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


def _env_link(plan: Plan) -> str:
    """Move a sound environment away, and put a link to it in its place."""
    root = plan.unpacked()
    env = root / "envs" / plan.identity
    shutil.rmtree(plan.outside)
    env.rename(plan.outside)
    env.symlink_to(plan.outside)
    plan.must_heal = True
    return "the environment lies elsewhere"


def _incoming(plan: Plan) -> str:
    """Leave in ``incoming`` what a killed unpack leaves there, or somebody plants."""
    root = plan.made()
    other = plan.rng.choice((plan.identity, "0" * 64, "f" * 64))
    name = plan.rng.choice((f"{other}.abc", other, "x", f"{other}.", ".hidden", f"{other}.12345"))
    what = plan.thing(root / "incoming" / name)
    plan.must_heal = "stranger" not in what
    return f"{what} called {name[:20]}"


def _deep(plan: Plan) -> str:
    """Leave a tree that is deeper than Python's stack."""
    root = plan.made()
    names = ("incoming", f"{plan.identity}.deep"), ("envs", str(plan.identity))
    place = root.joinpath(*plan.rng.choice(names))
    nest(place, 1200)
    plan.must_heal = True
    return f"1,500 directories in one another in {place.parent.name}"


def _locks(plan: Plan) -> str:
    """Put something where a lock goes."""
    root = plan.made()
    name = plan.rng.choice((f"{plan.identity}.lock", "root.lock", ".lock"))
    return f"{plan.thing(root / 'locks' / name)} called {name[:20]}"


def _older(plan: Plan) -> str:
    """Damage an environment of another bundle, from which files could be taken by hard link."""
    root = plan.unpacked()
    env = root / "envs" / plan.identity
    older = env.with_name("0" * 64)
    env.rename(older)
    files = [path for path in older.rglob("*") if path.is_file() and not path.is_symlink()]
    path = plan.rng.choice(files)
    how = plan.rng.choice(("removed", "emptied", "changed", "a pipe", "a link", "a stranger's"))
    if how == "removed":
        path.unlink()
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "changed":
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    elif how == "a stranger's":
        os.chown(path, _STRANGER, -1)
    else:
        path.unlink()
        if how == "a pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/etc/passwd")
    plan.must_heal = True
    return f"{path.relative_to(older)} {how} in an older environment"


def _other_names(plan: Plan) -> str:
    """Leave further things in the node root that are none of ours."""
    root = plan.unpacked()
    folder = root / plan.rng.choice(("", "envs", "locks", "jobs"))
    name = plan.rng.choice(("x", "a" * 255, "\n", "-rf", "0" * 64, ".x", "\udcff"))
    what = plan.thing(folder / name)
    plan.must_heal = "stranger" not in what
    return f"{what} called {name[:20]!r} in {folder.name}"


_PLANTS: dict[str, Callable[[Plan], str]] = {
    "at the node root": _at_root,
    "below the node root": _below,
    "another owner": _strangers,
    "modes": _modes,
    "the place of the root": _open_base,
    "no directory": _no_base,
    "at the environment": _env_thing,
    "an empty environment": _env_empty,
    "a link for an environment": _env_link,
    "left in incoming": _incoming,
    "too deep": _deep,
    "at a lock": _locks,
    "an older environment": _older,
    "other things": _other_names,
}

AREA = Area(
    name="roots",
    promise="a node root that others own or could replace is refused; what else lies there is "
    "healed or passed over, and nothing is read or written through it",
    play=play,
    rounds=400,
    sample=8,
    root=True,
)
