"""The output folder of any run, and the checkpoints that Hugging Face's Trainer writes there."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..config import Options, TrainerError, explain_errors, format_count

METRICS = "metrics.json"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that its name always stands for all of it, on the disk, too."""
    partial = path.with_name(f".{path.name}.part")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()  # on a full disk it would keep the little that is left
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_metrics(out: Path, metrics: Mapping[str, float], device: str = "cpu") -> None:
    """Write ``metrics.json``, with the peak memory of one GPU in bytes where the device is one."""
    peak = {}
    if device == "cuda":
        gpus = range(torch.cuda.device_count())
        peak = {"peak_gpu_memory_bytes": max(map(torch.cuda.max_memory_allocated, gpus))}
    write_whole(out / METRICS, (json.dumps({**metrics, **peak}, indent=2) + "\n").encode())


def guard_output_folder(out: Path) -> AbstractContextManager[None]:
    """Turn an error of the block's into one about the output folder."""
    hint = "name a folder that can be written to, with room for the model"
    return explain_errors(f"--out {out} cannot be used", hint)


def require_finished_run(out: Path, checkpoints: list[str], pattern: str) -> None:
    """Refuse to replace checkpoints, named oldest first, of a run that has no metrics yet."""
    if checkpoints and not (out / METRICS).is_file():
        raise TrainerError(
            f"{out} has checkpoints of a run that did not finish, the newest {checkpoints[-1]}",
            hint=f"continue it with --resume, discard it with rm {pattern}, or choose another "
            "--out",
        )


# Hugging Face's Trainer writes ``checkpoint-STEP`` after each epoch, and this file in it last.
_STATE = "trainer_state.json"
_PARTS = ("optimizer.pt", "scheduler.pt")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # one of them
_NAME = re.compile(r"checkpoint-(\d+)")


class Start(NamedTuple):
    """The start of a run."""

    checkpoint: Path | None = None  # to resume from; None for initial weights
    epochs_done: float = 0.0


def prepare(options: Options, steps_an_epoch: int) -> Start:
    """Prepare the output folder, without an earlier run's metrics; return the start of the run."""
    out, start = options.out, Start()
    with guard_output_folder(out):
        out.mkdir(parents=True, exist_ok=True)
        if options.resume:
            start = find(options, steps_an_epoch)
        else:
            _clear(out)
        (out / METRICS).unlink(missing_ok=True)
    return start


def find(options: Options, steps_an_epoch: int) -> Start:
    """Return the newest complete checkpoint in the output folder, if there is one."""
    for folder, step, epoch in reversed(_list_complete(options.out)):
        if abs(step - epoch * steps_an_epoch) > 0.5:
            raise TrainerError(
                f"{folder} was made with {format_count(round(step / epoch), 'step')} an epoch, and "
                f"this run has {steps_an_epoch}",
                hint="resume with the same --data, --subset, --held-out, --batch-size and number "
                "of processes, or start again in another --out",
            )
        return Start(checkpoint=folder, epochs_done=epoch)
    return Start()


def require_visible_checkpoint(start: Start) -> None:
    """Make sure that this rank sees the checkpoint of rank 0."""
    if start.checkpoint is not None and not start.checkpoint.is_dir():
        raise TrainerError(
            f"{start.checkpoint} is not visible from here",
            hint="to resume on several nodes, --out must be on a file system that they share",
        )


def register_safe_types() -> None:
    """Let ``torch.load`` read the Trainer's checkpoints also for older Hugging Face libraries.

    transformers before 4.48 does not register the types of NumPy's random state, as torch 2.6 wants
    (https://github.com/huggingface/transformers/pull/34632). accelerate names the CPU ``cpu:0``.
    """
    array = np.zeros(1, dtype=np.uint32)
    rebuild = array.__reduce__()[0]  # numpy.core or numpy._core, by version
    torch.serialization.add_safe_globals([rebuild, np.ndarray, np.dtype, type(array.dtype)])
    torch.serialization.register_package(
        priority=50,  # after torch's own, which are below 30
        tagger=lambda _: None,
        deserializer=lambda storage, place: storage if place.startswith("cpu:") else None,
    )


def _clear(out: Path) -> None:
    """Remove a finished run's checkpoints: the Trainer keeps the highest numbers, of any run."""
    folders = [folder for folder, _, _ in _list_complete(out)]
    require_finished_run(out, [folder.name for folder in folders], f"-r {out}/checkpoint-*")
    for folder in folders:
        shutil.rmtree(folder)


def _list_complete(out: Path) -> list[tuple[Path, int, float]]:
    """Return the complete checkpoints, oldest first, with their steps and epochs."""
    found = []
    for folder in (path for path in out.iterdir() if _NAME.fullmatch(path.name)):
        with suppress(OSError, ValueError, TypeError, AttributeError):
            state: Any = json.loads((folder / _STATE).read_text(encoding="utf-8"))
            step, epoch = int(state.get("global_step")), float(state.get("epoch"))
            has_weights = any((folder / name).is_file() for name in _WEIGHTS)
            if has_weights and all((folder / name).is_file() for name in _PARTS) and step and epoch:
                found.append((folder, step, epoch))
    return sorted(found, key=lambda one: int(one[0].name.rpartition("-")[2]))
