"""The node program as it travels to a step of Slurm's: what agents need of it, compressed.

Slurm sends a step's standard input to each of its tasks, one by one.
"""

from __future__ import annotations

import io
import zipfile
import zlib

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
