"""The commands that are started on a node, and their variables: pure functions, no effects.

Launching is composition: ``torchrun(wrapper(command))``, from argument list to argument list.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..environment.merge import STATE
from ..redaction.masking import without_secrets

DROPPED = re.compile(
    r"PYTHON(PATH|HOME|STARTUP|USERBASE|EXECUTABLE|PLATLIBDIR|SAFEPATH|INSPECT|PYCACHEPREFIX)$"
    r"|VIRTUAL_ENV|CONDA_PREFIX$"
    r"|__PYVENV_LAUNCHER__$|(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE$"
    r"|ROLE_(NAME|RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|TORCHELASTIC_|STAGER_(ENV|PROJECT|JOB)"
    r"|STAGER_OUTPUT(_NONCE)?$"
)
"""Variables of the caller that would lead a rank out of its environment or give it a wrong rank.

``PYTHONINSPECT`` would turn the exit status of a rank that failed into 0, ``PYTHONPYCACHEPREFIX``
would hide the bytecode that came with the bundle. ``LD_PRELOAD`` and the like are the user's own.
"""

USE_CPU = "ACCELERATE_USE_CPU"
"""Makes accelerate, and so the Trainer of transformers, use gloo."""

_TORCHRUN_SECONDS = 30
"""Seconds until torchrun itself kills ranks that it told to end (``LaunchConfig``, torch 2.13)."""
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class JobDirectories:
    """The directories of a job on one node."""

    root: str
    """The node root."""
    environment: str
    """The unpacked bundle."""
    job_dir: str
    """This job's private directory under the node root."""


@dataclass(frozen=True)
class RankGroup:
    """One node's part in the process group."""

    node: str
    """The node's name."""
    node_rank: int
    """Its rank among the nodes, from 0."""
    nnodes: int
    """The number of nodes."""
    nproc: int
    """Ranks on this node."""
    address: str
    """Address of the head node."""
    port: int
    """Port of the rendezvous on the head node."""
    interface: str
    """The network interface by which this node reaches the head."""
    backend: str
    """``gloo`` or ``nccl``."""
    threads: int
    """CPU threads of one rank."""
    max_restarts: int = 0
    """The number of times that failed ranks are restarted."""
    elastic: tuple[int, int] | None = None
    """The minimum and maximum of nodes that the group continues with."""
    own_address: str = ""
    """This node's address on its interface."""
    grace_seconds: int = 0
    """Grace period of ranks after SIGTERM, in seconds."""
    on_cpus: bool = False
    """True if ranks must not use GPUs, since some node has none."""

    @property
    def moving(self) -> bool:
        """True if there may be several rendezvous; ranks are not tied to nodes then."""
        return self.elastic is not None or self.max_restarts > 0


def environment_variables(
    place: JobDirectories, base: Mapping[str, str], passed: Collection[str] = ()
) -> dict[str, str]:
    """Return the variables of any program in an environment: isolated from the node, and offline.

    The virtual environment keeps the node's own site-packages out; ``PYTHONNOUSERSITE`` keeps
    ``~/.local`` out, in child processes too. An ``HF_HOME`` the user has set is kept. No bytecode
    is written: a published environment brings its own and is never modified. Secrets are removed:
    every program of an environment gets its variables here, however its node was reached.

    Args:
        place: the directories, with the environment's.
        base: the caller's variables.
        passed: names of the secrets that it gets nevertheless.
    """
    kept = without_secrets(base, passed)
    env = {name: value for name, value in kept.items() if not DROPPED.match(name)}
    caches = os.path.join(place.root, "cache")
    return {
        **{
            "HF_HOME": os.path.join(caches, "huggingface"),
            # fsspec, and so datasets, otherwise looks into the home as it is imported.
            "FSSPEC_CONFIG_DIR": os.path.join(caches, "fsspec"),
            "TRITON_CACHE_DIR": os.path.join(caches, "triton"),
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(caches, "inductor"),
        },
        **env,
        **_OFFLINE,
        "PATH": os.pathsep.join(
            [os.path.join(place.environment, "bin"), env.get("PATH") or os.defpath]
        ),
        "VIRTUAL_ENV": place.environment,
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "STAGER_ENV": place.environment,
        "STAGER_PROJECT": os.path.join(place.environment, "project"),
        "STAGER_ASSETS": os.path.join(place.environment, "assets"),
        "STAGER_TRAINER": os.path.join(place.environment, STATE, "site"),
        "STAGER_JOB_DIR": place.job_dir,
    }


