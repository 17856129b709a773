"""The variables and directories of a rank, and of any program in an environment."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ..environment.listing import STATE
from ..node.node_root import code_path, env_path
from ..protocol.enumerations import Launcher
from ..protocol.job import Job, Launch
from ..protocol.messages import LaunchRequest, PlacedRequest
from ..redaction.secret_names import remove_secret_variables
from ..regex import compile_lazily

# --- The directories of a job under a node root --------------------------------------------------


class JobDirectories(NamedTuple):
    """The directories of a job on one node."""

    root: str
    environment: str
    job_dir: str


def locate_directories(request: PlacedRequest) -> JobDirectories:
    """Return the directories of a job on this node."""
    job, root = request.job, request.root
    task = os.environ.get("SLURM_LOCALID", "0") if job.launch.launcher is Launcher.SRUN else "0"
    job_dir = os.path.join(root, "jobs", f"{job.id}.{request.node_rank}.{task}")
    return JobDirectories(root, env_path(root, job.bundle_id), job_dir)


def locate_work_tree(job: Job, root: str) -> str:
    """Return the copy of the project's folder on a node that does not share the run directory."""
    return os.path.join(root, "jobs", f"{job.id}.work")


def locate_work_dir(job: Job, root: str) -> str:
    """Return the ranks' working directory on a node that does not share the run directory."""
    tree = locate_work_tree(job, root)
    return os.path.join(tree, job.run_subdir) if job.run_subdir else tree


def is_moving(launch: Launch) -> bool:
    """Return whether there may be several rendezvous; ranks are not tied to nodes then."""
    return launch.elastic is not None or launch.max_restarts > 0


# --- The hub's cache that a program of an environment sees: the bundle's and the user's ----------

# Hugging Face's libraries look in one directory, ``HF_HUB_CACHE``: one of the node root has links
# to the repositories of the bundle and of the user's caches; of two of a name the bundle's counts.

_OTHER_NAMES = (
    *("HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"),
    *("PYTORCH_TRANSFORMERS_CACHE", "PYTORCH_PRETRAINED_BERT_CACHE"),
)
"""Older variables for the same cache; transformers 4 lets them win over ``HF_HUB_CACHE``."""
_LAYOUT = "1"  # the layout's version; transformers 4 warns where ``version.txt`` does not have it
_REPOSITORIES = ("models--", "datasets--", "spaces--")
HUB = "hub"  # the directory of the bundle's repositories in an environment, below its own state


