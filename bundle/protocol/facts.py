"""Facts about a machine and one of its directories, as a node finds and reports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeRootFacts:
    """A directory, and the file system that it is on."""

    path: str
    """The directory."""
    fstype: str
    """Type of the file system."""
    free_bytes: int
    """Bytes that this user may still write there."""
    free_inodes: int | None
    """Files that may still be made there; None for any number."""
    noexec: bool
    """True if no program can be started from there."""
    read_only: bool
    """True if nothing can be written there."""
    shared: bool
    """True if other machines see the same file system."""
    owner: int
    """The user that owns it."""
    mode: str
    """Its mode in octal, ``0700``."""


@dataclass(frozen=True)
class NodeRootProblem:
    """A directory that cannot be examined."""

    path: str
    """The directory."""
    problem: str
    """The reason."""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    """Its kind: ``NVIDIA A100-SXM4-80GB``."""
    memory: int = 0
    """Bytes of its memory; 0 where that is unknown."""
    mig: tuple[str, ...] = ()
    """The profiles of its MIG instances: ``3g.20gb``."""


@dataclass(frozen=True)
class GpuFacts:
    """The NVIDIA driver of a machine, and its GPUs."""

    driver: str = ""
    """Version of the driver: ``570.124.06``; empty where that is unknown."""
    library: str = ""
    """Version of the driver's library that LD_LIBRARY_PATH puts first; empty for the driver's."""
    gpus: tuple[Gpu, ...] = ()
    """The GPUs that can be seen."""
    fault: str = ""
    """What ``nvidia-smi`` says of a driver that does not work; empty for one that does."""


@dataclass(frozen=True)
class HostFacts:
    """Everything about a machine that may trouble a job."""

    hostname: str
    """Its own name."""
    kernel: str
    """Release of the kernel."""
    machine: str
    """Processor architecture as ``uname -m`` prints it."""
    libc: str
    """``glibc``, ``musl`` or ``unknown``."""
    libc_version: str
    """Version of the C library."""
    python: str
    """Version of the interpreter that the agent runs under."""
    cpus: int
    """CPUs that this job may use."""
    memory_total: int
    """Bytes of memory, within the job's limit."""
    memory_available: int
    """Bytes of it that are free."""
    gpus: int
    """GPUs that this job may use."""
    shm_free: int | None
    """Bytes free in /dev/shm; None where there is none."""
    clock: float
    """Its clock, in seconds since the epoch."""
    node_root: NodeRootFacts | NodeRootProblem | None
    """The directory of the node root; None if there is none."""
