"""The fields that the driver fills in alike in requests of every class, by their names."""

from __future__ import annotations

from typing import TypedDict

from ..protocol.job import Job


class CommonPart(TypedDict):
    """The fields of :class:`~bundle.protocol.messages.AgentRequest`."""

    job: Job
    node: str
    node_rank: int
    nodes_here: int


class PlacedPart(CommonPart):
    """The fields of :class:`~bundle.protocol.messages.PlacedRequest`."""

    root: str
    python: str
