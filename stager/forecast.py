"""The time that staging takes: the history of earlier jobs, and the estimate."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from bundle.driver import forecast as model
from bundle.driver.forecast import Forecast, Nodes, forecast_staging, measure_staging_work
from bundle.driver.plan import SENT, SHARED, excerpt_size
from bundle.format.manifest import Layer, Manifest
from bundle.protocol.codec import decode, encode
from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import PhaseName, Stage, TransferWay
from bundle.protocol.events import FileSent, PhaseEnds, Record, StagingWork, TransferPlan
from bundle.protocol.job import ASSUMED, Rates
from bundle.protocol.messages import UnpackAnswer
from bundle.redaction.secrets import mask_arguments

from .building.current_bundle import offline_root
from .config.load import Config
from .core.errors import StagerError
from .core.files import read_text
from .core.store import Store
from .jobs.driver import OnEvent
from .jobs.preparation import Prepared
from .pack.bundle_file import read_manifest

# --- The results of ``stager estimate`` and of a dry run, as scripts and Python programs get them


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds:
    """Seconds by phase until the ranks run, as results have them."""

    preflight: float
    send: float
    unpack: float
    stage: float  # the environment on every node: sent and unpacked at the same time
    probe: float
    launch: float
    total: float


@dataclass(frozen=True, kw_only=True)
class JobForecast:
    """A forecast for a job that is only planned."""

    nodes: int
    basis: str
    measured: bool
    seconds: PhaseSeconds


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job that Slurm was not asked for: the result of ``--dry-run`` outside an allocation."""

    ok: bool = True
    dry_run: bool = True
    argv: tuple[str, ...]  # the command that would ask Slurm, without secrets
    bundle: Path
    id: str
    transfer: TransferWay
    bytes_at_most: int
    nodes: tuple[int, int]
    log_dir: Path
    forecast: JobForecast


@dataclass(frozen=True, kw_only=True)
class EstimateRates(Rates):
    """The rates that an estimate uses."""

    basis: str
    jobs: int

    def __post_init__(self) -> None:
        """Check nothing: these rates were checked when they were made."""


@dataclass(frozen=True, kw_only=True)
class CountForecast:
    """Forecasts for one number of nodes."""

    nodes: int
    world_size: int
    width: int  # nodes that one node sends to: 2 in a relay
    levels: int
    cold: PhaseSeconds
    unchanged: PhaseSeconds
    one_changed: PhaseSeconds | None  # None for a bundle without packages
    shared: dict[str, float]  # seconds until ranks that import from a shared file system run


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The result of ``stager estimate``; all times are seconds."""

    bundle: Path
    id: str
    bundle_bytes: int
    unpacked_bytes: int
    files: int
    nproc_per_node: int
    cpus: int
    launcher: str
    changed: str | None  # the package that stands for any that changes
    rates: EstimateRates
    forecasts: tuple[CountForecast, ...]
    pays_from: dict[str, int | None]  # nodes from which staging pays; None for never
    verdict: str


# --- The times of earlier jobs: kept in the offline root, as rates for the next forecast ---------

# ``history.json`` has a version and the last few jobs that sent a bundle to nodes. One that is
# damaged, or of another version, counts as none, and the next job begins it anew.

T = TypeVar("T")

FILE = "history.json"
VERSION = 1
KEPT = 9  # jobs; forecasts take the median of them, so one that was disturbed does not count
_ENOUGH_BYTES = 8 * model.BLOCK
_ENOUGH_FILES = 1_000  # less says more about the start of a process than about its rate


@dataclass(frozen=True, kw_only=True)
class MeasuredJob:
    """The times of one job."""

    nodes: int
    cpus: int
    work: StagingWork
    step: float
    stage: float  # seconds of the unpacking, the sending included
    send: float | None = None  # seconds of the sending alone
    unpack: float | None = None  # seconds that the slowest node unpacked for
    relayed: bool = False  # from node to node; else ``sbcast`` sends it


@dataclass(frozen=True, kw_only=True)
class KnownRates:
    """The rates that a forecast uses, and how many jobs measured them."""

    rates: Rates = ASSUMED
    jobs: int = 0  # the number of jobs that measured it; 0: it is assumed
    nodes: int = 0  # the most nodes that any of these had

    @property
    def text(self) -> str:
        """The same for a person."""
        if not self.jobs:
            return "assumed; a job that sends its bundle measures them"
        jobs, nodes = format_count(self.jobs, "job"), format_count(self.nodes, "node")
        return f"measured on {jobs} of up to {nodes}"


_TIMED = (TransferPlan, PhaseEnds, FileSent, UnpackAnswer)
"""The events that say how long a job's staging took."""