def rank_variables(
    place: JobDirectories, group: RankGroup, base: Mapping[str, str], passed: Collection[str] = ()
) -> dict[str, str]:
    """Return the variables that ``torchrun`` gets on one node and passes to its ranks.

    Gloo's interface is an exact name; NCCL's is a prefix unless it begins with ``=`` (NCCL user
    guide, ``NCCL_SOCKET_IFNAME``).
    """
    env = {
        **environment_variables(place, base, passed),
        "STAGER_NODE": group.node,
        "PYTORCH_DIST_BACKEND": group.backend,
        "OMP_NUM_THREADS": str(group.threads),
        "GLOO_SOCKET_IFNAME": group.interface,
    }
    if group.on_cpus:
        # Without it the Trainer of transformers starts no process group where there is no GPU, and
        # each rank trains on all of the data by itself (ParallelMode.NOT_PARALLEL).
        env.setdefault(USE_CPU, "true")
    if group.backend == "nccl":
        env["NCCL_SOCKET_IFNAME"] = f"={group.interface}"
    if group.grace_seconds > _TORCHRUN_SECONDS:
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(group.grace_seconds)
    if group.moving:
        # Else restarted ranks use the store of the first attempt, where they read addresses of
        # ranks that have ended (use_agent_store in dynamic_rendezvous.py, torch 2.13).
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return env


def wrapper(place: JobDirectories, command: Sequence[str]) -> list[str]:
    """Return the arguments that run a user's command under the wrapper."""
    return [os.path.join(place.job_dir, "run_wrapper.py"), *command]


def torchrun(
    place: JobDirectories, group: RankGroup, run_id: str, program: Sequence[str]
) -> list[str]:
    """Return the command that starts all ranks of one node.

    The run's id keeps two jobs apart that use one port.
    """
    return [
        os.path.join(place.environment, "bin", "python"),
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={group.nproc}",
        *(_dynamic_rendezvous(group) if group.moving else _static_rendezvous(group)),
        f"--rdzv-id={run_id}",
        f"--max-restarts={group.max_restarts}",
        f"--log-dir={os.path.join(place.job_dir, 'torchrun')}",
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
    """Return the options of a rendezvous that may be repeated, through c10d.

    It assigns node ranks by itself; the head is named to it, as it would otherwise guess the host
    from names (``_matches_machine_hostname``).
    """
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


def possible_ranks(group: RankGroup) -> list[range]:
    """Return for each local rank of a node the ranks that torchrun may assign to it.

    Ranks that may be restarted are assigned anew each time, in blocks of one node.
    """
    if group.moving:
        world = group.nnodes * group.nproc
        return [range(local, world, group.nproc) for local in range(group.nproc)]
    first = group.node_rank * group.nproc
    return [range(rank, rank + 1) for rank in range(first, first + group.nproc)]


def native(place: JobDirectories, program: Sequence[str]) -> list[str]:
    """Return the command of one rank that Slurm itself starts."""
    return [os.path.join(place.environment, "bin", "python"), *program]


def native_variables(group: RankGroup, slurm: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank, from those of a Slurm task.

    Args:
        group: the node's part in the process group.
        slurm: the task's variables.
    """
    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(group.nproc),
        "GROUP_RANK": slurm["SLURM_NODEID"],
        "NODE_RANK": slurm["SLURM_NODEID"],
        "MASTER_ADDR": group.address,
        "MASTER_PORT": str(group.port),
    }


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def choose_backend(setting: str, gpus: Mapping[str, int]) -> str:
    """Return the backend as set; ``auto`` is ``nccl`` if every node has a GPU, else ``gloo``.

    Args:
        setting: ``auto``, ``gloo`` or ``nccl``.
        gpus: the number of GPUs of each node.

    Raises:
        ValueError: NCCL is set and some nodes have no GPU; the message names them.
    """
    without = sorted(node for node, count in gpus.items() if count == 0)
    if setting == "auto":
        return "gloo" if without else "nccl"
    if setting == "nccl" and without:
        raise ValueError(
            f"the nccl backend needs a GPU on every node; none on {', '.join(without)}"
        )
    return setting


def must_use_cpus(backend: str, gpus: Mapping[str, int]) -> bool:
    """Tell whether ranks train on CPUs: the backend is gloo, and not every node has a GPU."""
    return backend == "gloo" and 0 in gpus.values()


def choose_nproc(setting: int | None, gpus: Mapping[str, int]) -> int:
    """Return the ranks on each node: as set, else the fewest GPUs of any node, at least 1."""
    if setting is not None:
        return setting
    return max(1, min(gpus.values()))


def choose_threads(setting: int | None, cpus: int, nproc: int) -> int:
    """Return the CPU threads of one rank: as set, else its share of the CPUs, at least 1."""
    if setting is not None:
        return setting
    return max(1, cpus // nproc)
