"""The command line: one file for each command, which parses, makes one call, and renders."""

from __future__ import annotations

# Each registers its command, and the help page lists them in this order.
# isort: off
from . import (  # noqa: F401
    init,
    config,
    lock,
    build,
    sign,
    inspect,
    export,
    import_file,
    mirror,
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
from .help import HelpfulCommand
from .program import app, main

for _registered in app.registered_commands:
    _registered.cls = HelpfulCommand

__all__ = ["app", "main"]
