"""The block in a Python script that says what the script needs (PEP 723)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..core import toml
from ..core.errors import ConfigError
from ..core.files import read_bytes
from .load import Config, find, parse
from .table import Document, SettingsSource

_START = "# /// script"
# The expression of the specification, for blocks of the type "script".
_BLOCK = re.compile(r"(?m)^# /// script\s*?$\n(?P<content>(^#(| .*)$\n?)+?)^# ///\s*?$")


def read_block(path: Path) -> Document | None:
    """Return the block of a script; None if it has none, or if there is no such script."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    text = text.replace("\r\n", "\n")
    blocks = list(_BLOCK.finditer(text))
    if not blocks:
        if any(line.rstrip() == _START for line in text.splitlines()):
            raise ConfigError(
                f"{path}: the block that begins with {_START!r} has no end",
                hint="each line of it begins with '#', its last one is '# ///'",
            )
        return None
    if len(blocks) > 1:
        raise ConfigError(f"{path}: there are {len(blocks)} blocks of the type 'script'")
    # Lines keep their numbers in messages: what stands before the block becomes empty lines.
    before = "\n" * text[: blocks[0].start("content")].count("\n")
    lines = blocks[0]["content"].splitlines()
    content = "\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines)
    return toml.loads(before + content, path)


_SUFFIX = ".py"


def is_script(config: Config) -> bool:
    """Return whether settings come from a script's block."""
    return config.source.suffix == _SUFFIX


def find_script(command: Sequence[str]) -> Path | None:
    """Return the first script with a block that a command names; None if it names none."""
    for word in command:
        path = Path(word)
        if path.suffix == _SUFFIX and os.path.isfile(path):  # noqa: PTH113 - never raises
            return path if read_block(path) is not None else None
    return None


def refuse_missing_script(command: Sequence[str]) -> None:
    """Refuse a command whose first script is not there."""
    for path in [word for word in command if Path(word).suffix == _SUFFIX][:1]:
        _refuse_missing(path)


def _refuse_missing(path: str) -> None:
    if not os.path.exists(path):  # noqa: PTH110 - never raises
        raise ConfigError(f"there is no file {path}", hint=f"check the path; this is {Path.cwd()}")


def load_script(path: Path) -> Config:
    """Return a script's settings; what is shipped is this folder, or the script's elsewhere."""
    source, here = path.absolute(), Path.cwd()
    _refuse_missing(str(path))
    block, settings = read_block(source), find(here)
    if block is None:
        hint = "`uv add --script` writes one; or write a stager.toml with `stager init`"
        if settings is not None:
            hint = f"leave it out: `stager build` builds this project, as {settings.name} says"
        raise ConfigError(f"{path} has no block that says what it needs (PEP 723)", hint=hint)
    if settings is not None:
        raise ConfigError(
            f"{path} cannot decide what is installed here: {settings} does",
            hint=f'name "{path}" in environment.requirements of {settings.name}',
        )
    root = here if source.is_relative_to(here) else source.parent
    data = toml.get_table(block, "tool", "stager")
    home = os.path.expanduser("~")  # noqa: PTH111 - Path's own raises where there is none
    if str(root) == home and "path" not in toml.get_table(data, "project"):
        raise ConfigError(
            f"{path} lies in the home directory, all of which would be shipped with it",
            hint="move it to a folder of its own, or write `[tool.stager.project]` with "
            '`path = "FOLDER"` into its block',
        )
    requirements = [source.relative_to(root).as_posix()]
    name = make_script_name(source)
    default = {"environment": {"requirements": requirements}, "project": {"name": name}}
    defaults = [SettingsSource(str(source), "project", default)]
    return parse(data, root=root, source=source, defaults=defaults)


def explain_ignored_block(config: Config, command: Sequence[str]) -> Iterator[str]:
    """Yield a note that names the script whose own block does not decide what is installed."""
    try:
        path = None if is_script(config) else find_script(command)
        block = read_block(path) if path else None
    except ConfigError:  # nobody needs what cannot be read
        return
    if path is None or not block or not block.get("dependencies"):
        return
    source = path.absolute()
    named = (os.path.normpath(config.root / one) for one in config.environment.requirements)
    if os.path.normpath(source) in named:
        return
    shown = os.path.relpath(source, config.root)
    yield (
        f"{path}: its own block (PEP 723) does not count, the packages are those of "
        f'{config.source.name}; to install what it asks for, add "{shown}" to '
        "environment.requirements"
    )


def make_script_name(path: Path) -> str:
    """Return the name of a script's bundle, also part of its lock's file name."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-_")[:60] or "script"
