"""The block in a Python script that says what the script needs (PEP 723)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core import toml
from ..core.errors import ConfigError
from ..core.files import bytes_of

_START = "# /// script"
# The expression of the specification, for blocks of the type "script".
_BLOCK = re.compile(r"(?m)^# /// script\s*?$\n(?P<content>(^#(| .*)$\n?)+?)^# ///\s*?$")


def read(path: Path) -> Mapping[str, Any] | None:
    """Return the block of a script; None if it has none, or if there is no such script.

    Raises:
        ConfigError: the block is not TOML or has no end, or there are two.
    """
    try:
        text = bytes_of(path).decode("utf-8-sig")
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
