"""The forecast against jobs: rates from some numbers of nodes, and the time on others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bundle.driver.forecast import Nodes, forecast_staging
from stager import forecast
from stager.forecast import MeasuredJob
from stager.logs.job_record import read_records

from .rounds import Samples, Value

FITTED = 2
"""The number of nodes whose jobs the rates are taken from; the others are predicted."""


def seen(logs: Path) -> MeasuredJob | None:
    """Return what a job showed, from the events in the log directory that it had for itself."""
    files = logs.glob("events.*.jsonl")
    return forecast.measure_job(record for file in files for record in read_records(file))


def compare(
    jobs: Mapping[int, Sequence[MeasuredJob]], samples: Samples, say: Callable[[str], None]
) -> None:
    """Predict the staging on nodes that had nothing; nothing where no rates can be taken.

    Args:
        jobs: what jobs on so many nodes showed; all nodes shared one machine.
        samples: take what was predicted, beside what was measured.
        say: told how far the two are apart.
    """
    known = jobs.get(FITTED, ())
    if not known:
        return
    rates = forecast.estimate_rates(known, one_machine=True).rates
    for count, found in sorted(jobs.items()):
        for one in found:
            nodes = Nodes(one.nodes, cpus=one.cpus, sharing=one.nodes)
            predicted = forecast_staging(one.work, nodes, rates).seconds
            samples.add(f"slurm/{count}/forecast/cold", Value(value=predicted))
            fitted = " (fitted to these)" if count == FITTED else ""
            say(
                f"  forecast, {count} nodes: {one.stage:.2f} s measured,"
                f" {predicted:.2f} predicted: {one.stage / predicted:.2f}{fitted}"
            )