def _find_only_group(plan: TransferPlan) -> tuple[int, StagingWork] | None:
    """Return the nodes and the work where one group got the bundle and no other read it."""
    work = [(len(one.nodes), one.work) for one in plan.groups if one.how in SENT and one.work]
    is_simple = len(work) == 1 and all(one.how != SHARED for one in plan.groups)
    return work[0] if is_simple else None


def _is_clean(sent: Sequence[FileSent], answers: Sequence[UnpackAnswer]) -> bool:
    return len(sent) < 2 and all(answer.ok for answer in answers)


def measure_job(records: Iterable[Record]) -> MeasuredJob | None:
    """Return the times to keep; None where nothing was sent, or not without trouble."""
    events = [record.event for record in records]
    sent, plan = _pick(events, FileSent), [TransferPlan(), *_pick(events, TransferPlan)][-1]
    seconds = {end.phase: end.seconds for end in _pick(events, PhaseEnds)}
    answers = _pick(events, UnpackAnswer)
    group = _find_only_group(plan)
    has_ended = {PhaseName.PREFLIGHT, PhaseName.UNPACK} <= seconds.keys()
    if group is None or not (has_ended and _is_clean(sent, answers)):
        return None
    nodes, work = group
    return MeasuredJob(
        nodes=nodes,
        cpus=plan.cpus,
        work=work,
        step=seconds[PhaseName.PREFLIGHT],
        stage=seconds[PhaseName.UNPACK],
        send=next((one.seconds for one in sent), None),
        unpack=max(filter(None, (answer.unpack_seconds for answer in answers)), default=None),
        relayed=any(one.relayed for one in sent),
    )


def _pick(events: Iterable[object], kind: type[T]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]


@contextmanager
def keep_times(store: Store, on_event: OnEvent) -> Iterator[OnEvent]:
    """Pass a job's events on, and keep its times once the block has ended well."""
    timed: list[Record] = []

    def listen(record: Record) -> None:
        if isinstance(record.event, _TIMED):
            timed.append(record)
        on_event(record)

    yield listen
    seen = measure_job(timed)
    if seen is not None:
        record_times(store, seen)


def record_times(store: Store, seen: MeasuredJob) -> None:
    """Keep the times of a job beside those of the last few; a failure to is not the job's."""
    jobs = [*read_history(store), seen][-KEPT:]
    content = {"version": VERSION, "jobs": [encode(job) for job in jobs]}
    with suppress(StagerError), store.publish(store.root / FILE) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_history(store: Store) -> tuple[MeasuredJob, ...]:
    """Return the jobs that are kept, the newest last; none where they cannot be read."""
    try:
        raw = json.loads(read_text(store.root / FILE))
        if raw["version"] != VERSION:
            return ()
        return tuple(_decode_measured_job(job) for job in raw["jobs"][-KEPT:])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def estimate_rates(jobs: Sequence[MeasuredJob], *, one_machine: bool = False) -> KnownRates:
    """Return the jobs' median rates, or assumed ones; ``one_machine``: all nodes share its CPUs."""
    if not jobs:
        return KnownRates()
    send, unpack, step = [], [], []
    for job in jobs:
        nodes = Nodes(job.nodes, cpus=job.cpus, sharing=job.nodes if one_machine else 1)
        expected = forecast_staging(job.work, nodes, relayed=job.relayed)
        step.append(job.step / model.forecast_step(nodes))
        together = max(job.stage - job.step, 0.0) / expected.seconds
        if job.work.sent >= _ENOUGH_BYTES:
            send.append(together if job.send is None else job.send / expected.send)
        if job.work.files >= _ENOUGH_FILES:
            unpack.append(together if job.unpack is None else job.unpack / expected.unpack)
    factors = {"send": send, "unpack": unpack, "step": step}
    rates = ASSUMED.scale_rates(**{name: _median_in_bounds(x) for name, x in factors.items()})
    most = max(job.nodes for job in jobs)
    return KnownRates(rates=rates, jobs=len(jobs), nodes=most)


def find_known_rates(store: Store) -> KnownRates:
    """Return what is known about this cluster from earlier jobs."""
    return estimate_rates(read_history(store))


def _median_in_bounds(factors: Sequence[float]) -> float:
    """Return the median, within what is believable: a clock may have jumped."""
    return min(max(median(factors), 0.01), 100.0) if factors else 1.0


