"""Building in tests: a small project, the command line on it, and looking into what comes out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import zstandard
from packaging.utils import canonicalize_name
from packaging.version import Version

from bundle.format.layer import HEAD_PREFIX, Index, Origin, decode_head, head_summary
from bundle.protocol.digest import Digest
from stager.building.build import BuildOptions, Built, build
from stager.config.load import load, parse
from stager.core.store import ScratchKind, Store, digest_file
from stager.core.values import Target, Wheel
from stager.layers.layer_build import MadeLayers, make_layers
from stager.layers.layer_file import LayerWriter
from stager.layers.source import LayerSource
from stager.layers.tree import Tree, TreeFile
from stager.layers.wheel import add_wheel
from stager.lock.build_source import BuildSettings
from stager.lock.indexes import Indexes
from stager.lock.pylock import Lock
from stager.lock.spec import read_spec
from stager.pack.node_program import find_compiled_program, make_node_program
from stager.wheels import WheelSource
from tests.support.needs import lacks, needs
from tests.support.processes import Done, run
from tests.support.warm_ranks import Rank, WarmRanks

STAGER = [sys.executable, "-m", "stager"]
HOST = Target.from_host()
OTHER = Target(python="3.9" if HOST.python != "3.9" else "3.10", platform=HOST.platform)
SITE = f"lib/python{HOST.python}/site-packages"
ORIGIN = Origin(kind="wheel", name="any", version="1", content=Digest.of(b"any"), options={})


def fetch(
    lock: Lock,
    store: Store,
    *,
    offline: bool = False,
    indexes: Indexes = Indexes(),  # noqa: B008 - it is frozen
    builds: BuildSettings = BuildSettings(),  # noqa: B008
    **more: Any,
) -> tuple[Wheel, ...]:
    table = {"environment": {"requirements": []}}
    settings = parse(table, root=store.root, source=store.root / "stager.toml")
    spec = replace(read_spec(settings), indexes=indexes, builds=builds)
    return WheelSource(spec=spec, store=store, offline=offline, **more).fetch(lock)


def layers_in(
    store: Store, *sources: LayerSource, target: Target = HOST, jobs: int = 1
) -> MadeLayers:
    with store.lock():
        return make_layers(sources, store=store, target=target, jobs=jobs)


@dataclass
class Recorder:
    phases: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def begin(self, phase: str) -> None:
        self.phases.append(phase)

    def step(self, what: str, done: int, total: int) -> None:
        self.steps.append(f"{what} {done}/{total}")

    def note(self, line: str) -> None:
        self.notes.append(line)


@dataclass(frozen=True, kw_only=True)
class Project:
    """A folder with a ``stager.toml``, and the store it is built in."""

    root: Path
    store: Store  # the offline root that the environment names

    def settings(self, *requirements: str, more: str = "") -> Project:
        text = f"[environment]\nrequirements = {json.dumps(list(requirements))}\n{more}\n"
        (self.root / "stager.toml").write_text(text)
        return self

    def locked(self, *wheels: Path, more: str = "") -> Project:
        lines = ['lock-version = "1.0"', 'created-by = "test"']
        for wheel in wheels:
            name, version = wheel.name.split("-")[:2]
            file = f'path = "{wheel}", hashes = {{ sha256 = "{digest_file(wheel)}" }}'
            lines += ["[[packages]]", f'name = "{canonicalize_name(name)}"']
            lines += [f'version = "{version}"', f"wheels = [{{ {file} }}]"]
        (self.root / "pylock.user.toml").write_text("\n".join(lines) + "\n")
        return self.settings("pylock.user.toml", more=more)

    def build(self, recorder: Recorder | None = None, **options: Any) -> Built:
        """Build in this process; without the proof, unless it is asked for."""
        chosen = BuildOptions(**{"prove": False, **options})
        return build(load(self.root), chosen, recorder or Recorder())

    def stager(self, *arguments: str, env: Mapping[str, str] | None = None) -> Done:
        variables = {**os.environ, **(env or {})}
        argv = [*STAGER, *arguments]
        if _read_at_start(variables) != _AT_START:
            return run(argv, cwd=self.root, env=variables)
        with _ONE_AT_A_TIME:
            rank = Rank(env=variables, program="stager")
            (code,), out, err = _warm_commands().start([rank], self.root, arguments).wait()
        return subprocess.CompletedProcess(argv, code, out, err)

    def expect(self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None) -> Done:
        """Run a command that ends with a code."""
        done = self.stager(*arguments, env=env)
        assert done.returncode == code, done.stderr
        return done

    def report(
        self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run a command that ends with a code; the JSON object that is all it prints."""
        done = self.expect(arguments[0], "--json", *arguments[1:], code=code, env=env)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


_ONE_AT_A_TIME = threading.Lock()


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that the interpreter, the C library and libraries read before a command."""
    names = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC", "_STAGER")
    return {name: value for name, value in variables.items() if name.startswith(names)}


_AT_START = _read_at_start(os.environ)


@cache
def _warm_commands() -> WarmRanks:
    return WarmRanks(os.environ, "stager")


@pytest.fixture(scope="session")
def zstandard_wheel(
    tmp_path_factory: pytest.TempPathFactory, pip_settings: Mapping[str, str]
) -> Path:
    """The pinned decompressor for this interpreter, from the index that the caller's pip uses."""
    return fetch_zstandard(HOST.python, tmp_path_factory.mktemp("zstandard"), pip_settings)


