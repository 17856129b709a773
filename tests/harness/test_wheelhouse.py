"""The fixtures themselves: what they make is always the same, and nothing else is seen.

That their wheels are correct, and the others damaged as they say, the tests of layers show.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.wheelhouse import standard_set


def test_nothing_outside_the_folder_is_seen(index_env: dict[str, str]) -> None:
    argv = [sys.executable, "-m", "pip", "download", "packaging", "--no-deps", "--dest", os.devnull]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "No matching distribution found for packaging" in done.stderr


def test_the_bytes_depend_on_the_arguments_alone(tmp_path: Path) -> None:
    one, two = standard_set(tmp_path / "1"), standard_set(tmp_path / "2")
    assert [p.name for p in one] == [p.name for p in two]
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
