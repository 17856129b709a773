"""Bundles that several tests look at, made once, and an environment unpacked once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bundle.format.archive import BundleFile
from bundle.format.zstd import Decompress, load_decompressor
from bundle.node.node_root import make_secure_root
from stager.core.store import Store
from stager.core.values import Wheel
from stager.pack.bundle import Packed
from tests.support.bundles import (
    BASE_PYTHON,
    Pair,
    fetch_decompressor,
    make_bundle,
    node_program,
    run_node,
)
from tests.support.wheelhouse import make_wheel, standard_set


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """An offline root with the real decompressor in it."""
    return Store(tmp_path_factory.mktemp("offline"))


@pytest.fixture(scope="session")
def zstd_wheel(store: Store) -> Wheel | None:
    return fetch_decompressor(store)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The standard set, with one version of each package."""
    folder = tmp_path_factory.mktemp("wheels")
    return [path for path in standard_set(folder) if not path.name.startswith("beta-1.")]


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder: a module, a program, an empty file and a link."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "inner").mkdir()
    (folder / "main.py").write_text("print('from the project')\n")
    (folder / "inner" / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (folder / "inner" / "tool.sh").chmod(0o755)
    (folder / "empty").touch()
    (folder / "inner" / "up").symlink_to("../main.py")
    return folder


@pytest.fixture(scope="session")
def standard(store: Store, wheels: list[Path], project: Path, zstd_wheel: Wheel | None) -> Packed:
    """A bundle of all those wheels and the project."""
    return make_bundle(
        store,
        wheels,
        decompressor=zstd_wheel,
        project=project,
        packages=("alpha", "my-odd-name"),
        imports=("alpha", "shared_ns.one"),
    )


@pytest.fixture(scope="session")
def extension(store: Store, native_wheel: Path, zstd_wheel: Wheel | None) -> Packed:
    """A bundle of a compiled extension; a test that uses it needs a compiler."""
    return make_bundle(
        store,
        [native_wheel],
        decompressor=zstd_wheel,
        name="extension",
        packages=("native-ext",),
        imports=("native_ext",),
    )


@pytest.fixture(scope="session")
def single(
    store: Store, tmp_path_factory: pytest.TempPathFactory, zstd_wheel: Wheel | None
) -> Packed:
    """The smallest bundle that can be unpacked: one wheel."""
    wheel = make_wheel(tmp_path_factory.mktemp("single"), "single")
    return make_bundle(store, [wheel], decompressor=zstd_wheel, name="single")


@pytest.fixture(scope="session")
def pair(store: Store, tmp_path_factory: pytest.TempPathFactory, zstd_wheel: Wheel | None) -> Pair:
    """Two bundles that differ in one wheel of three."""
    folder = tmp_path_factory.mktemp("pair")
    files = {f"steady/f{number}.py": f"N = {number}\n" for number in range(40)}
    kept = [make_wheel(folder, "steady", files=files), make_wheel(folder, "other")]
    both = []
    for version in ("1.0", "2.0"):
        wheels = [*kept, make_wheel(folder, "moving", version)]
        both.append(make_bundle(store, wheels, decompressor=zstd_wheel, name="pair"))
    return both[0], both[1]


@pytest.fixture(scope="session")
def bare(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """One wheel and no decompressor: small enough to be damaged at every byte."""
    wheel = make_wheel(tmp_path_factory.mktemp("bare"), "bare")
    return make_bundle(store, [wheel], decompressor=None, name="bare")


@pytest.fixture(scope="session")
def decompress(standard: Packed, tmp_path_factory: pytest.TempPathFactory) -> Decompress:
    """The decompressor that travels in the bundle, loaded from it."""
    with BundleFile(str(standard.path)) as bundle:
        part = bundle.manifest.decompressor
        assert part is not None
        scratch = str(tmp_path_factory.mktemp("zstandard"))
        return load_decompressor(part.name, bundle.read_part(part), scratch)


@pytest.fixture(scope="session")
def program(standard: Packed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The far side's program, ``node.pyz``."""
    return node_program(standard.path, tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="session")
def env(standard: Packed, program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of ``standard``, unpacked by the real program; tests only look at it."""
    base = tmp_path_factory.mktemp("node")
    done = run_node(program, "unpack", standard.path, base, "--python", BASE_PYTHON)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The directory under which node roots are made."""
    folder = tmp_path / "base"
    folder.mkdir()
    return folder


@pytest.fixture
def root(base: Path) -> Path:
    """An empty node root."""
    return Path(make_secure_root(str(base)))


@pytest.fixture(scope="session")
def many(
    store: Store, tmp_path_factory: pytest.TempPathFactory, zstd_wheel: Wheel | None
) -> Packed:
    """A bundle of 3000 tiny files and 24 MB in large ones: it takes a while."""
    rng = random.Random(2)
    files = {f"tiny/d{number % 40}/f{number}.txt": f"{number}" for number in range(3000)}
    large = {f"large/{number}.bin": rng.randbytes(6 << 20) for number in range(4)}
    folder = tmp_path_factory.mktemp("many")
    wheels = [
        make_wheel(folder, "tiny", files=files),
        make_wheel(folder, "large", files=large),
    ]
    return make_bundle(store, wheels, decompressor=zstd_wheel, name="many")
