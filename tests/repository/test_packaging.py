"""What a wheel of this project takes along besides Python."""

from __future__ import annotations

from pathlib import Path

import tomllib

REPO = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_file_of_a_package_is_in_the_wheel() -> None:
    """Without its templates or tables a module imports well, and fails when it is used."""
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]
    taken = {
        path
        for package, globs in patterns.items()
        for pattern in globs
        for path in (REPO / package.replace(".", "/")).glob(pattern)
    }
    assert REPO / "stager" / "report" / "page.html.j2" in taken
    files = (
        path
        for side in ("stager", "bundle", "trainer")
        for path in (REPO / side).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".pyi")
    )
    assert [str(path.relative_to(REPO)) for path in files if path not in taken] == []
