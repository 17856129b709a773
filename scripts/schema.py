#!/usr/bin/env python3
"""Writes ``docs/stager.schema.json``, the JSON Schema of ``stager.toml``, from the settings.

Usage: python scripts/schema.py

A test keeps the file in step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from stager.config.checks import get_schema  # noqa: E402
from stager.config.job_settings import SettingRow, list_rows, make_key  # noqa: E402
from stager.config.load import SECTIONS  # noqa: E402

FILE = HERE.parent / "docs" / "stager.schema.json"


def schema() -> dict[str, Any]:
    """Return the schema."""
    tables: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        properties = {make_key(name): _of(row) for name, row in list_rows(kind).items()}
        tables[section] = {
            "type": "object",
            "additionalProperties": False,
            "properties": properties,
        }
    tables["environment"]["required"] = ["requirements"]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "stager.toml",
        "description": "Settings of a project; docs/settings.md explains them.",
        "type": "object",
        "additionalProperties": False,
        "properties": tables,
    }


def _of(row: SettingRow) -> dict[str, Any]:
    """Return the schema of one key."""
    words = row.allowed[:1].upper() + row.allowed[1:] + "."
    described: dict[str, Any] = {
        "description": words,
        **get_schema(row.make_check(Path("/project"))),
    }
    if row.default not in (None, ()):
        described["default"] = row.default
    return described


def text() -> str:
    """Return the text of the file."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}")
