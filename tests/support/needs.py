"""Skipping a test that lacks something, with the reason and the remedy."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from tests.support.requirements import REQUIREMENTS, reason


def needs(*names: str) -> None:
    """Skip the test unless these requirements are met; in CI, where they must be, fail instead."""
    for name in names:
        missing = REQUIREMENTS[name].missing()
        if missing:
            lacks(name, missing)


def lacks(name: str, detail: str) -> NoReturn:
    """Skip the test, which has found by itself that something is missing."""
    said = reason(name, " ".join(detail.split()))
    if os.environ.get("CI") == "true" and not REQUIREMENTS[name].optional:
        pytest.fail(f"{said}; in CI this test must run")
    pytest.skip(said)
