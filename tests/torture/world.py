"""What rounds begin with: small wheels, a project, its store, and a node root, made once a worker.

All of it is made at the very path that each round will have, because a store remembers paths; then
it is moved aside, and rounds copy what they need.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from bundle.environment.unpack import Source, unpack
from bundle.node.node_root import make_secure_root
from stager.core.store import Store
from stager.core.values import Wheel
from stager.pack.bundle import Packed
from stager.pack.decompressor import decompressor_lock
from tests.support import building
from tests.support.bundles import BASE_PYTHON, HERE, fetch_decompressor, make_bundle, tree
from tests.support.wheelhouse import make_wheel

_TRAIN = """\
import os, sys
import alpha, beta, gamma
print("alpha", alpha.VERSION, "beta", beta.VERSION, "gamma", gamma.total(), flush=True)
"""
_PROGRAM = "import alpha, beta, gamma; print(alpha.VERSION, beta.VERSION, gamma.total())"
EXEC = ("exec", "--", "python", "-c", _PROGRAM)  # what a sound environment is asked to run
ANSWER = "1.0 1.1 4950\n"  # what it then says
OTHER_ANSWER = "1.1 1.0 4950\n"  # what the environment of the second project says
VERIFY = ("verify", "--allocation", "local")


@dataclass
class World:
    place: Path
    decompressor: Path
    owner: int = field(default_factory=os.getpid)  # the process whose world it is
    runs: bool = False  # whether ranks can be started here without PyTorch
    unit: float = 0.3  # seconds that the shortest command takes here, about
    zstandard: Wheel | None = None  # the decompressor as a build knows it
    small: Packed = field(init=False)  # a bundle of one layer, without a project
    bundle: Packed = field(init=False)  # a bundle of several layers
    other: Packed = field(init=False)  # of the same project with another version of one
    unpacked: dict[str, object] = field(init=False)  # what the environment of :attr:`bundle` holds

    def __post_init__(self) -> None:
        self.template = self.place / "template"
        self.wheels = self.place / "wheels"  # the index
        self.round_folder = self.place / "round"

    def _bring_decompressor(self, store: Store) -> None:
        if self.decompressor.is_file():  # a Python with zstd of its own needs none
            shutil.copy2(self.decompressor, store.wheels)

    def make_wheels(self) -> None:
        chance = random.Random(1)
        modules = {f"gamma/part{n}.py": f"VALUE = {n}\n" for n in range(100)}
        total = "def total():\n    import importlib\n    return sum("
        total += "importlib.import_module(f'gamma.part{n}').VALUE for n in range(100))\n"
        data = {"gamma/data.bin": chance.randbytes(200_000), "gamma/empty.txt": ""}
        for version in ("1.0", "1.1"):
            make_wheel(self.wheels, "alpha", version, requires=["beta"])
            make_wheel(self.wheels, "beta", version)
        make_wheel(self.wheels, "gamma", files={"gamma/__init__.py": total, **modules, **data})
        make_wheel(self.wheels, "delta", files={"delta.py": "X = 1\n", "delta_data": b"d" * 5000})

    def make_project(self, folder: Path, alpha: str = "1.0", beta: str = "1.1") -> None:
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(_TRAIN)
        (folder / "notes").mkdir()
        (folder / "notes" / "read me.txt").write_text("of the project\n")
        (folder / "stager.toml").write_text(
            f'[environment]\nrequirements = ["alpha=={alpha}", "beta=={beta}", "gamma"]\n\n'
            '[project]\ncommand = ["train.py"]\n\n[cluster]\nnodes = 1\n'
        )

    def prepare(self) -> None:
        from .product import stager, succeeded
        from .rounds import Round

        self.make_wheels()
        self.round_folder.mkdir(parents=True)
        first = Round(area="prepare", seed=0, number=0, world=self, folder=self.round_folder)
        self.make_project(first.project)
        self.make_project(first.folder / "project2", alpha="1.1", beta="1.0")
        for name in ("home", "nodes", "tmp"):
            (first.folder / name).mkdir()
        self._bring_decompressor(Store(first.offline))
        succeeded(stager(first, "build", "--no-prove", folder="project2"))
        succeeded(stager(first, "build"))
        succeeded(stager(first, *EXEC))
        succeeded(stager(first, *VERIFY))
        self.runs = stager(first, "run", "--allocation", "local").code == 0
        started = time.monotonic()
        succeeded(stager(first, "inspect", process=True))
        self.unit = time.monotonic() - started
        for name in ("said", "tmp"):
            shutil.rmtree(first.folder / name, ignore_errors=True)
        shutil.copytree(first.folder, self.template, symlinks=True)
        shutil.rmtree(first.folder)

    def prepare_bundles(self) -> None:
        store = Store(self.place / "store")
        self._bring_decompressor(store)
        self.zstandard = fetch_decompressor(store)

        def made_of(*names: str, project: Path | None = None) -> Packed:
            wheels = [self.wheels / f"{name}-py3-none-any.whl" for name in names]
            return make_bundle(store, wheels, decompressor=self.zstandard, project=project)

        self.small = made_of("delta-1.0")
        self.bundle, self.other = (
            made_of(alpha, "beta-1.1", "gamma-1.0", project=self.template / "project")
            for alpha in ("alpha-1.0", "alpha-1.1")
        )
        made = unpack_below(self.place / "sound", self.bundle.path, self.bundle.manifest.id)
        self.unpacked = tree_of(made)


def prepared(place: Path, decompressor: Path) -> World:
    """Return a world that another process has made: what it started ends with it."""
    note = place / "world.pickle"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            world = World(place=place, decompressor=decompressor)
            world.prepare()
            world.prepare_bundles()
            note.write_bytes(pickle.dumps(world))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("what rounds begin with could not be made, as said above")
    world: World = pickle.loads(note.read_bytes())
    return world


def unpack_below(base: Path, bundle: Path, identity: str, processes: int = 1) -> Path:
    """Make the environment of a bundle in a node root in a new directory; return its path."""
    base.mkdir()
    made = unpack(
        str(bundle),
        root=make_secure_root(str(base)),
        expected=identity,
        python=BASE_PYTHON,
        processes=processes,
        source=Source(),
    )
    return Path(made.path)


def tree_of(folder: Path) -> dict[str, object]:
    folders = (path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())
    return {**{path.relative_to(folder).as_posix(): "" for path in folders}, **tree(folder)}


def fetch_zstandard(cache: Path) -> Path:
    """Return the pinned decompressor's wheel; fetched once, by pip from its configured index."""
    lock = decompressor_lock(HERE)
    if lock is None:  # this Python has zstd of its own
        return cache
    path = cache / lock.files[0].filename
    if not path.exists():
        own = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        building.fetch_zstandard(HERE.python, cache, own)
    return path
