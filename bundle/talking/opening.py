"""What a step of Slurm's is sent first: the node program, and the requests, as short as can be.

Slurm sends a step's standard input to each of its tasks, one by one.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

DRIVERS = frozenset(
    f"bundle/{name}"
    for name in (
        *("drive", "state", "logs", "local", "steps", "slurm", "transport", "silence"),
        *("checking/findings", "checking/survey", "talking/answers", "talking/conversation"),
        *("delivering/excerpt", "delivering/forecast", "delivering/placing", "delivering/plan"),
        *("delivering/sending", "returning/homecoming", "returning/landing", "returning/results"),
        "talking/opening",
    )
)
"""The modules that only a driver uses."""


def packed(program: bytes) -> bytes:
    """Return a node program without the driver's modules, as the bootstrap program takes it."""
    memory = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(program)) as source,
        # Stored, and compressed as a whole: bytecode and source have much in common.
        zipfile.ZipFile(memory, "w", zipfile.ZIP_STORED) as made,
    ):
        for name in source.namelist():
            if name.rpartition(".")[0] not in DRIVERS:
                made.writestr(zipfile.ZipInfo(name), source.read(name))
    return zlib.compress(memory.getvalue())


def shortened(requests: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The requests with what is the same for all nodes written once: there may be thousands."""
    every = list(requests.values())
    common = {
        key: value
        for key, value in every[0].items()
        if key not in ("node", "node_rank")  # an agent knows these
        and all(key in other and other[key] == value for other in every)
    }
    own = {
        node: {
            key: value
            for key, value in request.items()
            if key not in common and key not in ("node", "node_rank")
        }
        for node, request in requests.items()
    }
    return {"common": common, "own": {node: extra for node, extra in own.items() if extra}}
