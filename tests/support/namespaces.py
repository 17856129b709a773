"""Python run in Linux namespaces of its own, where a test may mount and unplug what it likes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def not_here(reason: str) -> None:
    """Skip the test; in CI, where everything is there, fail instead."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; in CI this test must run")
    pytest.skip(reason)


def needs_root() -> None:
    """Skip the test unless it may mount and change owners."""
    if os.geteuid() != 0:
        not_here("only root can change owners and mount")


def entering(flag: str, shell: str) -> list[str]:
    """The beginning of a command line that runs in a namespace of its own.

    Args:
        flag: as for :func:`namespace`.
        shell: commands that prepare it; where one fails, nothing else is run.
    """
    needs_root()
    if subprocess.run(["unshare", flag, "true"], capture_output=True, check=False).returncode:
        not_here(f"unshare {flag} is not permitted here")
    return ["unshare", flag, "/bin/sh", "-euc", f'{shell}\nexec "$@"', "sh"]


def namespace(flag: str, shell: str, code: str) -> object:
    """What ``code`` prints as JSON once ``shell`` has prepared the namespace.

    Args:
        flag: ``-m`` for mounts, ``-n`` for a network without any interface up, ``-mn`` for both.
        shell: commands that prepare it; one that fails fails the test.
        code: Python that may import ``bundle``; ``json`` and ``sys`` are imported already.
    """
    code = f"import json, sys; sys.path.insert(0, {str(REPO)!r})\n{code}"
    done = subprocess.run(
        [*entering(flag, shell), sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
