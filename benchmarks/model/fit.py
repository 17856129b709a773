"""The model's costs, fitted to measurements of few nodes, and compared with those of more."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from bundle.protocol.planned_transfer import StagingWork
from bundle.protocol.rates import ASSUMED

from .job import PHASES, TRANSFER, JobCosts, PhaseCosts, phase_seconds
from .measure import JobMeasured, Measurements, RelayMeasured
from .transfer import Site, Staged, StagingCosts, relay, sbcast

MOST_FITTED = 8
"""The measurements of so many nodes and fewer are fitted; the others are only compared."""
WITHIN = 0.30
"""A computed time may differ by so much from the measured one."""
_FILES = 30
"""Files of the bundle that is measured."""


@dataclass(frozen=True)
class Check:
    """A measured time beside the computed one."""

    what: str
    nodes: int
    fitted: bool
    """True if the model was fitted to it."""
    load: float
    measured: float
    computed: float

    @property
    def ratio(self) -> float:
        """Computed over measured."""
        return self.computed / self.measured

    @property
    def holds(self) -> bool:
        """True if the model is near enough."""
        return abs(self.ratio - 1) <= WITHIN


def fit(measured: Measurements) -> JobCosts:
    """Return the costs that fit what was measured on few nodes."""
    staging = _fit_transfer(measured)
    return JobCosts(staging=staging, phases=_fit_phases(measured, staging))


def checks(measured: Measurements, costs: JobCosts) -> list[Check]:
    """Compare every measured transfer, and the phases of every job with next to no bundle."""
    found = []
    for job in measured.jobs:
        shape = job.shape
        limit = f"{shape.mbits} Mbit/s" if shape.mbits else "no limit"
        what = f"{shape.transfer}, {job.sent_bytes / 1e6:.1f} MB, {limit}"
        found.append(_check(job, what, job.sent, staged(job, costs.staging).sent))
        if not shape.megabytes:
            computed = job_wall(job, costs)
            for name in PHASES[:2]:
                found.append(_check(job, name, phase_wall(job, name), computed[name]))
            found.append(_check(job, "all phases", job.wall, sum(computed.values())))
    return sorted(found, key=lambda check: (check.what, check.nodes))


def _check(job: JobMeasured, what: str, measured: float, computed: float) -> Check:
    nodes = job.shape.nodes
    return Check(what, nodes, nodes <= MOST_FITTED, job.load, measured, computed)


# --- a measured job, simulated -------------------------------------------------------------------


def site_of(job: JobMeasured) -> Site:
    """Return the machine that the nodes of a measured job shared."""
    link = job.shape.mbits * 1e6 / 8 if job.shape.mbits else float("inf")
    return Site(nodes=job.shape.nodes, link=link, cpus=2, shared=True)


def staged(job: JobMeasured, costs: StagingCosts) -> Staged:
    """Return the computed transfer of a measured job."""
    sent = job.sent_bytes
    work = StagingWork(sent=sent, bytes=sent, files=_FILES)
    if job.shape.transfer == "sbcast":
        return sbcast(work, site_of(job), costs)
    return relay(work, site_of(job), slowed(costs, job.slowdown))


def slowed(costs: StagingCosts, factor: float) -> StagingCosts:
    """Return the costs on CPUs that others use as well."""
    return replace(
        costs,
        receive_byte=costs.receive_byte * factor,
        receive_chunk=costs.receive_chunk * factor,
        send_byte=costs.send_byte * factor,
        send_chunk=costs.send_chunk * factor,
        unpack_byte=costs.unpack_byte * factor,
        unpack_file=costs.unpack_file * factor,
        environment=costs.environment * factor,
    )


def phase_wall(job: JobMeasured, name: str) -> float:
    """Return the measured seconds of a phase; ``start`` is all that is in none of the driver's."""
    if name == PHASES[0]:
        return job.wall - sum(job.phases.values())
    return job.phases[name]


def job_wall(job: JobMeasured, costs: JobCosts) -> dict[str, float]:
    """Return the computed seconds of the phases of a measured job."""
    site, factor = site_of(job), job.slowdown
    seconds = {}
    for name in PHASES:
        phase = costs.phases[name]
        fixed, driver, agent = phase.fixed, phase.driver * factor, phase.agent * factor
        slow = PhaseCosts(fixed=fixed * factor, driver=driver, agent=agent)
        seconds[name] = phase_seconds(slow, site)
    seconds[TRANSFER] += staged(job, costs.staging).unpacked
    return seconds


# --- fitting -------------------------------------------------------------------------------------


def _few(jobs: Iterable[JobMeasured], transfer: str = "relay") -> list[JobMeasured]:
    """Return those of few nodes."""
    return [
        job for job in jobs if job.shape.nodes <= MOST_FITTED and job.shape.transfer == transfer
    ]