def make_hub_variables(directories: JobDirectories, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say where the hub's cache is: the user's if the bundle has none."""
    if os.path.isdir(os.path.join(directories.environment, STATE, HUB)):
        view = _locate_view(directories, base)
        return dict.fromkeys(("HF_HUB_CACHE", *(n for n in _OTHER_NAMES if n in base)), view)
    usual = _locate_usual_cache(base)
    is_named = any(name in base for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"))
    return {} if is_named or not os.path.isdir(usual) else {"HF_HUB_CACHE": usual}


def prepare_hub_cache(directories: JobDirectories, base: Mapping[str, str]) -> None:
    """Make the directory with links; several tasks of a node may do so at once."""
    own = os.path.join(directories.environment, STATE, HUB)
    if not os.path.isdir(own):
        return
    view = _locate_view(directories, base)
    os.makedirs(view, mode=0o700, exist_ok=True)
    for cache in (own, *_list_user_caches(base)):
        with contextlib.suppress(OSError):  # somebody else's, or none at all
            for name in os.listdir(cache):
                if name.startswith(_REPOSITORIES):
                    with contextlib.suppress(FileExistsError):
                        os.symlink(os.path.join(cache, name), os.path.join(view, name))
    with open(os.path.join(view, "version.txt"), "w", encoding="ascii") as file:
        file.write(_LAYOUT)


def _locate_view(directories: JobDirectories, base: Mapping[str, str]) -> str:
    text = "\n".join([directories.environment, *_list_user_caches(base)])
    name = hashlib.sha256(os.fsencode(text)).hexdigest()[:16]
    return os.path.join(directories.root, "cache", HUB, name)


def _list_user_caches(base: Mapping[str, str]) -> list[str]:
    named = [base[name] for name in ("HF_HUB_CACHE", *_OTHER_NAMES) if base.get(name)]
    home = base.get("HF_HOME")
    usual = os.path.join(home, "hub") if home else _locate_usual_cache(base)
    return [os.path.abspath(os.path.expanduser(cache)) for cache in (*named, usual)]


def _locate_usual_cache(base: Mapping[str, str]) -> str:
    caches = base.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(caches, "huggingface", "hub")


# --- The variables of a rank, and of any program in an environment -------------------------------

DROPPED = compile_lazily(
    r"PYTHON(PATH|HOME|STARTUP|USERBASE|EXECUTABLE|PLATLIBDIR|SAFEPATH|INSPECT|PYCACHEPREFIX)$"
    r"|VIRTUAL_ENV|CONDA_PREFIX$"
    r"|__PYVENV_LAUNCHER__$|STAGER_(ENV|PROJECT|JOB|WATCH)|STAGER_OUTPUT(_NONCE)?$"
)
"""Variables of the caller that would lead a rank out of its environment, or (``PYTHONINSPECT``)
turn its exit status into 0."""
RANK = compile_lazily(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE$"
    r"|ROLE_(NAME|RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|TORCHELASTIC_"
)
"""Variables that say which rank a process is: of the caller, which is none, or another one."""
SCHEDULER = compile_lazily(
    r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC|PBS|LSB|LSF|OAR|OAR2|SGE|PALS|PMI|HYDRA|JSM)_"
    r"|(OMPI|PMIX)_(?!MCA_)|FLUX_(JOB|TASK|URI)"
)
"""Variables of a scheduler or an MPI launcher; those of MCA are the user's own settings."""
USE_CPU = "ACCELERATE_USE_CPU"  # makes accelerate, and so the Trainer of transformers, use gloo
_RECORDS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""How many collectives PyTorch's flight recorder keeps; the second is the older name."""
_TORCHRUN_SECONDS = 30  # until torchrun kills ranks that it told to end (LaunchConfig, 2.13)
ENV = "assets/.stager-env"  # has a link to an asset for each variable of ``assets.env``
CODE = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""The variables that say where compiled code is kept, and the directory of each. Inductor's has all
caches of ``torch.compile`` (``cache_dir`` in runtime/cache_dir_utils.py, torch 2.13)."""
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def make_environment_variables(
    directories: JobDirectories,
    base: Mapping[str, str],
    passed: Collection[str] = (),
    *,
    as_rank: bool = False,
    code: str = "",
    caches: Sequence[str] = (),
) -> dict[str, str]:
    """Return the variables of any program in an environment: isolated, offline, without secrets.

    ``code`` names the directory for compiled code that is brought back, and ``caches`` further
    variables that lead into it.
    """
    kept = remove_secret_variables(base, passed)
    env = {
        name: value
        for name, value in kept.items()
        if not DROPPED.match(name) and (as_rank or not RANK.match(name))
    }
    usual, place = os.path.join(directories.root, "cache"), directories.environment
    compiled = code_path(directories.root, code) if code else usual
    return {
        "HF_HOME": os.path.join(usual, "huggingface"),
        # A tracker that would wait for a server writes to the run directory instead.
        "WANDB_MODE": "offline",
        # fsspec, and so datasets, otherwise looks into the home as it is imported.
        "FSSPEC_CONFIG_DIR": os.path.join(usual, "fsspec"),
        **{name: os.path.join(compiled, folder) for name, folder in CODE.items()},
        **{name: os.path.join(compiled, name) for name in caches if code},
        **env,
        **make_hub_variables(directories, env),
        **_OFFLINE,
        **_read_asset_variables(place),
        "PATH": os.pathsep.join([os.path.join(place, "bin"), env.get("PATH") or os.defpath]),
        "VIRTUAL_ENV": place,
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "STAGER_ENV": place,
        "STAGER_PROJECT": os.path.join(place, "project"),
        "STAGER_ASSETS": os.path.join(place, "assets"),
        "STAGER_TRAINER": os.path.join(place, STATE, "site"),
        "STAGER_JOB_DIR": directories.job_dir,
    }


def drop_schedulers(base: Mapping[str, str]) -> dict[str, str]:
    """Drop what programs take for their rank: Lightning starts ``SLURM_NTASKS`` processes."""
    return {name: value for name, value in base.items() if not SCHEDULER.match(name)}


def _read_asset_variables(environment: str) -> dict[str, str]:
    folder, found = os.path.join(environment, ENV), {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            goal = os.readlink(os.path.join(folder, name))
            found[name] = os.path.normpath(os.path.join(folder, goal))
    return found


def make_rank_variables(
    directories: JobDirectories,
    request: LaunchRequest,
    interface: str,
    threads: int,
    base: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables that ``torchrun`` gets on one node and passes to its ranks."""
    launch, group, store = request.job.launch, request.group, request.job.code_store
    code, caches = request.code, store.caches if store else ()
    env = {
        **make_environment_variables(directories, base, launch.pass_env, code=code, caches=caches),
        "STAGER_ATTEMPT": str(request.attempt),
        "STAGER_NODE": request.node,
        "PYTORCH_DIST_BACKEND": group.backend,
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": interface,
    }
    if group.on_cpus:
        # Else the Trainer of transformers starts no process group where there is no GPU, and each
        # rank trains on all of the data by itself (ParallelMode.NOT_PARALLEL).
        env.setdefault(USE_CPU, "true")
    if group.backend == "nccl":  # without "=" it would be a prefix (NCCL user guide)
        env["NCCL_SOCKET_IFNAME"] = f"={interface}"
    if launch.grace_seconds > _TORCHRUN_SECONDS:
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(launch.grace_seconds)
    if is_moving(launch):
        # Else restarted ranks read addresses of ranks that have ended in the first attempt's store
        # (use_agent_store in dynamic_rendezvous.py, torch 2.13).
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if launch.watch:
        env["STAGER_WATCH"] = "1"
        if _RECORDS[1] not in env:
            env.setdefault(_RECORDS[0], "2000")
    return env


def make_group_variables(
    world: object, here: object, node_rank: object, address: str, port: object
) -> dict[str, str]:
    """Return what torchrun sets for all ranks of a node: ``here`` of ``world`` ranks."""
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
    values = map(str, (world, here, node_rank, node_rank))
    return {**dict(zip(names, values)), "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def make_task_variables(
    slurm: Mapping[str, str], world: str, here: object, address: str, port: object
) -> dict[str, str]:
    """Return what torchrun would set for a rank, from the variables of a Slurm task."""
    return {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        **make_group_variables(world, here, slurm["SLURM_NODEID"], address, port),
    }