def fetch_zstandard(
    python: str, folder: Path, pip_settings: Mapping[str, str], target: Target = HOST
) -> Path:
    """Download the pinned decompressor for a version of Python, on a target's platform."""
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    argv += ["--only-binary", ":all:", "--python-version", python, "zstandard==0.25.0"]
    argv += [word for platform in target.platforms() for word in ("--platform", platform)]
    # The test's own index, if it has one, does not count.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = run(argv, env={**env, **pip_settings})
    if done.returncode:
        lacks("index", done.stderr.strip()[-300:])
    tag = f"-cp{python.replace('.', '')}-"
    return next(path for path in folder.iterdir() if tag in path.name)


@dataclass(frozen=True, kw_only=True)
class Supplies:
    """What all bundles of this machine have in common, to be put into stores before a build."""

    decompressor: Path
    programs: tuple[Path, ...]  # the node program, and the one with bytecode

    def put_into(self, store: Store) -> Store:
        for source in (self.decompressor, *self.programs):
            folder = store.wheels if source == self.decompressor else store.programs
            with store.publish(folder / source.name) as partial:
                partial.write_bytes(source.read_bytes())
        return store


@pytest.fixture(scope="session")
def supplies(zstandard_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Supplies:
    """They are made once for all tests; what makes them has tests of its own."""
    store = Store(tmp_path_factory.mktemp("supplies"))
    program = make_node_program()
    plain = store.programs / f"{Digest.of(program)}.pyz"
    plain.write_bytes(program)
    programs = (plain, find_compiled_program(plain, store))
    return Supplies(decompressor=zstandard_wheel, programs=programs)


@pytest.fixture
def project(tmp_path: Path, index_env: dict[str, str], supplies: Supplies) -> Project:
    """A project that needs ``alpha``; its store has what does not depend on the project."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "train.py").write_text("import alpha\nprint('alpha', alpha.VERSION)\n")
    made = Project(root=root, store=supplies.put_into(Store(Path(os.environ["OFFLINE_ROOT"]))))
    return made.settings("alpha")


def wheel_of(path: Path) -> Wheel:
    """A wheel file as the fetching stage hands it on; its name alone is looked at."""
    name, version = path.name.split("-")[:2]
    known, size = Version(version), path.stat().st_size
    digest = digest_file(path)
    return Wheel(name=canonicalize_name(name), version=known, path=path, sha256=digest, size=size)


def source_of(path: Path) -> LayerSource:
    return LayerSource.from_wheel(wheel_of(path))


def tree_of(folder: Path) -> Tree:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = ((str(path.relative_to(folder)), path) for path in paths)
    files = (TreeFile(path=name, source=path, mode=0o644, size=0) for name, path in names)
    return Tree(files=tuple(files))


def index_of(layer: Path) -> Index:
    data = layer.read_bytes()
    head = data[: head_summary(data[:HEAD_PREFIX]).head_size]
    return decode_head(head, zstandard.ZstdDecompressor().decompress)


def frames_of(layer: Path) -> list[bytes]:
    """Each frame of a layer, decompressed by itself, its digest checked."""
    data, frames = layer.read_bytes(), []
    at = head_summary(data[:HEAD_PREFIX]).head_size
    for frame in index_of(layer).frames:
        packed = data[at : at + frame.size]
        assert Digest.of(packed) == frame.sha256
        frames.append(zstandard.ZstdDecompressor().decompress(packed))
        assert len(frames[-1]) == frame.unpacked_size
        at += frame.size
    assert at == len(data)
    return frames


def contents(layer: Path) -> dict[str, bytes]:
    with tarfile.open(fileobj=BytesIO(plain_tar(layer))) as archive:
        return {
            member.name: (archive.extractfile(member) or BytesIO()).read()
            for member in archive
            if member.isreg()
        }


def plain_tar(layer: Path) -> bytes:
    argv = [program("zstd"), "-dcq", str(layer)]
    return subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout


def listing(archive: bytes | Path) -> list[str]:
    """The lines of the real ``tar -tv``, with numbers for owners and full times."""
    argv = [program("tar"), "--numeric-owner", "--full-time", "--quoting-style=literal", "-tvf-"]
    data = archive.read_bytes() if isinstance(archive, Path) else archive
    env = {**os.environ, "TZ": "UTC", "LC_ALL": "C"}
    done = subprocess.run(argv, input=data, stdout=subprocess.PIPE, env=env, check=True)
    return done.stdout.decode().splitlines()


@cache
def program(name: str) -> str:
    needs(name)
    return str(shutil.which(name))


def digests(folder: Path) -> dict[str, str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): Digest.of(path.read_bytes()) for path in paths}


def left_behind(store: Store, kind: ScratchKind) -> Path:
    """Make a directory under ``tmp/`` as a build leaves it that is killed."""
    with store.scratch(kind) as folder:
        mode = folder.stat().st_mode
    folder.mkdir()
    folder.chmod(mode)
    return folder


def left_in_tmp(store: Store) -> list[Path]:
    return list((store.root / "tmp").rglob("*"))


def layer_of(wheel: Path, *prune: str, target: Target = HOST) -> Path:
    layer = wheel.with_suffix(".layer")
    with LayerWriter(wheel.parent) as writer:
        add_wheel(writer, wheel, target, prune)
        writer.write(layer, ORIGIN)
    return layer


def layers_of(folder: Path, *wheels: Path) -> Path:
    for wheel in wheels:
        for path, data in contents(layer_of(wheel)).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    return folder / SITE


def fake_installation(layers: Sequence[Path], folder: Path) -> Path:
    """Layers unpacked by the real tar into a virtual environment; returns its interpreter."""
    (folder / "bin").mkdir(parents=True)
    argv = [program("tar"), "-xf", "-", "-C", str(folder)]
    for layer in layers:
        subprocess.run(argv, input=plain_tar(layer), check=True)
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    for name in ("python", f"python{HOST.python}"):
        (folder / "bin" / name).symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    return folder / "bin" / "python"
