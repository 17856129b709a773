"""Requests to a resolver and its answers, the same for every program that resolves."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.pylock import Package, PackageDirectory, PackageVcs
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

from bundle.driver.cuda import MINIMAL, OWN, find_cuda_need, parse_version
from bundle.protocol.dataclass import dataclass
from bundle.regex import compile_lazily

from ..core import toml
from ..core.errors import ResolveError, StagerError
from ..core.values import LockedFile, Target
from .indexes import GitPin, PipSettings, list_names
from .pip import Pip, ResolvedFile
from .spec import Spec

# --- The moment after which uploaded files do not count, as ``--exclude-newer`` takes it ---------

NONE = "none"  # lifts the cutoff that a lock has kept
ALLOWED = "a date (2026-01-31), a time (2026-01-31T12:00:00Z), or none"

_DATE = compile_lazily(r"\d{4}-\d\d-\d\d")


def check_cutoff(text: str) -> str:
    """Return a cutoff as a lock keeps it: a date, a time with its zone, ``none``; or ValueError."""
    if text != NONE:
        to_timestamp(text)
    return text


def to_timestamp(text: str) -> str:
    """Return a date (all of its day, as uv) or RFC 3339 time as a time in UTC; or ValueError."""
    is_date = _DATE.fullmatch(text) is not None
    text = f"{text}T00:00:00Z" if is_date else text
    try:
        moment = datetime.datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
        if moment.tzinfo is None:
            raise ValueError("it has no time zone")
        moment += datetime.timedelta(days=is_date)
        moment = moment.astimezone(datetime.timezone.utc)
    except OverflowError as exc:
        raise ValueError("its year is not one of 1 to 9999 in UTC") from exc
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


_WORD = compile_lazily(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TAGS_SHOWN = 6
VERSIONS_SHOWN = 5

ResolverName = Literal["auto", "uv", "pip-tools"]


@dataclass(frozen=True, kw_only=True)
class ResolveRequest:
    """Requirements to resolve into one exact file for each package."""

    spec: Spec
    requirements: tuple[str, ...]  # none is to be built, and none is uv's to read from its file
    constraints: tuple[str, ...]
    pip: Pip
    pins: tuple[str, ...] = ()  # ``name==version`` of packages from an index
    git: tuple[GitPin, ...] = ()  # commits that are kept where the same branch is asked for
    cutoff: str | None = None  # of the command, else of the lock before
    settings: PipSettings
    torch_backend: str | None = None
    build: BuildSource | None = None  # builds what uv takes from a folder or from git
    packages: Path | None = None

    @property
    def exclude_newer(self) -> str | None:
        """The time in UTC after which uploaded files do not count; None for no limit."""
        return to_timestamp(self.cutoff) if self.cutoff else None

    @property
    def names(self) -> set[NormalizedName]:
        """Return the packages that the user named."""
        of_uv = self.spec.uv_project.requirements if self.spec.uv_project else ()
        return {parse_name(text) for text in self.requirements} | list_names(of_uv)


BuildSource = Callable[[Package, PackageVcs | PackageDirectory, Path], ResolvedFile]
"""Builds the wheel of a package of a lock; the path is where relative ones start from."""


class UnavailablePackage(NamedTuple):
    """A package for which no file was found that fits."""

    requirement: str  # the package with the versions that would do: ``numpy==1.0``
    files: tuple[str, ...] = ()
    parent: str = ""


@dataclass(eq=False)
class NoSolution(Exception):
    """The requirements cannot all be met."""

    reason: str
    blamed: set[NormalizedName]  # the packages, of those the user named, that it involves
    absent: list[UnavailablePackage]
    not_searched: Sequence[str] = ()  # lines about indexes that did not count


def parse_name(requirement: str) -> NormalizedName:
    """Return the package a PEP 508 requirement is for."""
    return canonicalize_name(Requirement(requirement).name)


def find_names(text: str, known: set[NormalizedName]) -> set[NormalizedName]:
    """Return the known package names that occur in a text."""
    words = {canonicalize_name(word.rstrip("._-")) for word in _WORD.findall(text)}
    return words & known


def describe_unavailable(package: UnavailablePackage, target: Target) -> str:
    """Describe why no file fits, and what exists instead."""
    requirement = Requirement(package.requirement)
    shown = package.requirement + (f" (for {package.parent})" if package.parent else "")
    files = _sort_by_version(package)
    if not files:
        return f"{shown}: no index has a package of this name"
    fitting = [v for v in files if requirement.specifier.contains(v, prereleases=True)]
    if not fitting:
        newest = ", ".join(str(version) for version in sorted(files)[-VERSIONS_SHOWN:])
        return f"{shown}: no such version; the newest are {newest}"
    newest_fitting = max(fitting)
    return (
        f"{requirement.name} {newest_fitting}: no wheel for {target.python_tag} on "
        f"{target.platform}; there are {_list_wheel_tags(files[newest_fitting])}"
    )


def _sort_by_version(package: UnavailablePackage) -> dict[Version, list[str]]:
    wanted = parse_name(package.requirement)
    files: dict[Version, list[str]] = {}
    for filename in package.files:
        with contextlib.suppress(ValueError):  # an old installer's file, which nobody installs from
            name, version = ResolvedFile(filename=filename).identity
            if name == wanted:
                files.setdefault(version, []).append(filename)
    return files


def _list_wheel_tags(filenames: Sequence[str]) -> str:
    wheels = [name[:-4] for name in filenames if name.endswith(".whl")]
    tags = sorted({"-".join(stem.split("-")[-3:]) for stem in wheels})
    more = [f"{len(tags) - TAGS_SHOWN} more"] if len(tags) > TAGS_SHOWN else []
    return ", ".join([*tags[:TAGS_SHOWN], *more]) or "no wheels"


# --- The build of PyTorch that ``environment.torch-backend = "auto"`` stands for -----------------

# The lock keeps it: a later one on another machine does not change gigabytes of packages.

AUTO = "auto"
CPU = "cpu"
VARIANTS = ((11, 8), (12, 6), (12, 8), (13, 0))  # with several releases of PyTorch


class KnownDriver(NamedTuple):
    """The oldest NVIDIA driver of some machines."""

    version: str
    where: str  # the machines, in words: ``allocation 4711``


FindDriver = Callable[[], KnownDriver]


def settle_torch_backend(
    spec: Spec, lock: Path, find: FindDriver | None, note: Callable[[str], None] | None
) -> Spec:
    """Return a spec whose PyTorch index is chosen: as asked, as locked, else by the drivers."""
    if spec.torch_backend != AUTO:
        return spec
    if spec.pylock is not None:
        return replace(spec, torch_backend=None)  # there is nothing left to choose
    backend = read_recorded_backend(lock)
    if backend is None:
        driver = KnownDriver(version="", where="this machine") if find is None else find()
        backend = choose_backend(driver.version)
        why = f"the driver of {driver.where} is {driver.version}"
        if not driver.version:
            why = f"no NVIDIA driver on {driver.where}"
        elif backend == CPU:
            why = f"the driver of {driver.where}, {driver.version}, is too old for any CUDA build"
        if note is not None:
            again = f"{lock.name} keeps it; set environment.torch-backend to have another"
            note(f'torch-backend "auto" is {backend}: {why}; {again}')
    return replace(spec, torch_backend=backend)


def read_recorded_backend(lock: Path) -> str | None:
    """Return the choice that a lock keeps; None for none."""
    try:
        backend = toml.get_table(toml.read(lock), "tool", "stager").get("torch-backend")
    except StagerError:
        return None
    return backend if isinstance(backend, str) and backend in (CPU, *map(name, VARIANTS)) else None


def name(version: tuple[int, int]) -> str:
    """Return the name of a CUDA version's index: ``cu128``."""
    return f"cu{version[0]}{version[1]}"


