"""The command line: each command parses, makes one call, and renders."""

from __future__ import annotations

from . import (  # noqa: F401 - each registers its commands
    building,
    cleaning,
    jobs,
    looking,
    planning,
    reporting,
    scripting,
    supporting,
)
from .program import app, main

__all__ = ["app", "main"]