def _decode_measured_job(raw: object) -> MeasuredJob:
    job = decode(MeasuredJob, raw)
    times = (job.step, job.stage, job.send or 0, job.unpack or 0)
    if min(times) < 0 or min(job.nodes, job.cpus, job.work.sent) <= 0:
        raise ValueError("these times cannot be right")
    return job


# --- The alternative to staging: ranks that import from a shared file system. Pure functions -----

# It goes by the calls that name a path, of which an import makes two for each file of the
# environment, and only then by bytes.

FILES, BYTES, CALLS, OPENS, READ = 34_255, 1.38e9, 71_270, 4_514, 781e6
"""An environment of 47 packages (torch, transformers, datasets): its files and bytes; and what its
import does: calls with a path, files opened, bytes read. Counted with strace; others are taken in
proportion."""


class SharedFiles(NamedTuple):
    """A shared file system that ranks would import from instead. Cold: no node has read it yet."""

    name: str
    call: float  # seconds that a call with a path takes on a node that uses it alone
    calls: float  # such calls that it answers in a second, for all nodes together
    node: float  # bytes a second that one node reads; ``all`` has those of all nodes together
    all: float


LUSTRE = SharedFiles("Lustre", call=0.7e-3, calls=560e3, node=1e9, all=50e9)
"""Fits two published figures: 57 s for an environment on 8 nodes (Frontier), and 120 s for an
import of torch, 17,800 calls, on 2,048 nodes with 12 ranks each (Aurora, without Copper)."""
NFS = SharedFiles("NFS", call=0.7e-3, calls=3_500, node=0.3e9, all=1e9)
"""Fits 244 s for the same environment on 8 nodes (Frontier's NFS), each with 8 ranks."""


def estimate_shared_reads(files: int, size: int, nodes: Nodes, shared: SharedFiles) -> float:
    """Return the seconds that ranks wait for files when they import from a shared file system."""
    # A node's ranks share what its kernel keeps; but each rank has a file that it opens checked.
    more_files = files / FILES
    calls, read = more_files * CALLS, size / BYTES * READ
    calls_of_node = calls + (nodes.ranks - 1) * more_files * OPENS
    waiting = max(calls * shared.call, nodes.count * calls_of_node / shared.calls)
    return waiting + max(read / shared.node, nodes.count * read / shared.all)


# --- The time that staging takes, and whether it pays --------------------------------------------

MOST_NODES = 100_000  # the model holds for no more nodes than these
_MOST_COMPARED = 10_000  # nodes up to which staging is compared with a shared file system
SHARED_FILE_SYSTEMS = (LUSTRE, NFS)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A bundle, and the way it is used."""

    bundle: Path
    manifest: Manifest
    ranks: int
    cpus: int
    launcher: str
    relayed: bool  # from node to node; else ``sbcast`` sends it
    read: bool = False  # true if nothing is sent: each node reads the bundle where it lies
    basis: KnownRates

    def nodes(self, count: int) -> Nodes:
        """Return ``count`` nodes of this kind."""
        return Nodes(count, cpus=self.cpus, ranks=self.ranks)

    def choose_changed(self) -> Layer | None:
        """Return the package that stands for any that changes: the median by size."""
        wheels = [layer for layer in self.manifest.layers if layer.kind == "wheel"]
        ordered = sorted(wheels, key=lambda layer: (layer.size, layer.name))
        return ordered[len(ordered) // 2] if ordered else None


def make_setting(config: Config, bundle: Path, manifest: Manifest, basis: KnownRates) -> Setting:
    """Return how settings, with the command line's options in them, use a bundle."""
    ranks = config.launch.nproc_per_node or 1
    return Setting(
        bundle=bundle,
        manifest=manifest,
        ranks=ranks,
        # As slurm.request asks for them.
        cpus=config.cluster.cpus_per_task or ranks,
        launcher=config.launch.launcher,
        relayed=config.cluster.transfer is not TransferWay.SBCAST,
        read=config.cluster.transfer is TransferWay.SHARED or config.cluster.stage is Stage.NEVER,
        basis=basis,
    )


def plan_job(prepared: Prepared, argv: Sequence[str]) -> PlannedJob:
    """Return what Slurm would be asked for, and a forecast for nodes that have nothing yet."""
    config, bundle, job = prepared.config, prepared.bundle, prepared.job
    basis, most = find_known_rates(Store(offline_root(config))), config.cluster.nodes[1]
    setting = make_setting(config, bundle, read_manifest(bundle, job.bundle_id), basis)
    seconds = PhaseSeconds(**forecast_cold(setting, most).to_json())
    return PlannedJob(
        argv=tuple(mask_arguments(argv)),
        bundle=bundle,
        id=job.bundle_id,
        transfer=TransferWay.SHARED if setting.read else config.cluster.transfer,
        bytes_at_most=0 if setting.read else setting.manifest.size,
        nodes=config.cluster.nodes,
        log_dir=Path(job.log_dir),
        forecast=JobForecast(
            nodes=most, basis=basis.text, measured=basis.jobs > 0, seconds=seconds
        ),
    )


