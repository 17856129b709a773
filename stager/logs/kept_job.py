"""A job's description, ``job.json``: written by a driver of whatever version."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from bundle.protocol.codec import decode
from bundle.protocol.enumerations import LogMode


@dataclass(frozen=True, kw_only=True)
class KeptLaunch:
    """The way the ranks were started."""

    command: tuple[str, ...] = ()
    """The command of each rank."""
    launcher: str = ""
    """The program that starts the ranks."""
    backend: str = ""
    """The backend of torch.distributed; ``auto`` where the driver chose it."""
    pass_env: tuple[str, ...] = ()
    """Names of secret variables that the ranks got."""


@dataclass(frozen=True, kw_only=True)
class KeptJob:
    """A job as its driver got it; what is not known is empty."""

    name: str = ""
    """The project's name."""
    bundle: str = ""
    """The bundle's file."""
    bundle_id: str = ""
    """Its id."""
    nodes: tuple[str, ...] = ()
    """The nodes."""
    run_dir: str = ""
    """The directory that the job was started in."""
    outputs: tuple[str, ...] = ()
    """Patterns of its results."""
    log_mode: LogMode = LogMode.PRIVATE
    """The readers of its files."""
    launch: KeptLaunch = field(default_factory=KeptLaunch)
    """The way the ranks were started."""


def kept_job(content: bytes) -> KeptJob:
    """Read ``job.json``; what is damaged says nothing."""
    try:
        return decode(KeptJob, json.loads(content.decode("utf-8", "replace")), strict=False)
    except (ValueError, RecursionError):
        return KeptJob()
