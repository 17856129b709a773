"""An output that is kept and not printed."""

from __future__ import annotations

from ..core.errors import in_one_line
from .job_result import Console


class Recorder(Console):
    """An output that is kept and not printed."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self.recorded: list[str] = []

    def data(self, line: str) -> None:
        """Keep a line."""
        self.recorded.append(in_one_line(line))
