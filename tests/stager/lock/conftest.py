"""A project, its spec from a few entries of its settings, and the lock of that."""

import os
from dataclasses import fields

import pytest

from stager.config import load
from stager.lock.lock import ResolveOptions, make_lock
from stager.lock.pylock import read_lock
from stager.lock.spec import read_spec

_OPTIONS = {field.name for field in fields(ResolveOptions)}


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def only_index(monkeypatch):
    """Makes this the one index, whatever else pip is configured with."""

    def use(url):
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            monkeypatch.setenv(name, "")
        monkeypatch.setenv("PIP_INDEX_URL", url)

    return use


@pytest.fixture
def ask(root):
    """Read a spec from these entries of ``requirements``; other keys by keyword."""

    def read(*requirements, **more):
        table = {"requirements": list(requirements)}
        table |= {key.replace("_", "-"): value for key, value in more.items()}
        return read_spec(load.parse({"environment": table}, root=root, source=root / "stager.toml"))

    return read


@pytest.fixture
def resolver():
    """The resolver; a test may be parametrized with both."""
    return "uv"


@pytest.fixture
def lock(root, store, ask, resolver):
    """Lock these requirements, and see that the file says the same.

    Keywords are options of a resolution, and other keys of the settings.
    """

    def make(*requirements, reachable=lambda _: False, **more):
        options = {"resolver": resolver}
        options |= {name: more.pop(name) for name in _OPTIONS & more.keys()}
        spec, path = ask(*requirements, **more), root / "pylock.toml"
        made = make_lock(
            spec, path=path, store=store, options=ResolveOptions(**options), reachable=reachable
        )
        assert read_lock(path, spec.target) == made
        assert made.is_current(spec)
        return made

    return make
