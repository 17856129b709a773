"""Single-node commands of all kinds, and what a job makes of them."""

from __future__ import annotations

import ast
import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest

from stager.core.errors import ConfigError
from stager.jobs import conversion
from stager.jobs.conversion import convert


@pytest.mark.parametrize(
    ("line", "command", "values"),
    [
        ("train.py --epochs 3", "train.py --epochs 3", {}),
        ("-m package.train --x", "-m package.train --x", {}),
        ("python train.py -m x", "train.py -m x", {}),
        ("/usr/bin/python3.11 -m package.train", "-m package.train", {}),
        ("python -mpackage.train", "-m package.train", {}),
        ("python3 -m torch.distributed.run --nproc_per_node 8 -m a.b -m c", "-m a.b -m c",
         {"nproc_per_node": 8}),
        ("python -um torch.distributed.run --nproc 2 t.py", "t.py", {"nproc_per_node": 2}),
        ("torchrun t.py --nproc_per_node=4", "t.py --nproc_per_node=4", {}),
        ("torchrun --nnodes=2:4 --max_restarts=3 -- t.py", "t.py",
         {"nnodes": (2, 4), "max_restarts": 3}),
        ("venv/bin/torchrun --nnodes=3 t.py", "t.py", {"nnodes": (3, 3)}),
        ("torchrun --nproc-per-node=gpu t.py", "t.py", {"nproc_per_node": "gpu"}),
        ("torchrun --module a.b", "-m a.b", {}),
        ("uv run --no-sync python -m torch.distributed.run --nproc_per_node=8 t.py --a", "t.py --a",
         {"nproc_per_node": 8}),
        ("uv --quiet run -p 3.11 -- torchrun t.py", "t.py", {}),
        ("uv run -m torch.distributed.run --nproc_per_node=2 t.py", "t.py", {"nproc_per_node": 2}),
        ("accelerate launch --multi_gpu --num_processes 8 --num_machines 2 t.py --cpu",
         "t.py --cpu", {"nproc_per_node": 4, "nnodes": (2, 2), "backend": "nccl"}),
        ("accelerate launch --cpu --num-processes=2 --mixed-precision no -m a.b", "-m a.b",
         {"nproc_per_node": 2, "backend": "gloo"}),
        ("python -m accelerate.commands.launch t.py", "t.py", {}),
        ("env A=1 B= torchrun t.py", "t.py", {}),
        ("torchrun ./-m.py -x", "./-m.py -x", {}),
        ("A=1 exec torchrun --nproc-per-node 2 t.py", "t.py", {"nproc_per_node": 2}),
    ],
)  # fmt: skip
def test_commands(line: str, command: str, values: dict[str, Any]) -> None:
    converted = convert(shlex.split(line))
    assert shlex.join(converted.command) == command
    said = ("nproc_per_node", "nnodes", "max_restarts", "backend")
    assert {key: getattr(converted, key) for key in said} == {**dict.fromkeys(said), **values}


@pytest.mark.parametrize(
    ("line", "notes"),
    [
        ("torchrun --standalone t.py", ["--standalone is left out"]),
        ("torchrun --node_rank=$SLURM_NODEID --master_addr $H --rdzv-id=1 --rdzv_id=2 t.py",
         ["--node-rank is left out", "--master-addr is left out", "--rdzv-id is left out"]),
        ("torchrun --nnodes=$SLURM_NNODES t.py", ["--nodes or [cluster] nodes sets it"]),
        ("torchrun --nproc-per-node= t.py", ["its variable is empty"]),
        ("torchrun --nproc-per-node=$N t.py", ["the shell has not expanded it (default: one"]),
        ("torchrun --nproc-per-node=auto t.py", ["becomes: one rank for each GPU"]),
        ("torchrun -r3 -t 1 t.py", ["--redirects is left out", "--tee is left out"]),
        ("python -u -W ignore -X dev t.py", ["python -u -W -X: left out"]),
        ("python -m torch.distributed.launch t.py", ["LOCAL_RANK"]),
        ("python -m torch.distributed.launch --use_env t.py", []),
        ("uv run --with numpy t.py", ["[environment] requirements"]),
        ("accelerate launch --main_process_port 1 t.py", ["--main-process-port is left out"]),
    ],
)  # fmt: skip
def test_what_is_left_out_is_said(line: str, notes: list[str]) -> None:
    found = convert(shlex.split(line)).notes
    assert len(found) == len(notes)
    for note, part in zip(found, notes, strict=True):
        assert part in note
        assert "\n" not in note


