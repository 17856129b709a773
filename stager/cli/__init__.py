"""The command line: one file for each command, which parses, makes one call, and renders."""

from __future__ import annotations

# Each registers its command, and the help page lists them in this order.
# isort: off
from . import (  # noqa: F401
    init,
    lock,
    build,
    inspect,
    verify,
    run,
    script,
    exec,
    estimate,
    nodes,
    logs,
    diagnose,
    report,
    support,
    clean,
)

# isort: on
from .program import app, main

__all__ = ["app", "main"]
