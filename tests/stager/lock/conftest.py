"""A project, and its spec from a few entries of its settings."""

import pytest

from stager.config import load
from stager.lock.spec import read_spec


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def ask(root):
    """Read a spec from these entries of ``requirements``; other keys by keyword."""

    def read(*requirements, **more):
        table = {"requirements": list(requirements)}
        table |= {key.replace("_", "-"): value for key, value in more.items()}
        return read_spec(load.parse({"environment": table}, root=root, source=root / "stager.toml"))

    return read
