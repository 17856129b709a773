"""The commands that start the ranks of nodes: what nodes share is told once."""

from __future__ import annotations

import re
from dataclasses import replace

from ..protocol.reports import Started

_OWN = re.compile(
    r"""
    (?<=^--node-rank=)\d+$
    | (?<=^--local-addr=).+$
    | (?<=^--rdzv-conf=is_host=)[01]$
    | (?<=/jobs/)[^/]+(?=/)  # the job's directory, which has the node's rank
    """,
    re.VERBOSE,
)
"""The parts of a command's words that follow from the node, see :mod:`bundle.launch.commands`."""


class StartedCommands:
    """The commands of nodes that have been told."""

    def __init__(self) -> None:
        self._told: set[tuple[str, ...]] = set()

    def brief(self, event: Started) -> Started:
        """Return the event as it is kept: without a command that was told for another node."""
        shared = tuple(_OWN.sub("", word) for word in event.argv)
        if shared in self._told:
            return replace(event, argv=())
        self._told.add(shared)
        return event
