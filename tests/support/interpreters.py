"""The Python interpreters of other versions that this machine has."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.bundles import HERE
from tests.support.requirements import reason


def other_pythons(minors: range = range(9, 20)) -> list[str]:
    """One interpreter of each other version that this machine has, the oldest first."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # $HOME is the test's own
    versions = Path(os.environ.get("PYENV_ROOT", home / ".pyenv"), "versions")
    found = []
    for minor in minors:
        name = f"python3.{minor}"
        candidates = [str(path) for path in versions.glob(f"3.{minor}.*/bin/{name}")]
        for path in filter(None, [*candidates, shutil.which(name)]):
            done = subprocess.run([path, "-c", ""], capture_output=True, check=False)
            if done.returncode == 0 and f"3.{minor}" != HERE.python:
                found.append(path)
                break
    return found


_NONE = pytest.param("", marks=pytest.mark.skip(reason("each python", "there is only one here")))
OTHERS = other_pythons() or [_NONE]  # parameters for what runs for each of them
