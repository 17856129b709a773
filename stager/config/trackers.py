"""Experiment trackers that write to the run directory where there is no network."""

from __future__ import annotations

from collections.abc import Iterable

_FOLDERS = {
    "wandb": ("wandb",),
    "mlflow": ("mlruns", "mlflow.db"),
    "mlflow-skinny": ("mlruns", "mlflow.db"),
    "tensorboard": ("runs",),
    "tensorboardx": ("runs",),
}
"""By package, the names that it gives its results by default."""


def tracker_outputs(packages: Iterable[str]) -> tuple[str, ...]:
    """Return the names that trackers give their results, of those among some packages."""
    present = {*packages}
    names = [name for package, names in _FOLDERS.items() if package in present for name in names]
    return tuple(dict.fromkeys(names))
