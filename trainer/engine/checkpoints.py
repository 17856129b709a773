"""The checkpoints of earlier runs in the output folder: one to resume from, others to remove.

Hugging Face's Trainer writes one folder ``checkpoint-STEP`` at the end of each epoch, and its
``trainer_state.json`` last, so that a folder with one is complete.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Options, TrainerError, format_count

# --- The memory of GPUs that a run has taken -----------------------------------------------------


def measure_peak_memory(device: str) -> dict[str, int]:
    """Return the peak memory of one GPU in bytes, under its name in metrics; empty on CPUs."""
    if device != "cuda":
        return {}
    import torch

    gpus = range(torch.cuda.device_count())
    return {"peak_gpu_memory_bytes": max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)}


METRICS = "metrics.json"
_STATE = "trainer_state.json"
_PARTS = ("optimizer.pt", "scheduler.pt")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Names of the file with the weights; a checkpoint has one of them."""
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a run."""

    checkpoint: Path | None = None
    """The checkpoint to resume from; None for initial weights."""
    epochs_done: float = 0.0
    """Epochs trained before it was written."""


def prepare(options: Options, steps_an_epoch: int) -> Start:
    """Prepare the output folder, on one rank for all, and return the start of the run.

    The metrics of an earlier run are removed, so that they are never taken for this run's.
    """
    out = options.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        start = find(options, steps_an_epoch) if options.resume else Start()
        if not options.resume:
            _clear(out)
        (out / METRICS).unlink(missing_ok=True)
    except OSError as error:
        raise TrainerError(
            f"--out {out} cannot be used: {error.strerror or error}",
            hint="name a folder that can be written to, with room for the model",
        ) from error
    return start


def find(options: Options, steps_an_epoch: int) -> Start:
    """Return the newest complete checkpoint in the output folder, if there is one."""
    for folder in reversed(_folders(options.out)):
        state = _state(folder)
        if state is None:
            continue
        step, epoch = int(state["global_step"]), float(state["epoch"])
        if abs(step - epoch * steps_an_epoch) > 0.5:
            raise TrainerError(
                f"{folder} was made with {format_count(round(step / epoch), 'step')} an "
                "epoch, and this "
                f"run has {steps_an_epoch}",
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


def write_metrics(out: Path, metrics: dict[str, float | int]) -> Path:
    """Write ``metrics.json``, whole or not at all, and return its path."""
    path = out / METRICS
    partial = out / f".{METRICS}.part"
    partial.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def register_safe_types() -> None:
    """Let ``torch.load`` read the Trainer's checkpoints also for older Hugging Face libraries.

    From torch 2.6 on it loads only registered types, and transformers before 4.48 does not
    register NumPy's random state (https://github.com/huggingface/transformers/pull/34632).
    It also asks torch for the device ``cpu:0``, as accelerate names the CPU, and torch has none.
    """
    import numpy as np
    import torch

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
    folders = [folder for folder in _folders(out) if _state(folder) is not None]
    if not folders:
        return
    if not (out / METRICS).is_file():
        raise TrainerError(
            f"{out} has checkpoints of a run that did not finish, the newest {folders[-1].name}",
            hint=f"continue it with --resume, discard it with rm -r {out}/checkpoint-*, or "
            "choose another --out",
        )
    for folder in folders:
        shutil.rmtree(folder)


def _folders(out: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first."""
    numbered = []
    for path in out.iterdir():
        name = _NAME.fullmatch(path.name)
        if name and path.is_dir():
            numbered.append((int(name[1]), path))
    return [path for _, path in sorted(numbered)]


def _state(folder: Path) -> dict[str, Any] | None:
    """Return the Trainer's state of a checkpoint; None if the checkpoint is not complete."""
    try:
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not any((folder / name).is_file() for name in _WEIGHTS):
        return None
    if not all((folder / name).is_file() for name in _PARTS):
        return None
    return state if state.get("global_step") and state.get("epoch") else None
