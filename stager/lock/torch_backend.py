"""The build of PyTorch that ``environment.torch-backend = "auto"`` stands for.

It is chosen once, by NVIDIA's drivers, and the lock keeps it: a later lock on another machine does
not change gigabytes of packages. Other makers' GPUs are not looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bundle.checks.cuda import MINIMAL, OWN, needed, parsed

from ..core import toml
from ..core.errors import ResolveError, StagerError
from .resolver import ResolvedFile
from .spec import Spec

AUTO = "auto"
CPU = "cpu"
VARIANTS = ((11, 8), (12, 6), (12, 8), (13, 0))
"""The CUDA versions that PyTorch publishes several of its releases for, as ``cu118`` and so on."""


@dataclass(frozen=True, kw_only=True)
class KnownDriver:
    """The oldest NVIDIA driver of some machines."""

    version: str
    """Its version; empty where there is none."""
    where: str
    """The machines, in words: ``allocation 4711``."""


FindDriver = Callable[[], KnownDriver]


def settled(
    spec: Spec, lock: Path, find: FindDriver | None, note: Callable[[str], None] | None
) -> Spec:
    """Return a spec whose PyTorch index is chosen: as asked, as locked, else by the drivers."""
    if spec.torch_backend != AUTO:
        return spec
    if spec.pylock is not None:
        return replace(spec, torch_backend=None)  # there is nothing left to choose
    backend = recorded(lock)
    if backend is None:
        driver = KnownDriver(version="", where="this machine") if find is None else find()
        backend = backend_for(driver.version)
        if note is not None:
            note(_reason(backend, driver, lock))
    return replace(spec, torch_backend=backend)


def recorded(lock: Path) -> str | None:
    """Return the choice that a lock keeps; None for none."""
    try:
        backend = toml.table(toml.read(lock), "tool", "stager").get("torch-backend")
    except StagerError:
        return None
    return backend if isinstance(backend, str) and backend in (CPU, *map(name, VARIANTS)) else None


def name(version: tuple[int, int]) -> str:
    """Return the name of a CUDA version's index: ``cu128``."""
    return f"cu{version[0]}{version[1]}"


def backend_for(driver: str) -> str:
    """Return the index for a driver: of the newest major version of CUDA that it runs.

    Of these, the newest version that needs no newer driver for all that it can do; where each does,
    the oldest, which still runs what is built for the GPUs.
    """
    runs = [version for version in VARIANTS if parsed(MINIMAL[version[0]]) <= parsed(driver)]
    if not driver or not runs:
        return CPU
    newest = [version for version in runs if version[0] == runs[-1][0]]
    whole = [version for version in newest if parsed(OWN[version]) <= parsed(driver)]
    return name(whole[-1] if whole else newest[0])


def refuse_newer_cuda(files: Sequence[ResolvedFile], backend: str | None) -> None:
    """Refuse packages for a newer CUDA than the one that was chosen for the drivers.

    PyTorch's index for an older CUDA may have no build of its newest releases, of which another
    index offers a build for another CUDA.
    """
    chosen = {name(version): version for version in VARIANTS}.get(backend or "")
    identities = (file.identity for file in files)
    need = needed((package, str(version)) for package, version in identities)
    if chosen is None or need is None or need.version <= chosen:
        return
    raise ResolveError(
        f'torch-backend "auto" is {backend} for the drivers, but {need.package} is for CUDA '
        f"{need.text}",
        hint=f"PyTorch's index for {backend} has no such release: ask for an older torch, or set "
        "environment.torch-backend if the nodes have newer drivers by now",
    )


def _reason(backend: str, driver: KnownDriver, lock: Path) -> str:
    if not driver.version:
        why = f"no NVIDIA driver on {driver.where}"
    elif backend == CPU:
        why = f"the driver of {driver.where}, {driver.version}, is too old for any CUDA build"
    else:
        why = f"the driver of {driver.where} is {driver.version}"
    again = f"{lock.name} keeps it; set environment.torch-backend to have another"
    return f'torch-backend "auto" is {backend}: {why}; {again}'
