#!/usr/bin/env python3
"""Writes ``docs/stager.schema.json``, the JSON Schema of ``stager.toml``, from the settings.

Usage: python scripts/schema.py

A test keeps the file in step.
"""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from stager.config.checks import schema_of  # noqa: E402
from stager.config.load import parse  # noqa: E402
from stager.config.table import WrittenSetting  # noqa: E402

FILE = HERE.parent / "docs" / "stager.schema.json"
_NAME = "project.name"
"""Its default is the name of the folder."""


def schema() -> dict[str, Any]:
    """Return the schema."""
    folder = Path("/project")
    config = parse(
        {"environment": {"requirements": []}}, root=folder, source=folder / "stager.toml"
    )
    tables: dict[str, Any] = {}
    for setting in config.settings:
        table, _, key = setting.path.partition(".")
        empty = {"type": "object", "additionalProperties": False, "properties": {}}
        tables.setdefault(table, empty)["properties"][key] = _of(setting)
    tables["environment"]["required"] = ["requirements"]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "stager.toml",
        "description": "Settings of a project; docs/settings.md explains them.",
        "type": "object",
        "additionalProperties": False,
        "properties": tables,
    }


def _of(setting: WrittenSetting) -> dict[str, Any]:
    """Return the schema of one key."""
    words = setting.allowed[:1].upper() + setting.allowed[1:] + "."
    described: dict[str, Any] = {"description": words, **schema_of(setting.check)}
    default = setting.default
    if setting.path != _NAME and default not in (None, ()):
        described["default"] = str(default) if isinstance(default, Enum) else default
    return described


def text() -> str:
    """Return the text of the file."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}")