def _fit_transfer(measured: Measurements) -> StagingCosts:
    """Return the costs of a relay: those of its processes, then what a network adds."""
    receive_byte, receive_chunk = _line(measured.loopback, lambda one: one.node_cpu)
    send_byte, send_chunk = _line(measured.loopback, lambda one: one.source_cpu)
    base = StagingCosts(
        receive_byte=receive_byte,
        receive_chunk=receive_chunk,
        send_byte=send_byte,
        send_chunk=send_chunk,
        start=0.1,
        efficiency=0.95,
        unpack_byte=ASSUMED.byte,
        unpack_file=ASSUMED.file,
        environment=ASSUMED.environment,
    )
    jobs = _few(measured.jobs)

    @cache
    def error(start: float, efficiency: float, network: float) -> float:
        costs = with_network(base, start, efficiency, network)
        ratios = [staged(job, costs).sent / job.sent for job in jobs if job.sent]
        return sum(max(ratio, 1 / ratio) - 1 for ratio in ratios)

    return with_network(base, *_least(error, (0.1, 0.95, 1.5), (0.05, 0.03, 0.5)))


def with_network(
    base: StagingCosts, start: float, efficiency: float, network: float
) -> StagingCosts:
    """Return the costs over a network, which cost ``network`` times as much as over loopback."""
    return replace(
        base,
        start=start,
        efficiency=efficiency,
        receive_byte=base.receive_byte * network,
        send_byte=base.send_byte * network,
    )


def _least(
    error: Callable[[float, float, float], float],
    begin: tuple[float, float, float],
    steps: tuple[float, float, float],
) -> tuple[float, float, float]:
    """Return the arguments with the least error: one step at a time, then shorter steps."""
    best = begin
    for part in (1.0, 0.5, 0.25):
        improved = True
        while improved:
            improved = False
            for at in range(3):
                for sign in (-1, 1):
                    tried = list(best)
                    tried[at] = round(tried[at] + sign * part * steps[at], 6)
                    start, efficiency, network = tried
                    if start < 0 or not 0.3 <= efficiency <= 1 or network < 0.5:
                        continue
                    if error(start, efficiency, network) < error(*best) - 1e-9:
                        best, improved = (start, efficiency, network), True
    return best


def _line(
    measured: Sequence[RelayMeasured], cpu: Callable[[RelayMeasured], float]
) -> tuple[float, float]:
    """Return CPU seconds a byte and a chunk, of which neither is below zero."""
    sizes = sorted({one.bytes for one in measured})
    least = [min((one for one in measured if one.bytes == size), key=cpu) for size in sizes]
    large = least[-1]
    pairs = [
        (
            cpu(one) - cpu(large) * one.bytes / large.bytes,
            one.chunks - large.chunks * one.bytes / large.bytes,
        )
        for one in least[:-1]
    ]
    a_chunk = max(0.0, statistics.median(seconds / chunks for seconds, chunks in pairs))
    return max(0.0, cpu(large) - a_chunk * large.chunks) / large.bytes, a_chunk


def _fit_phases(measured: Measurements, staging: StagingCosts) -> dict[str, PhaseCosts]:
    """Return the costs of the phases: CPU seconds, and the time in which nothing grows.

    The CPU time is measured for the whole job. It is divided among the phases as their times grow.
    """
    jobs = [job for job in _few(measured.jobs) if not job.shape.megabytes]
    counts = [float(job.shape.nodes) for job in jobs]
    _, driver = least_squares(counts, [job.driver_cpu for job in jobs])
    _, agent = least_squares(counts, [job.node_cpu for job in jobs])
    walls: dict[str, tuple[float, float]] = {}
    for name in PHASES:
        seconds = [phase_wall(job, name) / job.slowdown for job in jobs]
        if name == TRANSFER:
            known = [staged(job, staging).unpacked / job.slowdown for job in jobs]
            seconds = [max(0.0, a - b) for a, b in zip(seconds, known, strict=True)]
        walls[name] = least_squares(counts, seconds)
    growth = sum(slope for _, slope in walls.values()) or 1.0
    phases = {}
    for name, (_, slope) in walls.items():
        share = slope / growth
        costs = PhaseCosts(fixed=0.0, driver=driver * share, agent=agent * share)
        fixed = statistics.median(
            max(0.0, (phase_wall(job, name) - _computed(job, name, costs, staging)) / job.slowdown)
            for job in jobs
        )
        phases[name] = replace(costs, fixed=fixed)
    return phases


def _computed(job: JobMeasured, name: str, costs: PhaseCosts, staging: StagingCosts) -> float:
    factor = job.slowdown
    slow = replace(costs, driver=costs.driver * factor, agent=costs.agent * factor)
    seconds = phase_seconds(slow, site_of(job))
    return seconds + (staged(job, staging).unpacked if name == TRANSFER else 0.0)


def least_squares(counts: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return the line through some points: its value at 0 and its slope, neither below zero."""
    if len(set(counts)) < 2:
        return values[0] if values else 0.0, 0.0
    line = statistics.linear_regression(counts, values)
    if line.slope < 0:
        return statistics.fmean(values), 0.0
    return max(0.0, line.intercept), line.slope
