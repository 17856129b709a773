"""The commented ``stager.toml`` of a new project, and the settings of a project without one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bundle.protocol.dataclass import dataclass

from ..core import toml
from ..core.errors import ConfigError, StagerError
from . import foreign_files
from .load import FILE_NAME, Config, find, load, parse
from .table import load_default_sources

GUESSES = ("requirements.in", "requirements.txt", "uv.lock", "pyproject.toml")
_READ = ("*.in", "*.txt", *GUESSES[2:], "pylock.toml", "pylock.*.toml", "*.whl", "*.tar.gz")
"""Names of files that ``environment.requirements`` may name."""


@dataclass(frozen=True, kw_only=True)
class InitResult:
    """The result of ``stager init``."""

    path: Path
    requirements: tuple[str, ...]


def write_settings(folder: Path, source: Path | None) -> InitResult:
    """Write ``stager.toml`` in a folder, for a requirements file or a usual one in a folder."""
    path = folder / FILE_NAME
    requirements = _choose_requirements(folder, source)
    text = fill_template(requirements)
    try:
        with path.open("x", encoding="utf-8") as handle:
            handle.write(text)
    except FileExistsError as exc:
        raise ConfigError(f"{path} exists already", hint="edit it, or move it away") from exc
    except OSError as exc:
        if exc.filename is None:  # it was made here, and the disk is full: leave no half of it
            path.unlink(missing_ok=True)
        raise StagerError(
            f"{path} cannot be written: {exc.strerror or exc}", hint="check the permissions there"
        ) from exc
    return InitResult(path=path, requirements=tuple(requirements))


def fill_template(requirements: Sequence[str]) -> str:
    """Return the commented ``stager.toml`` that ``stager init`` writes."""
    text = Path(__file__).with_name("template.toml").read_text(encoding="utf-8")
    line = toml.dumps({"requirements": list(requirements)}).rstrip("\n")
    return text.replace("requirements = []", line, 1)


def find_unnamed_requirements(folder: Path) -> str:
    """Return the requirements file that a project without requirements may mean; empty if none."""
    return next((name for name in GUESSES if (folder / name).is_file()), "")


def _choose_requirements(folder: Path, source: Path | None) -> list[str]:
    """Return the value of ``environment.requirements``; empty if there is no file to name."""
    if source is not None and not (folder / source).is_dir():
        return [_require_readable(folder, source)]
    place, wanted = source or Path(), ", ".join(GUESSES)
    where = "here" if source is None else f"in {source}"
    if found := find_unnamed_requirements(folder / place):
        return [str(place / found)]
    names = sorted(path.name for path in (folder / place).iterdir() if path.is_file())
    for other in filter(foreign_files.is_export_needed, names):
        raise ConfigError(
            f"stager cannot use {other} {where}, and there is no {wanted} {where}",
            hint=f"{foreign_files.make_remedy(other)}; `stager init` then finds it by itself",
        )
    if source is not None:
        raise ConfigError(
            f"there is no requirements file {where}: none of {wanted}",
            hint="name another file or folder with --from; without --from an empty list is written",
        )
    return []


def _require_readable(folder: Path, source: Path) -> str:
    if not (folder / source).is_file():
        there = [name for name in GUESSES if (folder / name).is_file()]
        known = f"; here: {', '.join(there)}" if there else ""
        hint = f"name a requirements file with --from{known}"
        raise ConfigError(f"there is no file {source}", hint=hint)
    if not any(source.match(pattern) for pattern in _READ):
        hint = foreign_files.make_remedy(source.name)
        raise ConfigError(f"{source} is not a requirement file", hint=hint)
    return str(source)


def load_or_default(start: Path) -> Config:
    """Return the settings of a project; of a folder without one, the defaults."""
    return make_default_config(start) if find(start) is None else load(start)


def make_default_config(folder: Path) -> Config:
    """Return the settings of a folder without a ``stager.toml``, to use a bundle named by path."""
    return parse(
        {"environment": {"requirements": []}},  # the only key that must be present
        root=folder,
        source=folder / FILE_NAME,
        defaults=load_default_sources(os.environ),
        env=os.environ,
    )
