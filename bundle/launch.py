"""What is started on a node, and with which variables: pure functions, no effects.

Launching is composition: ``torchrun(wrapper(command))``, from argument list to argument list.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .merge import STATE

DROPPED = re.compile(
    r"PYTHON(PATH|HOME|STARTUP|USERBASE|EXECUTABLE|PLATLIBDIR|SAFEPATH|INSPECT|PYCACHEPREFIX)$"
    r"|VIRTUAL_ENV|CONDA_PREFIX$"
    r"|__PYVENV_LAUNCHER__$|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE$"
    r"|ROLE_(NAME|RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|TORCHELASTIC_|STAGER_(ENV|PROJECT|JOB)"
)
"""Variables of the caller that would lead a rank out of its environment or give it a wrong rank.

``PYTHONINSPECT`` would turn the exit status of a rank that failed into 0, ``PYTHONPYCACHEPREFIX``
would hide the bytecode that came with the bundle. ``LD_PRELOAD`` and the like are the user's own.
"""

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
    """How often failed ranks are started again; within one node only, see :func:`torchrun`."""


def environment_variables(place: Place, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of any program in an environment: isolated from the node, and offline.

    Being a virtual environment keeps the node's own site-packages out; ``PYTHONNOUSERSITE`` keeps
    ``~/.local`` out, in child processes too. An ``HF_HOME`` the user has set is kept. No bytecode
    is written: a published environment brings its own and is never modified.

    Args:
        place: where the environment lies.
        base: the caller's variables.
    """
    env = {name: value for name, value in base.items() if not DROPPED.match(name)}
    caches = os.path.join(place.root, "cache")
    return {
        **{
            "HF_HOME": os.path.join(caches, "huggingface"),
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


def rank_variables(place: Place, group: Group, base: Mapping[str, str]) -> dict[str, str]:
    """The variables that ``torchrun`` gets on one node and hands to its ranks.

    Gloo's interface is an exact name; NCCL's is a prefix unless it begins with ``=`` (NCCL user
    guide, ``NCCL_SOCKET_IFNAME``).
    """
    env = {
        **environment_variables(place, base),
        "STAGER_NODE": group.node,
        "PYTORCH_DIST_BACKEND": group.backend,
        "OMP_NUM_THREADS": str(group.threads),
        "GLOO_SOCKET_IFNAME": group.interface,
    }
    if group.backend == "nccl":
        env["NCCL_SOCKET_IFNAME"] = f"={group.interface}"
    return env


def wrapper(place: Place, command: Sequence[str]) -> list[str]:
    """The arguments that run a user's command under the wrapper."""
    return [os.path.join(place.job_dir, "run_wrapper.py"), *command]


def torchrun(place: Place, group: Group, job_id: str, program: Sequence[str]) -> list[str]:
    """The command that starts all ranks of one node.

    The static rendezvous gives RANK = node rank x ranks a node + local rank, and binds the port on
    the head only; it does not bring the ranks of several nodes together a second time. The job's
    id keeps two jobs that meet on one port apart.
    """
    return [
        os.path.join(place.environment, "bin", "python"),
        "-m",
        "torch.distributed.run",
        f"--nnodes={group.nnodes}",
        f"--nproc-per-node={group.nproc}",
        f"--node-rank={group.node_rank}",
        f"--master-addr={group.address}",
        f"--master-port={group.port}",
        "--rdzv-backend=static",
        f"--rdzv-id={job_id}",
        f"--max-restarts={group.max_restarts}",
        f"--log-dir={os.path.join(place.job_dir, 'torchrun')}",
        *program,
    ]


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


def choose_nproc(setting: int | None, gpus: Mapping[str, int]) -> int:
    """Ranks on each node: as set, else as many as the node with the fewest GPUs has, at least 1."""
    return setting if setting is not None else max(1, min(gpus.values()))


def choose_threads(setting: int | None, cpus: int, nproc: int) -> int:
    """CPU threads of one rank: as set, else an equal share of the node's CPUs, at least 1."""
    return setting if setting is not None else max(1, cpus // nproc)
