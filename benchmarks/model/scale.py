"""The tables of docs/scale.md and its picture: what the model computes for thousands of nodes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from bundle.protocol.events import StagingWork
from bundle.protocol.job import ASSUMED

from .fit import Check
from .job import JobCosts, PhaseCosts, job_seconds
from .transfer import Site, relay, sbcast

GOAL_SECONDS, GOAL_NODES = 60.0, 4096
GBIT = 1e9 / 8
WORK = StagingWork(sent=8 * 10**9, bytes=8 * 10**9, files=200_000)
"""8 GB sent that do not shrink, in as many files as 8 GB of the reference environment have."""
LIKE_REFERENCE = StagingWork(sent=8 * 10**9, bytes=33 * 10**9, files=830_000)
"""8 GB sent that unpack as the reference environment does: to 4.1 times as many bytes."""
SITE = Site(nodes=GOAL_NODES, link=100 * GBIT, cpus=16)
IMPORTS = 2.4
"""Seconds in which the probe imports torch, transformers and datasets, as measured on one node."""
PUBLISHED = {8: 69.7, 64: 91.0, 512: 174.0, 4096: 750.0}
"""ezpz yeet on Aurora, an environment of 8 GB: seconds by the number of nodes."""
_COUNTS = (8, 64, 512, 4096)
_TICKS = (30, 60, 100, 200, 400, 750)
"""Seconds that the chart's axis names."""


@dataclass(frozen=True)
class Computed:
    """A job that is computed."""

    what: str
    nodes: int
    sent: float
    """Until the last byte is on the last node, from the beginning of the transfer."""
    staged: float
    """The phase that transfers and unpacks."""
    total: float
    """The whole job: every node checked before and after."""
    sbcast: float
    """Until ``sbcast`` has brought the file at the speed of the wire."""


def computed(what: str, work: StagingWork, site: Site, costs: JobCosts) -> Computed:
    """Compute one job; the probe also imports what is in the environment."""
    # The bundle that is measured has next to no files, and hardly an environment to make.
    staging = replace(costs.staging, environment=ASSUMED.environment)
    seconds = job_seconds(work, site, replace(costs, staging=staging))
    sent = seconds.pop("sent")
    wire = sbcast(work, site, costs.staging).sent
    total = sum(seconds.values()) + IMPORTS
    return Computed(what, site.nodes, sent, seconds["unpack"], total, wire)


def scale(costs: JobCosts) -> list[Computed]:
    """Compute the jobs of the goal, and smaller ones."""
    return [
        computed(f"{gbits} Gbit/s", WORK, replace(SITE, nodes=nodes, link=gbits * GBIT), costs)
        for gbits in (10, 100)
        for nodes in _COUNTS
    ]


def sensitivity(costs: JobCosts) -> list[Computed]:
    """Compute the job of the goal with one assumption changed at a time."""
    staging = costs.staging

    def relay_takes(factor: float) -> JobCosts:
        receive, send = staging.receive_byte * factor, staging.send_byte * factor
        return replace(costs, staging=replace(staging, receive_byte=receive, send_byte=send))

    variants = (
        ("as assumed", WORK, SITE, costs),
        ("2 CPUs a node", WORK, replace(SITE, cpus=2), costs),
        ("node root on a disk, 0.3 GB/s", WORK, replace(SITE, disk=3e8), costs),
        ("latency 1 ms", WORK, replace(SITE, latency=1e-3), costs),
        ("driver's host at 10 Gbit/s", WORK, replace(SITE, source_link=10 * GBIT), costs),
        ("relay takes twice the CPU time a byte", WORK, SITE, relay_takes(2.0)),
        ("relay takes a third of it", WORK, SITE, relay_takes(1 / 3)),
        ("driver takes twice the CPU time a node", WORK, SITE, with_driver(costs, 2.0)),
        ("driver takes a quarter of it", WORK, SITE, with_driver(costs, 0.25)),
        ("unpacks to 33 GB, 830,000 files", LIKE_REFERENCE, SITE, costs),
    )
    return [computed(*variant) for variant in variants]


def with_driver(costs: JobCosts, factor: float) -> JobCosts:
    """Return the costs with another speed of the driver for each node."""

    def changed(phase: PhaseCosts) -> PhaseCosts:
        return replace(phase, driver=phase.driver * factor)

    return replace(costs, phases={name: changed(one) for name, one in costs.phases.items()})


