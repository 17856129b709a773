"""The output of a batch job's ranks, read from their logs while somebody waits for the job."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bundle.protocol.enumerations import PhaseName
from bundle.protocol.events import OutputShown, Record

from ..core.errors import StagerError
from ..logs.job_files import of_job
from ..logs.lines import LogReader

LOOK_SECONDS = 2.0
"""Time between two looks: the directory may be large, and on a shared file system."""
_BEFORE = re.compile(r"\S+ (?:staged|reused) -> /|NODE \S+ OK -> ")
"""The driver's lines at the head of a log, which were shown as events."""
_MOST_LINES = 500
"""Lines of one rank that are shown at a time; of a flood, the last."""


class BatchOutput:
    """The logs of a job's ranks, read as they grow."""

    def __init__(self, log_dir: Path, job_id: str, *, all_nodes: bool) -> None:
        self._log_dir, self._job_id, self._all_nodes = log_dir, job_id, all_nodes
        self._readers: dict[Path, LogReader] = {}
        self._looked = 0.0

    def more(self, nodes: Sequence[str], *, ended: bool = False) -> Iterator[Record]:
        """Yield new output, as an interactive job shows it; at the end a partial line, too."""
        if not nodes or (time.monotonic() - self._looked < LOOK_SECONDS and not ended):
            return
        self._looked = time.monotonic()
        try:
            logs = of_job(self._log_dir, self._job_id).logs
        except StagerError:  # a log that cannot be read is named when the job is diagnosed
            return
        for log in logs:
            is_first = log.node == nodes[0]
            if not log.own or not (is_first or self._all_nodes):
                continue
            reader = self._readers.setdefault(log.path, LogReader(log))
            new = (line.text for line in reader.rest(whole=not ended))
            lines = [line for line in new if not _BEFORE.match(line)]
            if lines:
                event = OutputShown(
                    node=log.node,
                    rank=log.rank,
                    lines=tuple(lines[-_MOST_LINES:]),
                    head=is_first,
                    skipped=max(0, len(lines) - _MOST_LINES),
                )
                yield Record(event, job_id=self._job_id, phase=PhaseName.LAUNCH)
