"""The offline root of a test of the login side."""

from __future__ import annotations

from pathlib import Path

import pytest

from stager.core.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty offline root."""
    return Store(tmp_path / "store")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Where jobs of such a test leave their logs."""
    return tmp_path / "logs"
