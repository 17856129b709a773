"""The result of a trace: what a smoke test read of an environment, and what it did not."""

from __future__ import annotations

from dataclasses import dataclass

from ..building.build import BuildResult


@dataclass(frozen=True, kw_only=True)
class TracedPackage:
    """The files of one package that were read."""

    name: str
    """Its name."""
    version: str
    """Its version."""
    files: int
    """Number of its files, bytecode included."""
    bytes: int
    """Their size."""
    files_read: int
    """Number of files that were read; a module counts with its bytecode."""
    bytes_read: int
    """Their whole size, however much of each was read."""
    used: bool
    """False if nothing of it was read but its metadata."""


@dataclass(frozen=True, kw_only=True)
class UnreadFiles:
    """Files of one package of which none was read."""

    package: str
    """The package."""
    path: str
    """Directory, ending in a slash, or file, relative to site-packages; empty for several."""
    files: int
    """Number of files, bytecode included."""
    bytes: int
    """Their size."""
    pattern: str | None
    """The pattern for ``environment.prune`` that leaves them out; null if none is proposed."""
    reason: str
    """Why none is proposed; else empty."""


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """The files of an environment that a smoke test read."""

    command: tuple[str, ...]
    """The smoke test, without secrets."""
    job_id: str
    """Its job."""
    log_dir: str
    """The directory of the job's logs."""
    gpus: int
    """Number of NVIDIA GPUs that the test could see."""
    files: int
    """Number of files of all packages, bytecode included."""
    bytes: int
    """Their size."""
    files_read: int
    """Number of files that were read."""
    bytes_read: int
    """Their whole size."""
    packages: tuple[TracedPackage, ...]
    """Every package, the largest first."""
    unread: tuple[UnreadFiles, ...]
    """What was not read, the largest first."""
    proposed: tuple[str, ...]
    """The patterns that would leave it out, the largest first."""
    proposed_files: int
    """Number of files that they leave out, bytecode included."""
    proposed_bytes: int
    """Their size."""
    prune: tuple[str, ...]
    """``environment.prune`` as it is: the test has passed without what that leaves out."""


@dataclass(frozen=True, kw_only=True)
class TracedBuildResult(BuildResult):
    """The result of ``stager build --trace``."""

    trace: TraceResult
    """What the smoke test read."""
