"""Python run in Linux namespaces of its own, where a test may mount and unplug what it likes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.needs import needs
from tests.support.processes import run

REPO = Path(__file__).resolve().parents[2]


def entering(flag: str, shell: str) -> list[str]:
    needs("namespaces")
    return ["unshare", flag, "/bin/sh", "-euc", f'{shell}\nexec "$@"', "sh"]


def namespace(flag: str, shell: str, code: str) -> object:
    """What Python prints as JSON once ``shell`` has prepared a namespace (by unshare's flag)."""
    code = f"import json, sys; sys.path.insert(0, {str(REPO)!r})\n{code}"
    done = run([*entering(flag, shell), sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