def forecast_cold(setting: Setting, count: int) -> Forecast:
    """Return seconds by phase on nodes that have nothing yet."""
    layers, size = setting.manifest.layers, setting.manifest.size
    return _forecast_staging(setting, count, measure_staging_work(layers, layers, size))


def forecast_unchanged(setting: Setting, count: int) -> Forecast:
    """Return seconds by phase on nodes that have the environment."""
    return _forecast_staging(setting, count, None)


def forecast_one_changed(setting: Setting, count: int) -> Forecast | None:
    """Return seconds by phase on nodes that lack one package; None for a bundle without any."""
    layer = setting.choose_changed()
    if layer is None:
        return None
    sent, layers = excerpt_size(layer.members), setting.manifest.layers
    return _forecast_staging(setting, count, measure_staging_work([layer], layers, sent))


def estimate_from_files(setting: Setting, count: int, shared: SharedFiles) -> float:
    """Return seconds until ranks that import from a shared file system have all their files."""
    manifest, nodes = setting.manifest, setting.nodes(count)
    starting = forecast_unchanged(setting, count).launch
    return starting + estimate_shared_reads(manifest.files, manifest.unpacked_size, nodes, shared)


def find_break_even(setting: Setting, shared: SharedFiles) -> int | None:
    """Return the fewest nodes from which staging is quicker, though they have nothing yet."""

    def pays(count: int) -> bool:
        return forecast_cold(setting, count).total < estimate_from_files(setting, count, shared)

    counts = range(1, _MOST_COMPARED + 1)
    found = bisect_left(counts, True, key=pays)
    return counts[found] if found < len(counts) else None


def estimate(setting: Setting, counts: Sequence[int]) -> Estimate:
    """Return the result of ``stager estimate``."""
    manifest, basis, changed = setting.manifest, setting.basis, setting.choose_changed()
    payable = {shared.name: find_break_even(setting, shared) for shared in SHARED_FILE_SYSTEMS}
    verdict = [
        f"against {name} " + (f"from {format_count(count, 'node')} on" if count else "never")
        for name, count in payable.items()
    ]
    return Estimate(
        bundle=setting.bundle,
        id=manifest.id,
        bundle_bytes=setting.manifest.size,
        unpacked_bytes=manifest.unpacked_size,
        files=manifest.files,
        nproc_per_node=setting.ranks,
        cpus=setting.cpus,
        launcher=setting.launcher,
        changed=None if changed is None else changed.name,
        rates=EstimateRates(basis=basis.text, jobs=basis.jobs, **asdict(basis.rates)),
        forecasts=tuple(_forecast_count(setting, count) for count in counts),
        pays_from={name.lower(): count for name, count in payable.items()},
        verdict=f"staging pays: {', '.join(verdict)}",
    )


def _forecast_count(setting: Setting, count: int) -> CountForecast:
    rates = setting.basis.rates
    width = min(2, count) if setting.relayed else model.best_width(count, model.WIDEST, rates)
    changed = forecast_one_changed(setting, count)
    return CountForecast(
        nodes=count,
        world_size=count * setting.ranks,
        width=width,
        levels=model.levels(count, width),
        cold=PhaseSeconds(**forecast_cold(setting, count).to_json()),
        unchanged=PhaseSeconds(**forecast_unchanged(setting, count).to_json()),
        one_changed=None if changed is None else PhaseSeconds(**changed.to_json()),
        shared={
            shared.name.lower(): round(estimate_from_files(setting, count, shared), 3)
            for shared in SHARED_FILE_SYSTEMS
        },
    )


def _forecast_staging(setting: Setting, count: int, work: StagingWork | None) -> Forecast:
    nodes, rates, staged = setting.nodes(count), setting.basis.rates, []
    if work is not None and setting.read:
        # Not measured before the job: as a server that all nodes share.
        staged = [forecast_staging(work, nodes, rates, speed=min(NFS.node, NFS.all / count))]
    elif work is not None:
        staged = [forecast_staging(work, nodes, rates, relayed=setting.relayed)]
    return model.forecast(staged, nodes, rates, launcher=setting.launcher)
