"""Output of ranks that is in no log."""

from __future__ import annotations

from dataclasses import dataclass, field

from .codec import REQUIRED
from .counts import counted
from .json_values import AnyText
from .problem import ProblemCode


@dataclass(frozen=True)
class OutputLoss:
    """Output that is in no log; its size is known in bytes or in frames."""

    node: str = field(default="", metadata=REQUIRED)
    """The node whose ranks wrote it."""
    rank: int | None = field(default=None, metadata=REQUIRED)
    """The rank that wrote it; null where that is unknown, or for the launcher."""
    why: AnyText = field(default="", metadata=REQUIRED)
    """The reason, in words."""
    code: ProblemCode = ProblemCode.OUTPUT_LOST
    """The kind of problem that it is."""
    bytes: int | None = None
    """Bytes that are lost, where they were counted."""
    frames: int | None = None
    """Frames of messages that are lost, where bytes were not counted."""

    def __str__(self) -> str:
        """Return the loss in words: ``rank 3 (120 bytes)``."""
        source = "the node's ranks" if self.rank is None else f"rank {self.rank}"
        return f"{source} ({self._amount()})"

    def _amount(self) -> str:
        if self.bytes is not None:
            return counted(self.bytes, "byte")
        if self.frames is not None:
            return f"{counted(self.frames, 'frame')} of messages"
        return "some frames of messages"
