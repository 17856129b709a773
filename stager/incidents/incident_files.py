"""The incidents in the offline root: one small file of JSON lines for each job that had any.

A file is named for the end of its job and the job's number, and gets that name by one rename. So
jobs of several users never write to the same file, a job that is read twice is kept once, and the
names alone say which files are old. All who share the root may write there, so what a file holds
is hostile until checked: a line that cannot be true is skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from bundle.protocol.codec import decode, encode

from ..core.errors import StagerError
from ..core.files import opened
from ..core.store import INCIDENTS, Store
from .incident import EndedJob, Incident, incidents_of

DAY = 24 * 3600.0
KEPT_DAYS = 90
"""Days after which an incident is removed."""
MAX_FILES = 1000
"""Jobs whose incidents are kept, the newest of all."""
MAX_BYTES = 1 << 20
"""A larger file is none of ours, and is not read."""
MAX_LINES = 500
"""Incidents of one job that are kept and read."""
_NAME = re.compile(r"(\d{13})-(\d{1,20})\.jsonl")
"""Milliseconds since the epoch, and the job's number."""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""The name of a node: one that goes into Slurm's ``--exclude`` stands for no others."""


def is_node_name(text: str) -> bool:
    """Return whether a text can be the name of one node."""
    return _NODE.fullmatch(text) is not None


def keep(store: Store, job: EndedJob, now: float) -> bool:
    """Keep what the nodes of a job are to blame for, once; return False where that is impossible.

    A root that cannot be written is no failure of the job.
    """
    incidents = incidents_of(job)[:MAX_LINES]
    if not incidents:
        return True
    try:
        path = store.incidents / f"{int(job.ended * 1000):013d}-{job.job_id}.jsonl"
        if not path.exists():
            _publish(store, path, incidents)
        _remove_old(store, now)
    except (StagerError, OSError):
        return False
    return True


def read(store: Store, days: int, now: float) -> tuple[Incident, ...]:
    """Return the incidents of the last days, the newest job first; what is damaged is skipped."""
    since = now - days * DAY
    incidents: list[Incident] = []
    possible = [(path, ended) for path, ended in _files(store) if since <= ended <= now + DAY]
    for path, ended in possible[:MAX_FILES]:  # a clock may be wrong, but not by more than a day
        incidents += _incidents(path, ended)
    return tuple(incidents)


def forget(store: Store, nodes: Collection[str]) -> int:
    """Remove all incidents of some nodes, and return how many there were.

    An empty file stays in the place of one that had no others: its job is not counted again.

    Raises:
        StagerError: the root cannot be written.
    """
    count = 0
    for path, ended in _files(store):
        incidents = _incidents(path, ended)
        others = [incident for incident in incidents if incident.node not in nodes]
        if len(others) < len(incidents):
            _publish(store, path, others)
            count += len(incidents) - len(others)
    return count


def _publish(store: Store, path: Path, incidents: Collection[Incident]) -> None:
    lines = [json.dumps(encode(incident)) + "\n" for incident in incidents]
    with store.publishing(path) as partial:
        partial.write_text("".join(lines), encoding="utf-8")


def _remove_old(store: Store, now: float) -> None:
    """Remove files that are too old, too many or in the future: no user may crowd out others."""
    files = _files(store)
    possible = [path for path, ended in files if now - KEPT_DAYS * DAY <= ended <= now + DAY]
    kept = set(possible[:MAX_FILES])
    for path, _ in files:
        if path not in kept:
            with suppress(OSError):
                path.unlink()


def _files(store: Store) -> list[tuple[Path, float]]:
    """List the files with the times at which their jobs ended, newest first."""
    folder = store.root / INCIDENTS
    try:
        names = sorted((path.name for path in folder.iterdir()), reverse=True)
    except OSError:
        return []
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    return [(folder / match[0], int(match[1]) / 1000) for match in found]


def _incidents(path: Path, ended: float) -> list[Incident]:
    try:
        with opened(path) as handle:
            content = handle.read(MAX_BYTES + 1)
    except OSError:
        return []
    if len(content) > MAX_BYTES:
        return []
    return list(_checked(content.splitlines()[:MAX_LINES], path, ended))


def _checked(lines: Collection[bytes], path: Path, ended: float) -> Iterator[Incident]:
    for line in lines:
        try:
            incident = decode(Incident, json.loads(line), strict=False)
        except (ValueError, RecursionError):
            continue
        named_alike = path.name.endswith(f"-{incident.job_id}.jsonl")
        if named_alike and abs(incident.time - ended) < 1 and is_node_name(incident.node):
            yield incident
