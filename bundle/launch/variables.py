"""The variables of a rank, and of any program in an environment."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Mapping

from ..environment.listing import STATE
from ..redaction.secrets import without_secrets
from . import hub_cache
from .directories import JobDirectories
from .group import RankGroup

DROPPED = re.compile(
    r"PYTHON(PATH|HOME|STARTUP|USERBASE|EXECUTABLE|PLATLIBDIR|SAFEPATH|INSPECT|PYCACHEPREFIX)$"
    r"|VIRTUAL_ENV|CONDA_PREFIX$"
    r"|__PYVENV_LAUNCHER__$|STAGER_(ENV|PROJECT|JOB)|STAGER_OUTPUT(_NONCE)?$"
)
"""Variables of the caller that would lead a rank out of its environment.

``PYTHONINSPECT`` would turn the exit status of a rank that failed into 0, ``PYTHONPYCACHEPREFIX``
would hide the bytecode that came with the bundle. ``LD_PRELOAD`` and the like are the user's own.
"""
RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE$"
    r"|ROLE_(NAME|RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|TORCHELASTIC_"
)
"""Variables that say which rank a process is: of the caller, which is none, or another one."""
SCHEDULER = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC|PBS|LSB|LSF|OAR|OAR2|SGE|PALS|PMI|HYDRA|JSM)_"
    r"|(OMPI|PMIX)_(?!MCA_)|FLUX_(JOB|TASK|URI)"
)
"""Variables of a scheduler or an MPI launcher; those of MCA are the user's own settings."""
USE_CPU = "ACCELERATE_USE_CPU"
"""Makes accelerate, and so the Trainer of transformers, use gloo."""
_TORCHRUN_SECONDS = 30
"""Seconds until torchrun itself kills ranks that it told to end (``LaunchConfig``, torch 2.13)."""
ENV = "assets/.stager-env"
"""The directory in an environment with a link to an asset for each variable of ``assets.env``."""
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def environment_variables(
    directories: JobDirectories,
    base: Mapping[str, str],
    passed: Collection[str] = (),
    *,
    as_rank: bool = False,
) -> dict[str, str]:
    """Return the variables of any program in an environment: isolated from the node, and offline.

    The virtual environment keeps the node's own site-packages out; ``PYTHONNOUSERSITE`` keeps
    ``~/.local`` out, in child processes too. An ``HF_HOME`` the user has set is kept, and so are
    models in the user's cache, see :mod:`.hub_cache`. No bytecode is written: a published
    environment brings its own and is never modified. Secrets are removed: every program of an
    environment gets its variables here, however its node was reached.
    """
    kept = without_secrets(base, passed)
    env = {
        name: value
        for name, value in kept.items()
        if not DROPPED.match(name) and (as_rank or not RANK.match(name))
    }
    caches = os.path.join(directories.root, "cache")
    return {
        **{
            "HF_HOME": os.path.join(caches, "huggingface"),
            # A tracker that would wait for a server writes to the run directory instead.
            "WANDB_MODE": "offline",
            # fsspec, and so datasets, otherwise looks into the home as it is imported.
            "FSSPEC_CONFIG_DIR": os.path.join(caches, "fsspec"),
            "TRITON_CACHE_DIR": os.path.join(caches, "triton"),
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(caches, "inductor"),
        },
        **env,
        **hub_cache.variables(directories, env),
        **_OFFLINE,
        **_asset_variables(directories.environment),
        "PATH": os.pathsep.join(
            [os.path.join(directories.environment, "bin"), env.get("PATH") or os.defpath]
        ),
        "VIRTUAL_ENV": directories.environment,
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "STAGER_ENV": directories.environment,
        "STAGER_PROJECT": os.path.join(directories.environment, "project"),
        "STAGER_ASSETS": os.path.join(directories.environment, "assets"),
        "STAGER_TRAINER": os.path.join(directories.environment, STATE, "site"),
        "STAGER_JOB_DIR": directories.job_dir,
    }


def drop_schedulers(base: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's variables for ranks that no scheduler starts.

    Programs take such variables for their rank: Lightning starts as many processes as
    ``SLURM_NTASKS`` says, for example.
    """
    return {name: value for name, value in base.items() if not SCHEDULER.match(name)}


def _asset_variables(environment: str) -> dict[str, str]:
    """Return the variables for the paths of assets; none in an older environment."""
    folder = os.path.join(environment, ENV)
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            goal = os.readlink(os.path.join(folder, name))
            found[name] = os.path.normpath(os.path.join(folder, goal))
    return found


def rank_variables(
    directories: JobDirectories,
    group: RankGroup,
    base: Mapping[str, str],
    passed: Collection[str] = (),
) -> dict[str, str]:
    """Return the variables that ``torchrun`` gets on one node and passes to its ranks.

    Gloo's interface is an exact name; NCCL's is a prefix unless it begins with ``=`` (NCCL user
    guide, ``NCCL_SOCKET_IFNAME``).
    """
    env = {
        **environment_variables(directories, base, passed),
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


def group_variables(group: RankGroup) -> dict[str, str]:
    """Return the variables that all ranks of a node share where torchrun does not set them."""
    return {
        "WORLD_SIZE": str(group.nnodes * group.nproc),
        "LOCAL_WORLD_SIZE": str(group.nproc),
        "GROUP_RANK": str(group.node_rank),
        "NODE_RANK": str(group.node_rank),
        "MASTER_ADDR": group.address,
        "MASTER_PORT": str(group.port),
    }


def native_variables(group: RankGroup, slurm: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank, from those of a Slurm task."""
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
