"""The variables of a rank, and of any program in an environment: literal environments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bundle.launch import program_variables
from bundle.launch.commands import must_use_cpus
from bundle.launch.program_variables import (
    JobDirectories,
    drop_schedulers,
    make_environment_variables,
    make_rank_variables,
)
from bundle.protocol.messages import GroupSettings
from tests.support.jobs import launch_request

PLACE = JobDirectories(
    root="/n/stager-7", environment="/n/stager-7/envs/abc", job_dir="/n/stager-7/jobs/42.1"
)


def variables(
    base: dict[str, str], settings: GroupSettings | None = None, **launch: Any
) -> dict[str, str]:
    request = launch_request(settings=settings, **launch)
    return make_rank_variables(PLACE, request, "ens1f1", 4, base)


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
    "STAGER_ATTEMPT": "0",
    "STAGER_NODE": "hpc08",
    "STAGER_WATCH": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "PYTORCH_DIST_BACKEND": "gloo",
    "OMP_NUM_THREADS": "4",
    "GLOO_SOCKET_IFNAME": "ens1f1",
}


@pytest.mark.parametrize(("grace", "said"), [(7, None), (30, None), (31, "31"), (600, "600")])
def test_torchrun_waits_as_long_as_ranks_may_save(grace: int, said: str | None) -> None:
    assert variables({}, grace_seconds=grace).get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") == said


def test_the_variables_of_any_program_and_of_a_rank() -> None:
    assert make_environment_variables(PLACE, {"PATH": "/usr/bin"}) == EVERY_PROGRAM
    assert variables({"PATH": "/usr/bin"}) == EVERY_RANK
    nccl = GroupSettings("10.1.2.3", 61042, "nccl", 2)
    assert variables({"PATH": "/usr/bin"}, nccl) == {
        **EVERY_RANK,
        "PYTORCH_DIST_BACKEND": "nccl",
        "NCCL_SOCKET_IFNAME": "=ens1f1",  # exactly this one; without = it would be a prefix
    }


def test_what_libraries_compile_is_kept_by_the_kind_of_node() -> None:
    names = ("FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH")
    base = {"PATH": "/usr/bin", "CUDA_CACHE_PATH": "/my/own"}
    assert make_environment_variables(PLACE, base, code="kind", caches=names) == {
        **EVERY_PROGRAM,
        "TRITON_CACHE_DIR": "/n/stager-7/compiled/kind/triton",
        "TORCHINDUCTOR_CACHE_DIR": "/n/stager-7/compiled/kind/inductor",
        "FLASHINFER_WORKSPACE_BASE": "/n/stager-7/compiled/kind/FLASHINFER_WORKSPACE_BASE",
        "CUDA_CACHE_PATH": "/my/own",
    }
    assert make_environment_variables(PLACE, {"PATH": "/usr/bin"}, caches=names) == EVERY_PROGRAM


def test_accelerate_is_told_to_use_cpus_where_gpus_are_missing() -> None:
    assert must_use_cpus("gloo", {"a": 0, "b": 4})
    assert not must_use_cpus("gloo", {"a": 1, "b": 4})  # the user's own choice of gloo
    assert not must_use_cpus("nccl", {"a": 1, "b": 4})
    cpus = GroupSettings("10.1.2.3", 61042, "gloo", 2, on_cpus=True)
    assert variables({"PATH": "/usr/bin"}, cpus) == {**EVERY_RANK, "ACCELERATE_USE_CPU": "true"}
    assert variables({"ACCELERATE_USE_CPU": "0"}, cpus)["ACCELERATE_USE_CPU"] == "0"


@pytest.mark.parametrize("base", [{}, {"PATH": ""}])
def test_without_a_path_the_working_directory_is_not_searched(base: dict[str, str]) -> None:
    found = make_environment_variables(PLACE, base)["PATH"].split(":")
    assert found == ["/n/stager-7/envs/abc/bin", *os.defpath.split(":")]


DECOYS = [
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONEXECUTABLE"),
    *("PYTHONPLATLIBDIR", "PYTHONSAFEPATH", "PYTHONINSPECT", "PYTHONPYCACHEPREFIX"),
    *("VIRTUAL_ENV_PROMPT", "CONDA_PREFIX", "__PYVENV_LAUNCHER__", "MASTER_ADDR", "MASTER_PORT"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "STAGER_ENVIRONMENT"),
]


ISOLATING = ("STAGER_ENV", "PYTHONNOUSERSITE", "HF_HUB_OFFLINE", "VIRTUAL_ENV")
CACHES = ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
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


def test_what_would_lead_astray_is_dropped_and_the_users_own_kept() -> None:
    own, caches = dict.fromkeys(KEPT, "/own"), dict.fromkeys(CACHES, "/elsewhere")
    decoys = dict.fromkeys(DECOYS, "/decoy") | dict.fromkeys(ISOLATING, "")
    given = {"PATH": "/usr/bin", **decoys, **own, **caches}
    assert variables(given) == {**EVERY_RANK, **own, **caches}


def test_a_program_of_an_environment_gets_no_secret() -> None:
    """Whatever reached the node: a rank, a launcher and the imports of the proof all ask here."""
    base = {"PATH": "/usr/bin", "HF_TOKEN": "t", "SLURM_JWT": "j", "MYPASS": "p"}
    assert make_environment_variables(PLACE, base) == EVERY_PROGRAM
    assert variables(base) == EVERY_RANK
    named = variables(base, pass_env=("MYPASS",))
    assert named == {**EVERY_RANK, "MYPASS": "p"}


@pytest.fixture
def directories(tmp_path: Path) -> JobDirectories:
    return JobDirectories(
        str(tmp_path / "root"), str(tmp_path / "root/envs/1"), str(tmp_path / "j")
    )


def repository(cache: Path, name: str, commit: str) -> None:
    (cache / name / "refs").mkdir(parents=True)
    (cache / name / "refs" / "main").write_text(commit)


def test_the_bundles_repositories_come_before_the_users(
    directories: JobDirectories, tmp_path: Path
) -> None:
    repository(Path(directories.environment, ".stager", "hub"), "models--a--b", "bundle")
    user = tmp_path / "user"
    repository(user, "models--a--b", "user")
    repository(user, "datasets--c", "user")
    (user / "token").write_text("secret")
    base = {"HOME": str(tmp_path), "HF_HUB_CACHE": str(user), "TRANSFORMERS_CACHE": str(user)}
    for _ in range(2):  # several tasks of a node
        program_variables.prepare_hub_cache(directories, base)
    said = program_variables.make_hub_variables(directories, base)
    assert said["HF_HUB_CACHE"] == said["TRANSFORMERS_CACHE"]
    view = Path(said["HF_HUB_CACHE"])
    assert view.is_relative_to(directories.root)
    assert not view.is_relative_to(directories.environment)
    assert {path.name for path in view.iterdir()} == {
        "models--a--b", "datasets--c", "version.txt",
    }  # fmt: skip
    assert (view / "models--a--b/refs/main").read_text() == "bundle"
    # Another cache of the user's is another view.
    other = program_variables.make_hub_variables(
        directories, {"HF_HUB_CACHE": str(tmp_path / "other")}
    )
    assert other["HF_HUB_CACHE"] != str(view)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"HF_HUB_CACHE": "/shared"}, {}),
        ({"HF_HOME": "/shared"}, {}),
        ({"XDG_CACHE_HOME": "HERE"}, {"HF_HUB_CACHE": "HERE/huggingface/hub"}),
        ({"XDG_CACHE_HOME": "HERE/none"}, {}),
    ],
)
def test_without_models_in_the_bundle_nothing_is_made(
    directories: JobDirectories, tmp_path: Path, base: dict[str, str], expected: dict[str, str]
) -> None:
    (tmp_path / "huggingface" / "hub").mkdir(parents=True)
    base = {name: value.replace("HERE", str(tmp_path)) for name, value in base.items()}
    program_variables.prepare_hub_cache(directories, base)
    assert not os.path.exists(directories.root)
    expected = {name: value.replace("HERE", str(tmp_path)) for name, value in expected.items()}
    assert program_variables.make_hub_variables(directories, base) == expected
