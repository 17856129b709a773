"""Building from source: what a build is given, what it needs, and what to do where it fails.

PyTorch extensions of the kind of ``flash-attn`` import torch while they are built, compile for an
hour, and need NVIDIA's compiler. All of that is known before the first byte is fetched.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    NormalizedName,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from bundle.protocol.digest import canonical_json

from ..core import toml
from ..core.errors import ResolveError, StagerError
from ..core.values import Digest
from .indexes import Indexes

NEED_NVCC = frozenset(
    canonicalize_name(name)
    for name in (
        *("apex", "causal-conv1d", "cumm", "flash-attn", "flash-attn-3", "grouped-gemm"),
        *("mamba-ssm", "natten", "spconv", "torch-cluster", "torch-scatter", "torch-sparse"),
        *("torch-spline-conv", "transformer-engine-torch", "vllm-flash-attn"),
    )
)
"""Packages whose build from source calls NVIDIA's compiler, and takes long."""
BUILT_AGAINST = frozenset(
    canonicalize_name(name)
    for name in (
        *("torch", "torchvision", "torchaudio", "triton", "jax", "jaxlib", "tensorflow", "numpy"),
        *("scipy", "pyarrow", "cython", "pybind11", "nanobind", "cffi", "mpi4py", "setuptools"),
    )
)
"""Packages that a build without isolation may take headers or code from."""
TAIL_LINES = 12
"""Lines of a failed build that a message shows."""
_CUDA_SETUP = re.compile(rb"CUDAExtension|\bnvcc\b")
_PART = re.compile(r"^\W*\[\d+ lines of output\]\s*$|^\s*\[end of output\]\s*$")
_LARGEST = 1 << 20
"""Bytes that are read of a file of a source."""


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """The settings of builds from source."""

    in_environment: frozenset[NormalizedName] = frozenset()
    """Packages that are built with the environment's packages at hand, without isolation."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that builds see: ``MAX_JOBS``."""
    launcher: tuple[str, ...] = ()
    """The command that runs another one on a node; empty to build on this machine."""

    def key(self, name: NormalizedName, source: Digest, against: Sequence[str]) -> str:
        """Return the name of a built wheel's folder: its source's digest, and how it was built."""
        used = list(against) if name in self.in_environment else []
        if not self.variables and not used:
            return source
        made_with = Digest.of(canonical_json([dict(self.variables), used]))
        return f"{source}.{made_with[:12]}"


def beside(packages: Path) -> dict[str, str]:
    """Return the variables with which a build finds the packages, and the programs, of a folder."""
    programs = os.pathsep.join([str(packages / "bin"), os.environ.get("PATH", os.defpath)])
    return {"PYTHONPATH": str(packages), "PATH": programs}


