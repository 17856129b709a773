"""Directories nested more deeply than most tools can walk; pytest's own cleaning among them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Nested = Callable[[Path, int], Path]


@pytest.fixture
def nested() -> Iterator[Nested]:
    """Makes a folder with so many in one another and a file in the last; all go at the end."""
    made: list[Path] = []

    def make(folder: Path, depth: int) -> Path:
        made.append(folder)
        nest(folder, depth, "d")
        return folder

    yield make
    subprocess.run(["rm", "-rf", "--", *map(str, made)], check=True)


def nest(folder: Path, depth: int, name: str = "deeper") -> None:
    """Make directories in one another, deeper than Python recurses, and than a path reaches."""
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=handle)
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=handle))
    os.close(handle)
