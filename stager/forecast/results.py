"""The results of ``stager estimate`` and of a dry run, as scripts and Python programs get them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bundle.protocol.enumerations import TransferWay
from bundle.protocol.job import Rates
from bundle.transfer.forecast import Forecast


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds:
    """Seconds by phase until the ranks run, as results have them."""

    preflight: float
    """The check of the nodes before the transfer."""
    send: float
    """Sending, a part of ``stage``."""
    unpack: float
    """Unpacking, a part of ``stage``."""
    stage: float
    """The environment on every node: sent and unpacked at the same time."""
    probe: float
    """The check of the environment on every node."""
    launch: float
    """The start of the ranks."""
    total: float
    """All phases."""

    @classmethod
    def of(cls, forecast: Forecast) -> PhaseSeconds:
        """Return the seconds of a forecast, rounded."""
        return cls(**forecast.to_json())


@dataclass(frozen=True, kw_only=True)
class JobForecast:
    """A forecast for a job that is only planned."""

    nodes: int
    """The number of nodes; they have nothing yet."""
    basis: str
    """The basis of the rates, in words."""
    measured: bool
    """True if the rates were measured on earlier jobs."""
    seconds: PhaseSeconds
    """Seconds by phase."""


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job that Slurm was not asked for: the result of ``--dry-run`` outside an allocation."""

    ok: bool = True
    """True: a job that cannot be planned is an error."""
    dry_run: bool = True
    """True."""
    argv: tuple[str, ...]
    """The command that would ask Slurm, without secrets."""
    bundle: Path
    """The bundle."""
    id: str
    """Its id."""
    transfer: TransferWay
    """The way in which the nodes would get the bundle."""
    bytes_at_most: int
    """The most bytes that would be sent to a node."""
    nodes: tuple[int, int]
    """Fewest and most nodes."""
    log_dir: Path
    """The directory of the logs."""
    forecast: JobForecast
    """The time it would take."""


@dataclass(frozen=True, kw_only=True)
class EstimateRates(Rates):
    """The rates that an estimate uses."""

    basis: str
    """Their basis, in words."""
    jobs: int
    """Number of jobs that they were measured on."""

    def __post_init__(self) -> None:
        """Check nothing: these rates were checked when they were made."""


@dataclass(frozen=True, kw_only=True)
class CountForecast:
    """Forecasts for one number of nodes."""

    nodes: int
    """The number of nodes."""
    world_size: int
    """The number of ranks."""
    width: int
    """Nodes that one node sends to: 2 in a relay."""
    levels: int
    """The depth of the tree along which the bundle is sent."""
    cold: PhaseSeconds
    """Nodes that have nothing yet."""
    unchanged: PhaseSeconds
    """Nodes that have the environment."""
    one_changed: PhaseSeconds | None
    """Nodes that lack one package; None for a bundle without packages."""
    shared: dict[str, float]
    """Seconds until ranks that import from a shared file system run, by its name."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The result of ``stager estimate``; all times are seconds."""

    bundle: Path
    """The bundle."""
    id: str
    """Its id."""
    bundle_bytes: int
    """Its size in bytes."""
    unpacked_bytes: int
    """The size of its files in bytes."""
    files: int
    """Number of its files."""
    nproc_per_node: int
    """Ranks on each node."""
    cpus: int
    """CPUs that a job gets on each node."""
    launcher: str
    """``torchrun`` or ``srun``."""
    changed: str | None
    """The package that stands for any that changes; None for a bundle without packages."""
    rates: EstimateRates
    """The rates of the cluster."""
    forecasts: tuple[CountForecast, ...]
    """A forecast for each number of nodes."""
    pays_from: dict[str, int | None]
    """The fewest nodes from which staging pays, by shared file system; None for never."""
    verdict: str
    """The same in words."""
