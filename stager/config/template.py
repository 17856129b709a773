"""The commented ``stager.toml`` of a new project, and the settings of a project without one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bundle.protocol.dataclass import dataclass

from ..core import toml
from ..core.errors import ConfigError, StagerError
from .load import FILE_NAME, Config, find, load, parse
from .table import load_default_sources

GUESSES = ("requirements.in", "requirements.txt", "uv.lock", "pyproject.toml")


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


def _choose_requirements(folder: Path, source: Path | None) -> list[str]:
    place = source or Path()
    if source is not None and (folder / source).is_file():
        return [str(source)]
    found = next((name for name in GUESSES if (folder / place / name).is_file()), "")
    if not found and source is not None:
        raise ConfigError(
            f"{source} is no file, and has none of {', '.join(GUESSES)} in it",
            hint="name another file or folder with --from; without --from an empty list is written",
        )
    return [str(place / found)] if found else []


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