def coarseness(costs: JobCosts, nodes: int = 512) -> list[tuple[int, float]]:
    """Return the seconds of a transfer by the number of chunks that are simulated."""
    site = replace(SITE, nodes=nodes)
    counts = (32, 64, 128)
    return [(count, relay(WORK, site, costs.staging, chunks=count).sent) for count in counts]


# --- tables --------------------------------------------------------------------------------------


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def costs_table(costs: JobCosts) -> str:
    """Return the fitted costs."""
    staging = costs.staging
    rows = [
        ("relay takes a byte in", f"{staging.receive_byte * 1e9:.2f} ns"),
        ("relay takes a chunk in", f"{staging.receive_chunk * 1e6:.0f} us"),
        ("relay passes a byte on", f"{staging.send_byte * 1e9:.2f} ns"),
        ("relay passes a chunk on", f"{staging.send_chunk * 1e6:.0f} us"),
        ("first chunk after", f"{staging.start:.2f} s"),
        ("a node joins", f"{staging.join * 1e3:.1f} ms"),
        ("content of a link's bytes", f"{staging.efficiency:.2f}"),
    ]
    for name, phase in costs.phases.items():
        per_node = f"driver {phase.driver * 1e3:.2f} ms, agent {phase.agent * 1e3:.0f} ms"
        rows.append((f"phase {name}", f"{phase.fixed:.2f} s; a node: {per_node}"))
    return table(("cost", "fitted"), rows)


def checks_table(found: Sequence[Check]) -> str:
    """Return computed beside measured times."""
    rows = []
    for one in found:
        state = "fitted" if one.fitted else ("holds" if one.holds else "**missed**")
        times = (f"{one.measured:.2f}", f"{one.computed:.2f}", f"{one.ratio:.2f}")
        rows.append((one.what, str(one.nodes), f"{one.others:.1f}", *times, state))
    names = ("what", "nodes", "other CPUs", "measured s", "computed s", "computed / measured", "")
    return table(names, rows)


def computed_table(jobs: Iterable[Computed]) -> str:
    """Return computed jobs."""
    rows = []
    for job in jobs:
        numbers = (job.sent, job.staged, job.total, job.sbcast)
        published = PUBLISHED.get(job.nodes)
        ezpz = f"{published:g}" if published else ""
        rows.append((job.what, f"{job.nodes:,}", *(f"{one:.1f}" for one in numbers), ezpz))
    names = (
        "",
        "nodes",
        "sent",
        "sent and unpacked",
        "whole job",
        "sbcast, sent",
        "ezpz, published",
    )
    return table(names, rows)


# --- the picture ---------------------------------------------------------------------------------


def draw(jobs: Sequence[Computed], path: Path) -> None:
    """Write the chart as a PNG file."""
    with tempfile.TemporaryDirectory() as settings:
        os.environ.setdefault("MPLCONFIGDIR", settings)
        # By name: matplotlib is there when the chart is drawn, not when the code is checked.
        import_module("matplotlib").use("Agg")
        plt = import_module("matplotlib.pyplot")
        figure, axes = plt.subplots(figsize=(7.5, 4.2))
        for what, colour in (("10 Gbit/s", "#7a8794"), ("100 Gbit/s", "#2a7f62")):
            own = [job for job in jobs if job.what == what]
            nodes = [job.nodes for job in own]
            label = f"relay, whole job, {what} (computed)"
            axes.plot(nodes, [job.total for job in own], "-o", color=colour, label=label)
            label = f"sbcast, sent, {what} (computed)"
            axes.plot(nodes, [job.sbcast for job in own], ":", color=colour, label=label)
        label = "ezpz, 8 GB (published)"
        axes.plot(list(PUBLISHED), list(PUBLISHED.values()), "s", color="#b3403a", label=label)
        axes.axhline(GOAL_SECONDS, color="grey", linewidth=0.6)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(_COUNTS), [f"{count:,}" for count in _COUNTS])
        axes.set_yticks(list(_TICKS), [str(tick) for tick in _TICKS])
        axes.minorticks_off()
        axes.set_xlabel("nodes", fontsize=8)
        axes.set_ylabel("seconds (the grey line is the goal of 60 s)", fontsize=8)
        axes.set_title("8 GB to the nodes", fontsize=9)
        axes.legend(fontsize=7)
        figure.tight_layout()
        # No date and no version inside: the same figures make the same file.
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)
