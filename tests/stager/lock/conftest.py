"""A project, and its spec from a few entries of its settings."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stager.config import load
from stager.lock.spec import Spec, read_spec


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def ask(root: Path) -> Callable[..., Spec]:
    """Read a spec from these entries of ``requirements``; other keys by keyword."""

    def read(*requirements: str, **more: object) -> Spec:
        table = {"requirements": list(requirements)}
        table |= {key.replace("_", "-"): value for key, value in more.items()}
        return read_spec(load.parse({"environment": table}, root=root, source=root / "stager.toml"))

    return read