def choose_backend(driver: str) -> str:
    """Return the newest CUDA that a driver runs in full, else its newest major's oldest."""
    here = parse_version(driver)
    runs = [version for version in VARIANTS if parse_version(MINIMAL[version[0]]) <= here]
    if not driver or not runs:
        return CPU
    newest = [version for version in runs if version[0] == runs[-1][0]]
    whole = [version for version in newest if parse_version(OWN[version]) <= here]
    return name(whole[-1] if whole else newest[0])


def refuse_newer_cuda(files: Sequence[ResolvedFile], backend: str | None) -> None:
    """Refuse packages for a newer CUDA than was chosen: releases that its index does not have."""
    chosen = {name(version): version for version in VARIANTS}.get(backend or "")
    identities = (file.identity for file in files)
    need = find_cuda_need((package, str(version)) for package, version in identities)
    if chosen is None or need is None or need.version <= chosen:
        return
    raise ResolveError(
        f'torch-backend "auto" is {backend} for the drivers, but {need.package} is for CUDA '
        f"{need.text}",
        hint=f"PyTorch's index for {backend} has no such release: ask for an older torch, or set "
        "environment.torch-backend if the nodes have newer drivers by now",
    )


# --- Refusals of a resolver's answer that does not match the project's requirements --------------

_CUDA_NAME = compile_lazily(r"nvidia-.+|triton|pytorch-triton.*|cuda-.+")
_CUDA_LOCAL = compile_lazily(r"(cu|rocm)\d")


