"""The model's costs, fitted to measurements of few nodes, and compared with those of more."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from bundle.protocol.events import StagingWork
from bundle.protocol.job import ASSUMED

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
    others: float
    """CPUs that everything else took meanwhile."""
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


def fit(measured: Measurements, most: int = MOST_FITTED) -> JobCosts:
    """Return the costs that fit what was measured.

    Args:
        measured: the measurements.
        most: the number of nodes up to which phases are fitted; transfers are to ``MOST_FITTED``.
    """
    staging = _fit_transfer(measured)
    return JobCosts(staging=staging, phases=_fit_phases(measured, staging, most))


def checks(measured: Measurements, costs: JobCosts) -> list[Check]:
    """Compare every measured transfer, and the phases of every job with next to no bundle."""
    found = []
    for job in measured.least_disturbed:
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
    return Check(what, nodes, nodes <= MOST_FITTED, job.others, measured, computed)


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
    return relay(work, site_of(job), costs)


def phase_wall(job: JobMeasured, name: str) -> float:
    """Return the measured seconds of a phase; ``start`` is all that is in none of the driver's."""
    if name == PHASES[0]:
        return job.wall - sum(job.phases.values())
    return job.phases[name]


def job_wall(job: JobMeasured, costs: JobCosts) -> dict[str, float]:
    """Return the computed seconds of the phases of a measured job."""
    seconds = {name: phase_seconds(costs.phases[name], site_of(job)) for name in PHASES}
    seconds[TRANSFER] += staged(job, costs.staging).unpacked
    return seconds


# --- fitting -------------------------------------------------------------------------------------


def _few(jobs: Iterable[JobMeasured], most: int) -> list[JobMeasured]:
    """Return the jobs with a relay of so many nodes at most."""
    return [job for job in jobs if job.shape.nodes <= most and job.shape.transfer == "relay"]


def _fit_transfer(measured: Measurements) -> StagingCosts:
    """Return the costs of a relay: those of its processes, then what a network adds."""
    receive_byte, receive_chunk = _line(measured.loopback, lambda one: one.node_cpu)
    send_byte, send_chunk = _line(measured.loopback, lambda one: one.source_cpu)
    base = StagingCosts(
        receive_byte=receive_byte,
        receive_chunk=receive_chunk,
        send_byte=send_byte,
        send_chunk=send_chunk,
        start=0.0,
        join=0.0,
        efficiency=1.0,
        unpack_byte=ASSUMED.byte,
        unpack_file=ASSUMED.file,
        environment=0.0,  # that of a small bundle is part of the phase's own cost
    )
    jobs = _few(measured.least_disturbed, MOST_FITTED)

    @cache
    def error(*tried: float) -> float:
        costs = with_network(base, tried)
        ratios = [staged(job, costs).sent / job.sent for job in jobs if job.sent]
        return sum(max(ratio, 1 / ratio) - 1 for ratio in ratios)

    return with_network(base, _least(error, (0.1, 0.01, 0.95, 1.5)))


def with_network(base: StagingCosts, fitted: Sequence[float]) -> StagingCosts:
    """Return the costs over a network.

    Args:
        base: the costs over the loopback interface.
        fitted: the fields ``start``, ``join`` and ``efficiency``; and how many times as much as
            over the loopback interface a byte costs.
    """
    start, join, efficiency, network = fitted
    return replace(
        base,
        start=start,
        join=join,
        efficiency=efficiency,
        receive_byte=base.receive_byte * network,
        send_byte=base.send_byte * network,
    )


_STEPS = (0.05, 0.01, 0.03, 0.5)
_RANGES = ((0.0, 2.0), (0.0, 0.5), (0.3, 1.0), (0.5, 20.0))


def _least(error: Callable[..., float], begin: tuple[float, ...]) -> tuple[float, ...]:
    """Return the arguments with the least error: one step at a time, then shorter steps."""
    best = begin
    for part in (1.0, 0.5, 0.25):
        while True:
            tried = min(_neighbours(best, part), key=lambda one: error(*one))
            if error(*tried) >= error(*best) - 1e-9:
                break
            best = tried
    return best


def _neighbours(point: tuple[float, ...], part: float) -> list[tuple[float, ...]]:
    """Return the points that differ in one argument by a part of its step, within its range."""
    found = []
    for at, (step, (least, most)) in enumerate(zip(_STEPS, _RANGES, strict=True)):
        for moved in (point[at] - part * step, point[at] + part * step):
            value = round(min(most, max(least, moved)), 6)
            found.append((*point[:at], value, *point[at + 1 :]))
    return found


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


def _fit_phases(measured: Measurements, staging: StagingCosts, most: int) -> dict[str, PhaseCosts]:
    """Return the costs of the phases: CPU seconds, and the time in which nothing grows.

    The CPU time is measured for the whole job. It is divided among the phases as their times grow.
    """
    jobs = [job for job in _few(measured.least_disturbed, most) if not job.shape.megabytes]
    counts = [float(job.shape.nodes) for job in jobs]
    _, driver = least_squares(counts, [job.driver_cpu for job in jobs])
    _, agent = least_squares(counts, [job.node_cpu for job in jobs])
    walls: dict[str, tuple[float, float]] = {}
    for name in PHASES:
        seconds = [phase_wall(job, name) for job in jobs]
        if name == TRANSFER:
            known = [staged(job, staging).unpacked for job in jobs]
            seconds = [max(0.0, a - b) for a, b in zip(seconds, known, strict=True)]
        walls[name] = least_squares(counts, seconds)
    growth = sum(slope for _, slope in walls.values()) or 1.0
    phases = {}
    for name, (_, slope) in walls.items():
        share = slope / growth
        costs = PhaseCosts(fixed=0.0, driver=driver * share, agent=agent * share)
        fixed = statistics.median(
            max(0.0, phase_wall(job, name) - _computed(job, name, costs, staging)) for job in jobs
        )
        phases[name] = replace(costs, fixed=fixed)
    return phases


def _computed(job: JobMeasured, name: str, costs: PhaseCosts, staging: StagingCosts) -> float:
    seconds = phase_seconds(costs, site_of(job))
    return seconds + (staged(job, staging).unpacked if name == TRANSFER else 0.0)


def least_squares(counts: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return the line through some points: its value at 0 and its slope, neither below zero."""
    if len(set(counts)) < 2:
        return values[0] if values else 0.0, 0.0
    line = statistics.linear_regression(counts, values)
    if line.slope < 0:
        return statistics.fmean(values), 0.0
    return max(0.0, line.intercept), line.slope
