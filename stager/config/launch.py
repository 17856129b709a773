"""``[launch]``: the settings for starting ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bundle.protocol.enumerations import Backend, Launcher
from bundle.protocol.job import ONE_A_CPU

from . import checks
from .table import Table

GRACE_SECONDS = 7
"""Short, since Slurm kills remaining processes KillWait (30 s by default) after it ended a job."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """``[launch]``: the settings for starting ranks."""

    nproc_per_node: int | None
    """Ranks on each node; None for one a GPU, else 1; ``ONE_A_CPU``."""
    launcher: Launcher
    """The program that starts the ranks."""
    backend: Backend
    """The backend of torch.distributed."""
    interface: str | tuple[tuple[str, str], ...]
    """``auto``, one interface's name, or pairs of a node pattern and an interface's name."""
    omp_num_threads: int | None
    """Threads a rank, 1 or more; None for the task's CPUs divided by its ranks."""
    max_restarts: int
    """Number of times torchrun restarts a failed group of ranks, 0 or more."""
    grace_seconds: int
    """Grace period of ranks after SIGTERM, in seconds, 1 or more."""
    pass_env: tuple[str, ...]
    """Names of secret variables that ranks get; others that look like secrets are not passed on."""
    on_failure: tuple[str, ...]
    """The command that gets the verdict of a job that failed, and its arguments; empty for none."""


def ranks_on_node(nproc: int | str, backend: Backend) -> dict[str, Any]:
    """Return the fields of a :class:`LaunchConfig` for a number or one of torchrun's words.

    Where the backend is not chosen, ``gpu`` asks for a GPU on each node, and ``cpu`` for none.
    """
    known: dict[str, tuple[int | None, Backend]] = {
        "auto": (None, backend),
        "gpu": (None, Backend.NCCL),
        "cpu": (ONE_A_CPU, Backend.GLOO),
    }
    number, own = known[nproc] if isinstance(nproc, str) else (nproc, backend)
    return {
        "nproc_per_node": number,
        "backend": own if backend is Backend.AUTO else backend,
    }


def launch(table: Table) -> LaunchConfig:
    """Read the table; problems are noted in it."""
    count = f'{checks.COUNT}, or "auto"'
    nproc = table.take("nproc-per-node", "auto", checks.ranks, checks.RANKS)
    launcher = table.take(
        "launcher",
        Launcher.TORCHRUN,
        checks.member_of(Launcher),
        '"torchrun", "srun" or "processes"',
    )
    backend = table.take(
        "backend", Backend.AUTO, checks.member_of(Backend), '"auto", "nccl" or "gloo"'
    )
    return LaunchConfig(
        **ranks_on_node(nproc, backend),
        launcher=launcher,
        interface=table.take(
            "interface",
            "auto",
            checks.interface,
            '"auto", a name like "ens1f1", or a table { "node0[1-3]" = "ens1f1" }',
        ),
        omp_num_threads=table.take("omp-num-threads", None, checks.whole_or_auto(1), count, "auto"),
        max_restarts=table.take(
            "max-restarts", 0, checks.whole(0), f"a whole number from 0 to {checks.MOST}"
        ),
        grace_seconds=table.take("grace-seconds", GRACE_SECONDS, checks.whole(1), checks.COUNT),
        pass_env=table.take(
            "pass-env",
            (),
            checks.each(checks.matching(checks.VARIABLE)),
            'a list of names of variables, without their values: ["HF_TOKEN"]',
        ),
        on_failure=table.take("on-failure", (), checks.command, checks.COMMAND),
    )
