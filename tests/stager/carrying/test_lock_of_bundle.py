"""The lock of a bundle is one that names each of its wheels."""

from __future__ import annotations

from pathlib import Path

import pytest

from stager.building.build import Built
from stager.core.errors import BundleError
from stager.inventory.provenance import lock_of
from stager.pack.bundle_file import ChosenBundle
from tests.support.building import Project


@pytest.fixture
def built(project: Project) -> Built:
    """A bundle; its lock is the project's."""
    return project.build()


def test_the_first_that_names_every_wheel(project: Project, built: Built, tmp_path: Path) -> None:
    lock = project.root / "pylock.toml"
    chosen = ChosenBundle(path=built.packed.path, id=built.packed.manifest.id)
    damaged = tmp_path / "pylock.damaged.toml"
    damaged.write_text("no lock")
    partial = tmp_path / "pylock.partial.toml"
    head, _, _ = lock.read_text().partition("[[packages]]")
    partial.write_text(head)
    locks = (tmp_path / "absent", damaged, partial, lock)
    assert lock_of(chosen, locks) == lock
    with pytest.raises(BundleError, match="is not here") as caught:
        lock_of(chosen, locks[:-1])
    assert len(caught.value.context) == 3