def test_values_of_variables_are_not_told() -> None:
    line = "HF_TOKEN=hf_secret OMP_NUM_THREADS=2 torchrun t.py"
    converted = convert(shlex.split(line))
    assert converted.command == ("t.py",)
    assert [note.split("=")[0] for note in converted.notes] == ["HF_TOKEN", "OMP_NUM_THREADS"]
    assert "hf_secret" not in "".join(converted.notes)
    assert "--pass-env HF_TOKEN" in converted.notes[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "nothing to run"),
        ("uv sync", "only `uv run`"),
        ("uv run --directory x t.py", "--directory"),
        ("torchrun", "the script is missing"),
        ("-m", "name of the module is missing"),
        ("--epochs 3", "--epochs is not a script"),
        ("torchrun --nproc-per-gpu=2 t.py", "torchrun --nproc-per-gpu: not an option"),
        ("torchrun --no-python ./t", "--no-python: ranks are Python programs"),
        ("torchrun --nproc-per-node", "its value is missing"),
        ("torchrun --standalone=1 t.py", "takes no value"),
        ("torchrun --nproc-per-node=0 t.py", "not a whole number from 1 to 65535"),
        ("torchrun --nnodes=4:2 t.py", "must not be larger than the second"),
        ("torchrun --max-restarts=-1 t.py", "--max-restarts -1: not a whole number"),
        ("python -c pass", "only a script or a module"),
        ("env -i torchrun t.py", "env -i"),
        ("srun -N 2 python t.py", "srun cannot be converted"),
        ("torchrun --rdzv_id $ID --rdzv_backend c10d t.py c.yaml", "--rdzv-id: its value is miss"),
        ("torchrun --rdzv_id t.py c.yaml", "--rdzv-id: t.py is not a value"),
        ("torchrun --nproc-per-node 2 python t.py", "python cannot be converted"),
        ("python -m torch.distributed.launch --master_port t.py a", "t.py is not a value"),
        ("accelerate launch --num_processes=$((4)) t.py", "--num-processes $((4)): not a whole"),
        ("numactl -N 0 python t.py", "numactl cannot be converted: name the script or module"),
        ("/usr/bin/apptainer exec i.sif python t.py", "--container-image IMAGE"),
        ("nohup torchrun t.py", "start stager itself by it"),
        ("python -m ezpz.launch -m pkg.train", "-m ezpz.launch cannot be converted"),
        ("torchrun 't.py\r'", "carriage return"),
        ("accelerate config", "only `accelerate launch`"),
        ("accelerate launch --mixed_precision bf16 t.py", "--mixed-precision bf16"),
        ("accelerate launch --use_fsdp --fsdp_version 2 t.py", "--use_fsdp: not an option"),
        ("torchrun --standalone --nprocs_per_node=gpu t.py", "--nprocs_per_node: not an option"),
        ("accelerate launch --config_file c.yaml t.py", "cannot be carried over"),
        ("accelerate launch --num_processes 3 --num_machines 2 t.py", "not a multiple"),
    ],
)
def test_what_cannot_be_converted(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(shlex.split(line.replace("$ID ", "")))
    assert message in str(caught.value)
    hint = str(caught.value.hint)
    assert "--use_fsdp" not in line or ", as --use_fsdp in ACCELERATE_USE_FSDP" in hint
    assert ("--nprocs" in line) is ("did you mean --nproc-per-node?" in hint)
    assert "$ID" not in line or "a variable is probably empty" in hint


def test_the_table_is_that_of_the_installed_torchrun() -> None:
    """Every option of torchrun is known, and known to take a value or not; it is not imported."""
    torch = importlib.util.find_spec("torch") or pytest.skip("there is no PyTorch here")
    source = Path(torch.origin).parent / "distributed" / "run.py"
    long = conversion.TORCHRUN
    short = {option.short: option for option in long.values()}
    options = [
        call
        for call in ast.walk(ast.parse(source.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
    ]
    assert len(options) > 20
    for call in options:
        action = [ast.unparse(word.value) for word in call.keywords if word.arg == "action"]
        for spelling in (word.value for word in call.args if word.value.startswith("-")):
            name = spelling.lstrip("-").replace("_", "-")
            option = (long if spelling.startswith("--") else short)[name]
            assert option.takes_value is (action != ["check_env"]), spelling
