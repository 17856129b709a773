"""Golden files: whole texts that scripts and people rely on, in ``tests/golden``."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare with a golden file. After a wanted change run the test with WRITE_GOLDEN=1."""
    path = GOLDEN / name
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), name
