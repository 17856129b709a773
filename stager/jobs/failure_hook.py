"""The command that hears of a failed job: it gets the verdict as JSON on its standard input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import StagerError, json_object
from ..core.processes import inform

SECONDS = 60.0
"""The time that it may take."""


def run_hook(
    argv: Sequence[str], result: object, warn: Callable[[str], None], seconds: float = SECONDS
) -> None:
    """Run a command without a shell, with ``--json``'s result; its failure is only a warning."""
    try:
        inform(argv, json_object(result), timeout=seconds)
    except StagerError as exc:
        hint = f"; {exc.hint}" if exc.hint else ""
        warn(f"the on-failure command failed: {exc.message}{hint}")
