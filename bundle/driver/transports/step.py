"""A step: one command that runs a program on some nodes at the same time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One command that runs a program on some nodes."""

    phase: str
    """The phase of the agents; also the name of the step."""
    nodes: tuple[str, ...]
    """The nodes on which it runs."""
    cpus: int
    """CPUs of each task."""
    tasks_per_node: int = 1
    """More than one only where Slurm itself starts the ranks."""
    together: bool = False
    """True if the first task that fails takes the others with it."""
    patience: int = 0
    """Seconds that tasks may go on after the first has ended; 0 for any time."""
    image: str | None = None
    """Container image, for the pyxis plugin."""
    mounts: tuple[str, ...] = ()
    """Paths of the node that the container sees, as pyxis takes them."""
