"""The time that staging takes, and whether it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bundle.format.manifest import Layer, Manifest
from bundle.protocol.counts import counted
from bundle.protocol.enumerations import Stage, TransferWay
from bundle.protocol.events import StagingWork
from bundle.redaction.secrets import masked
from bundle.transfer.forecast import (
    WIDEST,
    Forecast,
    Nodes,
    best_width,
    forecast,
    levels,
    staging,
    staging_by_reading,
    staging_work,
)
from bundle.transfer.plan import excerpt_size

from ..building.current_bundle import offline_root
from ..config.load import Config
from ..core.store import Store
from ..jobs.preparation import Prepared
from ..pack.bundle_file import manifest_of
from .history import Basis, known
from .results import CountForecast, Estimate, EstimateRates, JobForecast, PhaseSeconds, PlannedJob
from .shared_files import LUSTRE, NFS, SharedFiles, from_shared

MOST_NODES = 100_000
"""The model holds for no more nodes than these."""
SHARED = (LUSTRE, NFS)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A bundle, and the way it is used."""

    bundle: Path
    """The bundle's file."""
    manifest: Manifest
    """Its manifest."""
    size: int
    """Its length in bytes."""
    ranks: int
    """Ranks on each node."""
    cpus: int
    """CPUs that a job gets on each node."""
    launcher: str
    """``torchrun`` or ``srun``."""
    relayed: bool
    """True if the nodes pass the bundle on to each other; False if ``sbcast`` sends it."""
    read: bool = False
    """True if nothing is sent: each node reads the bundle where it lies."""
    basis: Basis
    """The rates of the cluster."""

    def nodes(self, count: int) -> Nodes:
        """Return so many nodes."""
        return Nodes(count, cpus=self.cpus, ranks=self.ranks)

    @property
    def changed(self) -> Layer | None:
        """The package that stands for any that changes: the median by size."""
        wheels = [layer for layer in self.manifest.layers if layer.kind == "wheel"]
        ordered = sorted(wheels, key=lambda layer: (layer.size, layer.name))
        return ordered[len(ordered) // 2] if ordered else None


def setting_of(config: Config, bundle: Path, manifest: Manifest, basis: Basis) -> Setting:
    """Return how settings, with the command line's options in them, use a bundle."""
    ranks = config.launch.nproc_per_node or 1
    return Setting(
        bundle=bundle,
        manifest=manifest,
        size=manifest.size,
        ranks=ranks,
        # As slurm.request asks for them.
        cpus=config.cluster.cpus_per_task or ranks,
        launcher=config.launch.launcher,
        relayed=config.cluster.transfer is not TransferWay.SBCAST,
        read=config.cluster.transfer is TransferWay.SHARED or config.cluster.stage is Stage.NEVER,
        basis=basis,
    )


def planned(prepared: Prepared, argv: Sequence[str]) -> PlannedJob:
    """Return what Slurm would be asked for, and a forecast for nodes that have nothing yet.

    Nothing is asked or sent.

    Raises:
        BundleError: the bundle cannot be read.
    """
    config, bundle = prepared.config, prepared.bundle
    manifest = manifest_of(bundle, prepared.job.bundle_id)
    basis = known(Store(offline_root(config)))
    most = config.cluster.nodes[1]
    setting = setting_of(config, bundle, manifest, basis)
    seconds = PhaseSeconds.of(cold(setting, most))
    return PlannedJob(
        argv=tuple(masked(argv)),
        bundle=bundle,
        id=prepared.job.bundle_id,
        transfer=TransferWay.SHARED if setting.read else config.cluster.transfer,
        bytes_at_most=0 if setting.read else setting.size,
        nodes=config.cluster.nodes,
        log_dir=Path(prepared.job.log_dir),
        forecast=JobForecast(
            nodes=most, basis=basis.text, measured=basis.jobs > 0, seconds=seconds
        ),
    )


def cold(setting: Setting, count: int) -> Forecast:
    """Return seconds by phase on nodes that have nothing yet."""
    layers = setting.manifest.layers
    return _staged(setting, count, staging_work(layers, layers, setting.size))


def unchanged(setting: Setting, count: int) -> Forecast:
    """Return seconds by phase on nodes that have the environment."""
    return _staged(setting, count, None)


def one_changed(setting: Setting, count: int) -> Forecast | None:
    """Return seconds by phase on nodes that lack one package; None for a bundle without any."""
    layer = setting.changed
    if layer is None:
        return None
    sent = excerpt_size(layer.members)
    return _staged(setting, count, staging_work([layer], setting.manifest.layers, sent))


def from_files(setting: Setting, count: int, shared: SharedFiles) -> float:
    """Return seconds until ranks that import from a shared file system have all their files."""
    manifest, nodes = setting.manifest, setting.nodes(count)
    starting = unchanged(setting, count).launch
    return starting + from_shared(manifest.files, manifest.unpacked_size, nodes, shared)


def pays_from(setting: Setting, shared: SharedFiles, most: int = 10_000) -> int | None:
    """Return the fewest nodes from which staging is quicker, though they have nothing yet."""

    def pays(count: int) -> bool:
        return cold(setting, count).total < from_files(setting, count, shared)

    tried = [1]
    while tried[-1] < most:
        tried.append(min(tried[-1] * 2, most))
    first = next((number for number, count in enumerate(tried) if pays(count)), None)
    if first is None:
        return None
    low, high = (tried[first - 1] if first else 0), tried[first]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def estimate(setting: Setting, counts: Sequence[int]) -> Estimate:
    """Return the result of ``stager estimate``."""
    manifest, basis, changed = setting.manifest, setting.basis, setting.changed
    payable = {shared.name: pays_from(setting, shared) for shared in SHARED}
    return Estimate(
        bundle=setting.bundle,
        id=manifest.id,
        bundle_bytes=setting.size,
        unpacked_bytes=manifest.unpacked_size,
        files=manifest.files,
        nproc_per_node=setting.ranks,
        cpus=setting.cpus,
        launcher=setting.launcher,
        changed=None if changed is None else changed.name,
        rates=EstimateRates(basis=basis.text, jobs=basis.jobs, **asdict(basis.rates)),
        forecasts=tuple(_at(setting, count) for count in counts),
        pays_from={name.lower(): count for name, count in payable.items()},
        verdict=_verdict(payable),
    )


def _at(setting: Setting, count: int) -> CountForecast:
    width = min(2, count) if setting.relayed else best_width(count, WIDEST, setting.basis.rates)
    changed = one_changed(setting, count)
    return CountForecast(
        nodes=count,
        world_size=count * setting.ranks,
        width=width,
        levels=levels(count, width),
        cold=PhaseSeconds.of(cold(setting, count)),
        unchanged=PhaseSeconds.of(unchanged(setting, count)),
        one_changed=None if changed is None else PhaseSeconds.of(changed),
        shared={
            shared.name.lower(): round(from_files(setting, count, shared), 3) for shared in SHARED
        },
    )


def _staged(setting: Setting, count: int, work: StagingWork | None) -> Forecast:
    nodes, rates = setting.nodes(count), setting.basis.rates
    if work is None:
        staged = []
    elif setting.read:
        # Not measured before the job: as a server that all nodes share.
        staged = [staging_by_reading(work, nodes, min(NFS.node, NFS.all / count), rates)]
    else:
        staged = [staging(work, nodes, rates, relayed=setting.relayed)]
    return forecast(staged, nodes, rates, launcher=setting.launcher)


def _verdict(payable: dict[str, int | None]) -> str:
    parts = [f"against {name} {_from(count)}" for name, count in payable.items()]
    return f"staging pays: {', '.join(parts)}"


def _from(count: int | None) -> str:
    return "never" if count is None else f"from {counted(count, 'node')} on"