def nvcc(env: Mapping[str, str]) -> str | None:
    """Return the path of NVIDIA's compiler; None where it is not found."""
    homes = [env[name] for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    folders = [env.get("PATH", os.defpath), *(f"{home}/bin" for home in homes)]
    return shutil.which("nvcc", path=os.pathsep.join([*folders, "/usr/local/cuda/bin"]))


def refuse_without_nvcc(names: Iterable[str], builds: BuildSettings) -> None:
    """Refuse packages that will be built from source and need NVIDIA's compiler, which is missing.

    Raises:
        ResolveError: there is no compiler; all such packages are named.
    """
    needing = sorted(names)
    if not needing or builds.launcher or any("SKIP_CUDA" in name for name in builds.variables):
        return
    if nvcc({**os.environ, **builds.variables}) is not None:
        return
    raise ResolveError(
        f"{', '.join(needing)}: to be built from source, which needs NVIDIA's compiler, and there "
        "is no nvcc on this machine",
        hint="load it (module load cuda, or CUDA_HOME in environment.build-env), build where it is "
        "with `stager build --on-node`, or name a folder or page with a prebuilt wheel in "
        "environment.find-links",
    )


def built_for_sure(
    requested: Iterable[NormalizedName], builds: BuildSettings, indexes: Indexes
) -> list[str]:
    """Return requested packages that need nvcc and can only come from source, before any look-up.

    PyPI has no wheels of them; another index, or a page of links, may.
    """
    places = indexes.find_links
    wheels, sources = _files_in(places)
    pages = [place for place in places if not is_folder(place)]
    remote = bool(pages or indexes.index_url or indexes.extra_index_urls)

    def needs_nvcc_for_sure(name: NormalizedName) -> bool:
        if name in NEED_NVCC and (not remote or name in builds.in_environment):
            return True
        return any(map(_names_cuda, sources.get(name, ())))

    unbuilt = [name for name in dict.fromkeys(requested) if name not in wheels]
    return [name for name in unbuilt if needs_nvcc_for_sure(name)]


def is_folder(place: str) -> bool:
    """Tell whether a place for links is a folder of this machine, and no URL."""
    try:
        return "://" not in place and os.access(place, os.R_OK | os.X_OK) and Path(place).is_dir()
    except (OSError, ValueError):
        return False


def prebuilt(places: Sequence[str]) -> set[NormalizedName]:
    """Return the packages of which a folder among some places has a wheel."""
    return _files_in(places)[0]


def needs_nvcc(name: NormalizedName, path: Path | None) -> bool:
    """Tell whether the build of a package calls NVIDIA's compiler, by its name or its source."""
    return name in NEED_NVCC or (path is not None and _names_cuda(path))


def failed_build(output: str) -> list[str]:
    """Return the last lines that a failed build has written, without what pip puts around them."""
    lines = output.splitlines()
    marks = [number for number, line in enumerate(lines) if _PART.match(line)]
    if len(marks) >= 2:
        lines = lines[marks[0] + 1 : marks[1]]
    kept = [re.sub(r"^\s*(│|\|)?\s{0,6}", "", line).rstrip() for line in lines]
    return [line for line in kept if line][-TAIL_LINES:]


def advice(name: str, output: str) -> str:
    """Return what to do about a failed build."""
    missing = re.search(r"No module named '([\w.]+)'", output)
    if missing:
        return (
            f'its build imports {missing[1]}: write no-build-isolation = ["{name}"] into '
            f"[environment], and {missing[1].partition('.')[0]} among the requirements"
        )
    if re.search(r"nvcc|CUDA_HOME", output):
        return (
            "load NVIDIA's compiler (module load cuda), or build on a node: stager build --on-node"
        )
    if re.search(r"Killed|signal 9|cannot allocate memory|out of memory", output, re.IGNORECASE):
        return 'it ran out of memory: set build-env = { MAX_JOBS = "2" } in [environment]'
    if re.search(r"gcc|g\+\+|cc1plus|Python\.h", output):
        return (
            "a compiler or header is missing or failed: install it, or build on a node: --on-node"
        )
    return (
        "name a folder with a prebuilt wheel in environment.find-links, or ask for another version"
    )


def build_requires(source: Path) -> list[str]:
    """Return what the build of a source tree or sdist asks to be installed first (PEP 518)."""
    try:
        document = toml.loads(_member(source, "pyproject.toml").decode("utf-8", "replace"), source)
    except StagerError:
        document = {}
    listed = toml.table(document, "build-system").get("requires")
    return [str(text) for text in listed] if isinstance(listed, list) else ["setuptools", "wheel"]


def _files_in(
    places: Sequence[str],
) -> tuple[set[NormalizedName], dict[NormalizedName, list[Path]]]:
    wheels: set[NormalizedName] = set()
    sources: dict[NormalizedName, list[Path]] = {}
    for folder in (Path(place) for place in places if is_folder(place)):
        for path in sorted(folder.iterdir()):
            try:
                if path.suffix == ".whl":
                    wheels.add(parse_wheel_filename(path.name)[0])
                elif path.name.endswith((".tar.gz", ".zip")):
                    sources.setdefault(parse_sdist_filename(path.name)[0], []).append(path)
            except (InvalidWheelFilename, InvalidSdistFilename):
                continue
    return wheels, sources


def _names_cuda(path: Path) -> bool:
    return bool(_CUDA_SETUP.search(_member(path, "setup.py")))


def _member(path: Path, name: str) -> bytes:
    try:
        if path.is_dir():
            return (path / name).read_bytes()[:_LARGEST]
        if path.name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                return archive.read(f"{path.name.removesuffix('.zip')}/{name}")[:_LARGEST]
        with tarfile.open(path) as tar:
            member = tar.extractfile(f"{path.name.removesuffix('.tar.gz')}/{name}")
            return b"" if member is None else member.read(_LARGEST)
    except (OSError, KeyError, tarfile.TarError, zipfile.BadZipFile):
        return b""
