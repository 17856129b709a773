"""What is started on a node, and with which variables: pure functions, no effects.

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
"""Lets accelerate, and so the Trainer of transformers, meet over gloo."""

_TORCHRUN_SECONDS = 30
"""After which torchrun itself kills ranks that it told to end (``LaunchConfig``, torch 2.13)."""
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Place:
    """Where things lie on one node."""

    root: str
    """The node root."""
    environment: str
    """The unpacked bundle."""
    job_dir: str
    """This job's private directory under the node root."""


@dataclass(frozen=True)
class Group:
    """One node's part in the process group."""

    node: str
    """The node's name."""
    node_rank: int
    """Its place among the nodes, from 0."""
    nnodes: int
    """How many nodes there are."""
    nproc: int
    """Ranks on this node."""
    address: str
    """Address of the head node."""
    port: int
    """Port of the rendezvous on the head node."""
    interface: str
    """Network interface that this node reaches the head by."""
    backend: str
    """``gloo`` or ``nccl``."""
    threads: int
    """CPU threads of one rank."""
    max_restarts: int = 0
    """How often failed ranks are started again."""
    elastic: tuple[int, int] | None = None
    """Fewest and most nodes that the group goes on with."""
    own_address: str = ""
    """This node's address on its interface."""
    grace_seconds: int = 0
    """Seconds that ranks get to end once they are told to."""
    on_cpus: bool = False
    """Whether ranks must leave GPUs alone, since some node has none."""

    @property
    def moving(self) -> bool:
        """Whether ranks may meet more than once; they are not tied to nodes then."""
        return self.elastic is not None or self.max_restarts > 0


def environment_variables(
    place: Place, base: Mapping[str, str], passed: Collection[str] = ()
) -> dict[str, str]:
    """The variables of any program in an environment: isolated from the node, and offline.

    Being a virtual environment keeps the node's own site-packages out; ``PYTHONNOUSERSITE`` keeps
    ``~/.local`` out, in child processes too. An ``HF_HOME`` the user has set is kept. No bytecode
    is written: a published environment brings its own and is never modified. Secrets stay behind:
    every program of an environment gets its variables here, however its node was reached.

    Args:
        place: where the environment lies.
        base: the caller's variables.
        passed: names of the secrets that it gets all the same.
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
    place: Place, group: Group, base: Mapping[str, str], passed: Collection[str] = ()
) -> dict[str, str]:
    """The variables that ``torchrun`` gets on one node and hands to its ranks.

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
        # Else ranks that are started again meet in the store of the first time, where they read
        # addresses of ranks that have ended (use_agent_store in dynamic_rendezvous.py, torch 2.13).
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return env


def wrapper(place: Place, command: Sequence[str]) -> list[str]:
    """The arguments that run a user's command under the wrapper."""
    return [os.path.join(place.job_dir, "run_wrapper.py"), *command]


def torchrun(place: Place, group: Group, run_id: str, program: Sequence[str]) -> list[str]:
    """The command that starts all ranks of one node.

    The static rendezvous gives RANK = node rank x ranks a node + local rank, and binds the port on
    the head only; it does not bring ranks together a second time, not even those of one node (they
    wait for ever, torch 2.13). Where that may be needed nodes meet through c10d, which hands out
    node ranks by itself; it is told which node is the host, as it would otherwise guess from names
    (``_matches_machine_hostname``). The run's id keeps two jobs that meet on one port apart.
    """
    # No node joins an allocation later; and for one that may come torchrun waits half a minute.
    least = min(group.elastic[0], group.nnodes) if group.elastic else group.nnodes
    most = group.nnodes
    if group.moving:
        meeting = [
            f"--nnodes={least}:{most}" if least < most else f"--nnodes={most}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={_host(group.address)}:{group.port}",
            f"--rdzv-conf=is_host={int(group.node_rank == 0)}",
            f"--local-addr={group.own_address}",
        ]
    else:
        meeting = [
            f"--nnodes={group.nnodes}",
            f"--node-rank={group.node_rank}",
            f"--master-addr={group.address}",
            f"--master-port={group.port}",
            "--rdzv-backend=static",
        ]
    return [
        os.path.join(place.environment, "bin", "python"),
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={group.nproc}",
        *meeting,
        f"--rdzv-id={run_id}",
        f"--max-restarts={group.max_restarts}",
        f"--log-dir={os.path.join(place.job_dir, 'torchrun')}",
        *program,
    ]


def possible_ranks(group: Group) -> list[range]:
    """Return for each local rank of a node the ranks that torchrun may make it.

    Ranks that may be started again are dealt to nodes anew each time, a node's worth at a time.
    """
    if group.moving:
        world = group.nnodes * group.nproc
        return [range(local, world, group.nproc) for local in range(group.nproc)]
    first = group.node_rank * group.nproc
    return [range(rank, rank + 1) for rank in range(first, first + group.nproc)]


def native(place: Place, program: Sequence[str]) -> list[str]:
    """The command of one rank that Slurm itself starts."""
    return [os.path.join(place.environment, "bin", "python"), *program]


def native_variables(group: Group, slurm: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set for a rank, from the variables that Slurm sets for a task.

    Args:
        group: the node's part.
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
    """``nccl`` where every node has a GPU, else ``gloo``; or what the user asked for.

    Args:
        setting: ``auto``, ``gloo`` or ``nccl``.
        gpus: how many GPUs each node has.

    Raises:
        ValueError: NCCL was asked for and some nodes have no GPU; the message names them.
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
    """Return whether ranks train on CPUs: they meet over gloo, and not every node has a GPU."""
    return backend == "gloo" and 0 in gpus.values()


def choose_nproc(setting: int | None, gpus: Mapping[str, int]) -> int:
    """Ranks on each node: as set, else as many as the node with the fewest GPUs has, at least 1."""
    return setting if setting is not None else max(1, min(gpus.values()))


def choose_threads(setting: int | None, cpus: int, nproc: int) -> int:
    """CPU threads of one rank: as set, else an equal share of the node's CPUs, at least 1."""
    return setting if setting is not None else max(1, cpus // nproc)
