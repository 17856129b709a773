"""What is started, and with which variables: literal argument lists and environments."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.launch import commands
from bundle.launch.commands import choose_backend, choose_nproc, choose_threads, must_use_cpus
from bundle.launch.exec_command import step_variables
from bundle.launch.program_variables import (
    JobDirectories,
    RankGroup,
    drop_schedulers,
    environment_variables,
    native_variables,
    rank_variables,
)
from bundle.protocol.job import ONE_A_CPU

PLACE = JobDirectories(
    root="/n/stager-7", environment="/n/stager-7/envs/abc", job_dir="/n/stager-7/jobs/42.1"
)
GROUP = RankGroup(
    node="hpc08",
    node_rank=1,
    nnodes=3,
    nproc=2,
    address="10.1.2.3",
    port=61042,
    interface="ens1f1",
    backend="gloo",
    threads=4,
)
EVERY_PROGRAM = {
    "HF_HOME": "/n/stager-7/cache/huggingface",
    "WANDB_MODE": "offline",
    "FSSPEC_CONFIG_DIR": "/n/stager-7/cache/fsspec",
    "TRITON_CACHE_DIR": "/n/stager-7/cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": "/n/stager-7/cache/inductor",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PATH": "/n/stager-7/envs/abc/bin:/usr/bin",
    "VIRTUAL_ENV": "/n/stager-7/envs/abc",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "STAGER_ENV": "/n/stager-7/envs/abc",
    "STAGER_PROJECT": "/n/stager-7/envs/abc/project",
    "STAGER_ASSETS": "/n/stager-7/envs/abc/assets",
    "STAGER_TRAINER": "/n/stager-7/envs/abc/.stager/site",
    "STAGER_JOB_DIR": "/n/stager-7/jobs/42.1",
}
EVERY_RANK = {
    **EVERY_PROGRAM,
    "STAGER_NODE": "hpc08",
    "PYTORCH_DIST_BACKEND": "gloo",
    "OMP_NUM_THREADS": "4",
    "GLOO_SOCKET_IFNAME": "ens1f1",
}


PROGRAM = ["/n/stager-7/jobs/42.1/run_wrapper.py", "train.py", "--epochs", "3"]


def command(group: RankGroup, *meeting: str, restarts: int = 0) -> None:
    """Hold the whole argument list, of which the given part depends on the group."""
    assert commands.torchrun(PLACE, group, "42.0", PROGRAM) == [
        "/n/stager-7/envs/abc/bin/python",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        *meeting,
        "--rdzv-id=42.0",
        f"--max-restarts={restarts}",
        "--log-dir=/n/stager-7/jobs/42.1/torchrun",
        "/n/stager-7/jobs/42.1/run_wrapper.py",
        "train.py",
        "--epochs",
        "3",
    ]


STATIC = ("--master-addr=10.1.2.3", "--master-port=61042", "--rdzv-backend=static")


def test_the_command_of_a_node() -> None:
    assert commands.wrapper(PLACE, ["train.py", "--epochs", "3"]) == PROGRAM
    command(GROUP, "--nnodes=3", "--node-rank=1", *STATIC)
    alone = replace(GROUP, nnodes=1, node_rank=0)
    command(alone, "--nnodes=1", "--node-rank=0", *STATIC)


def meeting(host: int, endpoint: str = "10.1.2.3:61042") -> tuple[str, ...]:
    return (
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf=is_host={host}",
        "--local-addr=10.1.2.4",
    )


def test_ranks_that_may_meet_again_meet_through_c10d() -> None:
    """Those of a single node, too."""
    again = replace(GROUP, max_restarts=2, own_address="10.1.2.4")
    alone = replace(again, nnodes=1, node_rank=0)
    command(alone, "--nnodes=1", *meeting(1), restarts=2)
    command(again, "--nnodes=3", *meeting(0), restarts=2)
    command(replace(again, node_rank=0), "--nnodes=3", *meeting(1), restarts=2)
    six = replace(again, address="fd00::1")
    command(six, "--nnodes=3", *meeting(0, "[fd00::1]:61042"), restarts=2)


def test_which_ranks_a_local_rank_may_be() -> None:
    """Where ranks may be started again, torchrun deals them to nodes anew."""
    assert [list(ranks) for ranks in commands.possible_ranks(GROUP)] == [[2], [3]]
    for group in (replace(GROUP, max_restarts=1), replace(GROUP, elastic=(1, 3))):
        assert [list(ranks) for ranks in commands.possible_ranks(group)] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(("grace", "said"), [(7, None), (30, None), (31, "31"), (600, "600")])
def test_torchrun_waits_as_long_as_ranks_may_save(grace: int, said: str | None) -> None:
    variables = rank_variables(PLACE, replace(GROUP, grace_seconds=grace), {})
    assert variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") == said


@pytest.mark.parametrize(("span", "said"), [((2, 3), "2:3"), ((3, 3), "3"), ((1, 8), "1:3")])
def test_an_elastic_group(span: tuple[int, int], said: str) -> None:
    group = replace(GROUP, elastic=span, own_address="10.1.2.4")
    assert group.moving
    command(group, f"--nnodes={said}", *meeting(0))


def test_a_rank_that_slurm_starts() -> None:
    assert commands.native(PLACE, PROGRAM) == ["/n/stager-7/envs/abc/bin/python", *PROGRAM]
    task = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
    assert native_variables(GROUP, {**task, "SLURM_JOB_ID": "42"}) == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "NODE_RANK": "2",
        "MASTER_ADDR": "10.1.2.3",
        "MASTER_PORT": "61042",
    }


# --- variables -----------------------------------------------------------------------------------


def test_the_variables_of_any_program() -> None:
    assert environment_variables(PLACE, {"PATH": "/usr/bin"}) == EVERY_PROGRAM


def test_the_variables_of_a_rank() -> None:
    assert rank_variables(PLACE, GROUP, {"PATH": "/usr/bin"}) == EVERY_RANK
    nccl = RankGroup(**{**vars(GROUP), "backend": "nccl"})
    assert rank_variables(PLACE, nccl, {"PATH": "/usr/bin"}) == {
        **EVERY_RANK,
        "PYTORCH_DIST_BACKEND": "nccl",
        "NCCL_SOCKET_IFNAME": "=ens1f1",  # exactly this one; without = it would be a prefix
    }


def test_accelerate_is_told_to_use_cpus_where_gpus_are_missing() -> None:
    assert must_use_cpus("gloo", {"a": 0, "b": 4})
    assert not must_use_cpus("gloo", {"a": 1, "b": 4})  # the user's own choice of gloo
    assert not must_use_cpus("nccl", {"a": 1, "b": 4})
    group = replace(GROUP, on_cpus=True)
    variables = rank_variables(PLACE, group, {"PATH": "/usr/bin"})
    assert variables == {**EVERY_RANK, "ACCELERATE_USE_CPU": "true"}
    kept = rank_variables(PLACE, group, {"ACCELERATE_USE_CPU": "0"})
    assert kept["ACCELERATE_USE_CPU"] == "0"


@pytest.mark.parametrize("path", [None, ""])
def test_without_a_path_the_working_directory_is_not_searched(path: str | None) -> None:
    base = {} if path is None else {"PATH": path}
    found = environment_variables(PLACE, base)["PATH"].split(":")
    assert found == ["/n/stager-7/envs/abc/bin", *os.defpath.split(":")]
    assert "" not in found


DECOYS = [
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONEXECUTABLE"),
    *("PYTHONPLATLIBDIR", "PYTHONSAFEPATH", "PYTHONINSPECT", "PYTHONPYCACHEPREFIX"),
    *("VIRTUAL_ENV_PROMPT", "CONDA_PREFIX", "__PYVENV_LAUNCHER__", "MASTER_ADDR", "MASTER_PORT"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "STAGER_ENVIRONMENT"),
]
KEPT = [
    *("HOME", "USER", "LANG", "LD_PRELOAD", "LD_LIBRARY_PATH", "SLURM_JOB_ID", "http_proxy"),
    *("PYTHONWARNINGS", "PYTHONHASHSEED", "PYTHONFAULTHANDLER", "PYTHONOPTIMIZE"),
    *("PYTHONBREAKPOINT", "XPYTHONPATH", "PYTHONPATH_OLD", "MY_RANK", "RANKING", "NCCL_DEBUG"),
    *("CUDA_VISIBLE_DEVICES", "STAGER_PATCHES", "MASTER_ADDRESSES"),
]


def test_variables_of_schedulers_are_dropped_where_none_starts_the_ranks() -> None:
    foreign = ("SLURM_NTASKS", "PBS_JOBID", "LSB_JOBID", "PMI_RANK", "PMIX_RANK", "FLUX_JOB_ID")
    own = {"OMPI_MCA_btl": "tcp", "LS_COLORS": "x", "FLUX_MODEL": "y"}
    given = {**dict.fromkeys((*foreign, "OMPI_COMM_WORLD_RANK"), "3"), **own}
    assert drop_schedulers(given) == own


@pytest.mark.parametrize("name", DECOYS)
def test_what_would_lead_astray_is_dropped(name: str) -> None:
    given = {"PATH": "/usr/bin", name: "/decoy"}
    assert rank_variables(PLACE, GROUP, given) == EVERY_RANK


@pytest.mark.parametrize("name", KEPT)
def test_what_is_the_users_own_is_kept(name: str) -> None:
    given = {"PATH": "/usr/bin", name: "/own"}
    assert rank_variables(PLACE, GROUP, given) == {**EVERY_RANK, name: "/own"}


@pytest.mark.parametrize(
    "name", ["STAGER_ENV", "PYTHONNOUSERSITE", "HF_HUB_OFFLINE", "VIRTUAL_ENV"]
)
def test_what_isolates_cannot_be_set_from_outside(name: str) -> None:
    given = {"PATH": "/usr/bin", name: ""}
    assert environment_variables(PLACE, given)[name] == EVERY_PROGRAM[name]


@pytest.mark.parametrize("name", ["HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_caches_may_be_elsewhere(name: str) -> None:
    given = {"PATH": "/usr/bin", name: "/elsewhere"}
    assert environment_variables(PLACE, given)[name] == "/elsewhere"


def test_in_a_real_environment_decoys_are_not_imported(env: Path, tmp_path: Path) -> None:
    """In a child process of the program as well."""
    (tmp_path / "alpha.py").write_text("raise SystemExit('the decoy')\n")
    base = {
        "PATH": os.defpath,
        "PYTHONPATH": str(tmp_path),
        "PYTHONHOME": str(tmp_path),
        "PYTHONINSPECT": "1",
        "HOME": str(tmp_path),
    }
    place = JobDirectories(root=str(env.parents[1]), environment=str(env), job_dir=str(tmp_path))
    code = "import alpha, subprocess; print(alpha.__file__, flush=True); "
    code += "subprocess.run(['python', '-c', 'import alpha; print(alpha.__file__)'], check=True)"
    variables = environment_variables(place, base)
    argv = [env / "bin" / "python", "-c", code]
    done = subprocess.run(argv, env=variables, cwd="/", capture_output=True, text=True, check=True)
    site = env / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    assert done.stdout.split() == [str(site / "alpha" / "__init__.py")] * 2
    failing = subprocess.run(
        [env / "bin" / "python", "-c", "raise SystemExit(5)"],
        env=variables,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert failing.returncode == 5  # PYTHONINSPECT would make 0 of it


@pytest.mark.parametrize(
    ("setting", "gpus", "chosen"),
    [
        ("auto", {"a": 0, "b": 0}, "gloo"),
        ("auto", {"a": 4, "b": 4}, "nccl"),
        ("auto", {"a": 4, "b": 0}, "gloo"),
        ("gloo", {"a": 4, "b": 4}, "gloo"),
        ("nccl", {"a": 1, "b": 8}, "nccl"),
    ],
)
def test_the_backend(setting: str, gpus: dict[str, int], chosen: str) -> None:
    assert choose_backend(setting, gpus) == chosen


def test_nccl_without_gpus_names_the_nodes() -> None:
    with pytest.raises(ValueError, match="needs a GPU on every node; none on hpc02, hpc10"):
        choose_backend("nccl", {"hpc10": 0, "hpc01": 4, "hpc02": 0})


@pytest.mark.parametrize(
    ("setting", "gpus", "chosen"),
    [
        (None, {"a": 4, "b": 2}, 2),
        (None, {"a": 0, "b": 2}, 1),
        (3, {"a": 0}, 3),
        (1, {"a": 8}, 1),
        (ONE_A_CPU, {"a": 8}, 16),
    ],
)
def test_ranks_on_a_node(setting: int | None, gpus: dict[str, int], chosen: int) -> None:
    assert choose_nproc(setting, gpus, 16) == chosen


@pytest.mark.parametrize(
    ("setting", "cpus", "nproc", "chosen"),
    [(None, 16, 4, 4), (None, 17, 4, 4), (None, 2, 4, 1), (None, 1, 1, 1), (8, 2, 4, 8)],
)
def test_threads_of_a_rank(setting: int | None, cpus: int, nproc: int, chosen: int) -> None:
    assert choose_threads(setting, cpus, nproc) == chosen


def test_a_program_of_an_environment_gets_no_secret() -> None:
    """Whatever reached the node: a rank, a launcher and the imports of the proof all ask here."""
    base = {"PATH": "/usr/bin", "HF_TOKEN": "t", "SLURM_JWT": "j", "MYPASS": "p"}
    assert environment_variables(PLACE, base) == EVERY_PROGRAM
    assert rank_variables(PLACE, GROUP, base) == EVERY_RANK
    named = rank_variables(PLACE, GROUP, base, ["MYPASS"])
    assert named == {**EVERY_RANK, "MYPASS": "p"}


STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_task_of_a_step_is_a_rank() -> None:
    assert step_variables(STEP) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "MASTER_ADDR": "n07",
        "MASTER_PORT": "20042",
    }
    assert step_variables({**STEP, "MASTER_PORT": "5", "MASTER_ADDR": "h"})["MASTER_PORT"] == "5"


@pytest.mark.parametrize(
    "changed",
    [{"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}, {"SLURM_STEP_ID": None}],
)
def test_what_is_no_rank_by_slurm(changed: dict[str, str | None]) -> None:
    """A batch script has the job's number of tasks, and would wait for ranks that nobody starts."""
    variables = {**STEP, **changed}
    assert step_variables({k: v for k, v in variables.items() if v is not None}) == {}
