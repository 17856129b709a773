"""The environment that is measured: its pins, their locks, and every wheel, before any clock runs.

The committed folder is copied; two sets of pins are locked, the second with another version of one
small package; ``stager build`` fetches all wheels of both. Everything measured starts from these.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import ours, process
from .errors import BenchError
from .place import remove
from .tools import Tools

HERE = Path(__file__).resolve().parent
PINS = "requirements.txt"
LOCK = "pylock.toml"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A reference environment."""

    name: str
    """What the table calls it."""
    folder: Path
    """Its project: pins, settings and programs."""
    imports: tuple[str, ...]
    """What the import rows import."""
    changed: tuple[str, str]
    """The small package that changes, and its other version."""
    without: tuple[str, ...] = ()
    """Pins that are left out."""
    more: str = ""
    """A file with further pins, beside the first; empty for none."""
    backend: str = "cpu"
    """The build of PyTorch: a value of ``environment.torch-backend``."""
    reduced: bool = False
    """Whether it is another environment than the targets are meant for."""

    def pins(self) -> list[str]:
        """Its pinned requirements."""
        files = [PINS, self.more] if self.more else [PINS]
        lines = [pin for name in files for pin in (self.folder / name).read_text("utf-8").split()]
        return [line for line in lines if line.partition("==")[0] not in self.without]

    def changed_pins(self) -> list[str]:
        """The same with one package in another version.

        Raises:
            BenchError: it is not among them.
        """
        name, version = self.changed
        pins = self.pins()
        if not any(pin.startswith(f"{name}==") for pin in pins):
            raise BenchError(f"{name} is to be changed and is not pinned", where=str(self.folder))
        return [f"{name}=={version}" if pin.startswith(f"{name}==") else pin for pin in pins]


FULL = Reference(
    name="reference: torch, transformers, datasets, numpy, accelerate",
    folder=HERE / "reference",
    imports=("torch", "transformers", "datasets"),
    changed=("tqdm", "4.67.1"),
)
QUICK = Reference(
    name="REDUCED reference, without torch: targets are not judged",
    folder=HERE / "reference",
    imports=("transformers", "datasets"),
    changed=("tqdm", "4.67.1"),
    without=("torch", "accelerate", "sympy", "mpmath", "networkx", "setuptools"),
    reduced=True,
)
CUDA = Reference(
    name="CUDA: torch with its nvidia packages, transformers, datasets, numpy, accelerate",
    folder=HERE / "reference",
    imports=("torch", "transformers", "datasets"),
    changed=("tqdm", "4.67.1"),
    more="requirements-cuda.txt",
    backend="none",  # PyPI's own build
)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that measured commands start from."""

    reference: Reference
    """Which environment it is."""
    project: Path
    """The project; its pins and its lock are those that were last chosen."""
    wheels: Path
    """Every wheel, of both sets of pins."""
    locks: Path
    """``first`` and ``changed``: a folder each, with pins and lock."""
    seconds: float
    """How long this took."""

    @property
    def requirements(self) -> Path:
        """The first pins."""
        return self.locks / "first" / PINS

    def choose(self, which: str) -> None:
        """Give the project the pins and the lock ``first`` or ``changed``."""
        for name in (PINS, LOCK):
            shutil.copyfile(self.locks / which / name, self.project / name)

    def new_root(self, path: Path) -> Path:
        """An offline root with the wheels, as hard links, and nothing else."""
        remove(path)
        (path / "wheels").mkdir(parents=True)
        for wheel in self.wheels.iterdir():
            os.link(wheel, path / "wheels" / wheel.name)
        return path


def prepare(
    reference: Reference, folder: Path, tools: Tools, say: Callable[[str], None]
) -> Prepared:
    """Make or find everything, with the package indexes of this user's settings.

    Args:
        reference: which environment.
        folder: where it goes; what an earlier run left there is used again.
        tools: has ``stager``.
        say: told what goes on.

    Raises:
        BenchError: something cannot be locked or fetched.
    """
    started = time.monotonic()
    project, locks, store = folder / "project", folder / "locks", folder / "offline"
    remove(project)
    shutil.copytree(reference.folder, project, ignore=shutil.ignore_patterns("__pycache__"))
    _settings(project, reference)
    env = _environment(reference, store, tools)
    sets = {"first": reference.pins(), "changed": reference.changed_pins()}
    for which, pins in sets.items():
        (project / PINS).write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        kept = locks / which
        if _is_kept(kept, pins):
            shutil.copyfile(kept / LOCK, project / LOCK)
        else:
            say(f"locking and fetching {len(pins)} packages ({which})")
        argv = ours.build(tools.program("stager"), offline=False)
        locking = ours.lock(tools.program("stager"))
        if not _is_kept(kept, pins):
            process.run(process.Command(argv=locking, cwd=project, env=env))
            process.run(process.Command(argv=argv, cwd=project, env=env))
            kept.mkdir(parents=True, exist_ok=True)
            for name in (PINS, LOCK):
                shutil.copyfile(project / name, kept / name)
    for name in ("layers", "bundles"):
        remove(store / name)
    return Prepared(
        reference=reference,
        project=project,
        wheels=store / "wheels",
        locks=locks,
        seconds=time.monotonic() - started,
    )


def _environment(reference: Reference, store: Path, tools: Tools) -> dict[str, str]:
    """Return the variables of locking and fetching: this user's, with our programs first."""
    env = {**os.environ, "OFFLINE_ROOT": str(store)}
    env["PATH"] = os.pathsep.join((str(tools.bin), env.get("PATH", os.defpath)))
    if reference.backend != "cpu":
        env["PIP_FIND_LINKS"] = ""  # a CPU build there, as 2.13.0+cpu, would sort above 2.13.0
    return env


def _is_kept(folder: Path, pins: Sequence[str]) -> bool:
    """Return whether there is a lock of just these pins."""
    noted = folder / PINS
    return noted.is_file() and noted.read_text(encoding="utf-8").split() == list(pins)


def _settings(project: Path, reference: Reference) -> None:
    """Ask for the reference's build of PyTorch, and for no more modules than it has."""
    file = project / "stager.toml"
    values = {
        "imports": json.dumps(list(reference.imports)),
        "torch-backend": json.dumps(reference.backend),
    }
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        key = line.partition(" = ")[0]
        lines.append(f"{key} = {values[key]}\n" if key in values else f"{line}\n")
    file.write_text("".join(lines), encoding="utf-8")
