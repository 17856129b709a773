"""The JSON Schema of ``stager.toml``: in step with the settings, and no narrower than they are."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest

from stager.config.load import parse
from stager.core import toml
from stager.core.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]
FILE = REPO / "docs" / "stager.schema.json"
EXAMPLES = sorted(REPO.glob("examples/**/stager.toml"))


@pytest.fixture(scope="module")
def valid() -> Callable[[dict[str, Any]], bool]:
    check = fastjsonschema.compile(json.loads(FILE.read_text()))

    def validate(document: dict[str, Any]) -> bool:
        try:
            check(json.loads(json.dumps(document, default=str)))
        except fastjsonschema.JsonSchemaException:
            return False
        return True

    return validate


def test_the_file_follows_the_settings() -> None:
    spec = importlib.util.spec_from_file_location("schema", REPO / "scripts" / "schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert FILE.read_text() == module.text(), "run scripts/schema.py"


def test_documents_of_ours_are_valid(valid: Callable[[dict[str, Any]], bool]) -> None:
    page = (REPO / "docs" / "settings.md").read_text()
    block = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert block is not None
    assert valid(toml.loads(block[1], Path("settings.md")))
    assert EXAMPLES
    for example in EXAMPLES:
        assert valid(toml.read(example)), example


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("environment", "python", "3"),
        ("environment", "requirments", []),
        ("project", "path", True),
        ("cluster", "nodes", 0),
        ("cluster", "nodes", "3-"),
        ("cluster", "mem", "lots"),
        ("cluster", "stage", "maybe"),
        ("cluster", "container-mounts", ["/scratch"]),
        ("launch", "nproc-per-node", "all"),
        ("launch", "pass-env", ["A=b"]),
        ("launch", "max-restarts", -1),
    ],
)
def test_what_the_settings_refuse_is_not_valid(
    valid: Callable[[dict[str, Any]], bool], table: str, key: str, value: object
) -> None:
    document: dict[str, Any] = {"environment": {"requirements": []}}
    assert valid(document)
    document.setdefault(table, {})[key] = value
    assert not valid(document)
    with pytest.raises(ConfigError):
        parse(document, root=Path("/p"), source=Path("/p/stager.toml"))