def refuse_cuda(files: Sequence[ResolvedFile]) -> None:
    """Refuse CUDA packages, several GB that a CPU build of PyTorch does not need."""
    packages = [
        f"{name} {version}"
        for name, version in sorted(file.identity for file in files)
        if _CUDA_NAME.fullmatch(name) or _CUDA_LOCAL.match(version.local or "")
    ]
    if packages:
        raise ResolveError(
            f'torch-backend is "cpu", but the lock pulls {len(packages)} CUDA packages',
            hint="leave them out of the requirements, pin a CPU build that you have "
            "(torch==VERSION+cpu), or set environment.torch-backend to what the nodes have",
            context=packages,
        )


def refuse_other_build(
    files: Sequence[ResolvedFile], backend: str | None, silent: str | None
) -> None:
    """Refuse another build of PyTorch, chosen because the index of the right one did not answer."""
    torch = dict(file.identity for file in files).get(canonicalize_name("torch"))
    if silent and backend != "cpu" and torch is not None and torch.local != backend:
        raise ResolveError(
            f'torch-backend is "{backend}", but only torch {torch} is available, which is a '
            "different build",
            hint=f"give an index or a --find-links folder with torch {torch.public}+{backend}",
        )


def refuse_other_files(files: Sequence[LockedFile], spec: Spec, built: Collection[str]) -> None:
    """Refuse files with other hashes, or without required ones unless built of checked sources."""
    others = [
        f"{file.filename}: its sha256 is {file.sha256}, which is not among the hashes given"
        for file in files
        if not _is_allowed(file, spec)
    ]
    if others:
        raise ResolveError(
            "the hashes in the requirement files do not allow these files",
            hint="an index offers a different file of that version: name the index that the "
            "hashes come from with --index-url in the requirement file, or regenerate the hashes",
            context=others,
        )
    bare = [file for file in files if file.name not in spec.hashes and file.filename not in built]
    if spec.require_hashes and bare:
        raise ResolveError(
            f"{spec.require_hashes} requires a hash of every file, also of those that others need",
            hint="write all packages with hashes, as `uv pip compile --generate-hashes` does",
            context=[f"{f.name}=={f.version} has no hash in the requirements" for f in bare],
        )


def _is_allowed(file: LockedFile, spec: Spec) -> bool:
    """Apply the hashes; unless they are required, pass the build that torch-backend asks for."""
    if file.sha256 in spec.hashes.get(file.name, (file.sha256,)):
        return True
    backend = None if spec.require_hashes else spec.torch_backend
    return backend is not None and file.version.local == backend
