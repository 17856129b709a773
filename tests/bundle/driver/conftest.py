"""What every test of the driver starts from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bundle.driver import state
from bundle.driver.output import Display
from bundle.driver.transports.transport import Transfer


@pytest.fixture(autouse=True)
def _no_line_is_late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for what is printed in threads: it must not appear in the output of the next test."""
    made: list[Display] = []

    def make(job_id: str) -> Display:
        made.append(Display(job_id))
        return made[-1]

    monkeypatch.setattr(state, "Display", make)
    yield
    for display in made:
        assert display.drain(300)


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    """A file for a relay."""
    (tmp_path / "file").write_bytes(bytes(1000))
    return Transfer(str(tmp_path / "file"), "", 1000, "00" * 32)
