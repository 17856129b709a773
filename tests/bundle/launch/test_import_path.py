"""What programs other than ranks can import besides the packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from bundle.launch.exec_command import sources, trainer


def test_a_src_layout_has_its_packages_in_src(tmp_path: Path) -> None:
    assert sources(str(tmp_path)) == []
    (tmp_path / "src").mkdir()
    assert sources(str(tmp_path)) == [str(tmp_path / "src")]
    (tmp_path / "src" / "__init__.py").touch()  # a package that is called so
    assert sources(str(tmp_path)) == []


@pytest.mark.parametrize("name", ["trainer", "trainer.py"])
def test_the_trainer_hides_no_package(tmp_path: Path, name: str) -> None:
    packages, site = tmp_path / "pkgs", tmp_path / ".stager" / "site"
    packages.mkdir()
    variables = {"STAGER_ENV": str(tmp_path), "STAGER_TRAINER": str(site)}
    assert trainer(variables) == []
    site.mkdir(parents=True)
    assert trainer(variables) == [str(site)]
    (packages / name).mkdir()
    assert trainer(variables) == []
