"""The commands that start ranks on a node: pure functions, no effects.

Launching is composition: ``torchrun(wrapper(command))``, from argument list to argument list.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from .directories import JobDirectories
from .group import RankGroup

PROCESSES = "run_processes.py"
"""The launcher of ranks that are plain processes, beside the wrapper."""


def wrapper(directories: JobDirectories, command: Sequence[str]) -> list[str]:
    """Return the arguments that run a user's command under the wrapper."""
    return [os.path.join(directories.job_dir, "run_wrapper.py"), *command]


def torchrun(
    directories: JobDirectories, group: RankGroup, run_id: str, program: Sequence[str]
) -> list[str]:
    """Return the command that starts all ranks of one node.

    The run's id keeps two jobs apart that use one port.
    """
    return [
        os.path.join(directories.environment, "bin", "python"),
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={group.nproc}",
        *(_dynamic_rendezvous(group) if group.moving else _static_rendezvous(group)),
        f"--rdzv-id={run_id}",
        f"--max-restarts={group.max_restarts}",
        f"--log-dir={os.path.join(directories.job_dir, 'torchrun')}",
        *program,
    ]


def _static_rendezvous(group: RankGroup) -> list[str]:
    """Return the options of a rendezvous that happens once.

    It gives RANK = node rank x ranks a node + local rank, and binds the port on the head only. It
    does not bring ranks together a second time, not even those of one node (they wait for ever,
    torch 2.13).
    """
    return [
        f"--nnodes={group.nnodes}",
        f"--node-rank={group.node_rank}",
        f"--master-addr={group.address}",
        f"--master-port={group.port}",
        "--rdzv-backend=static",
    ]


def _dynamic_rendezvous(group: RankGroup) -> list[str]:
    """Use c10d, which can repeat; name the head, or ``_matches_machine_hostname`` guesses it."""
    # No node joins an allocation later; and for one that may come torchrun waits half a minute.
    most = group.nnodes
    least = min(group.elastic[0], most) if group.elastic else most
    return [
        f"--nnodes={least}:{most}" if least < most else f"--nnodes={most}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={_host(group.address)}:{group.port}",
        f"--rdzv-conf=is_host={int(group.node_rank == 0)}",
        f"--local-addr={group.own_address}",
    ]


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def possible_ranks(group: RankGroup) -> list[range]:
    """Return for each local rank of a node the ranks that torchrun may assign to it.

    Ranks that may be restarted are assigned anew each time, in blocks of one node.
    """
    if group.moving:
        world = group.nnodes * group.nproc
        return [range(local, world, group.nproc) for local in range(group.nproc)]
    first = group.node_rank * group.nproc
    return [range(rank, rank + 1) for rank in range(first, first + group.nproc)]


def native(directories: JobDirectories, program: Sequence[str]) -> list[str]:
    """Return the command of one rank that Slurm itself starts."""
    return [os.path.join(directories.environment, "bin", "python"), *program]


def processes(directories: JobDirectories, group: RankGroup, program: Sequence[str]) -> list[str]:
    """Return the command that starts all ranks of one node as plain processes."""
    return [
        os.path.join(directories.environment, "bin", "python"),
        os.path.join(directories.job_dir, PROCESSES),
        *(str(group.nproc), str(group.node_rank * group.nproc), str(group.grace_seconds)),
        *program,
    ]
