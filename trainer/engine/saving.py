"""The files of the training loop: checkpoints while it runs, model and metrics at its end.

A checkpoint is ``checkpoint_epoch_N.pt`` at the end of an epoch, ``checkpoint_step_N.pt`` within
one. The note beside it, with its digest and step, is written last: without one it is not complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..config import Options, TrainerError, explain_errors, format_count
from ..network import dist
from ..network.dist import World
from . import progress
from .checkpoints import (
    METRICS,
    guard_output_folder,
    require_finished_run,
    write_metrics,
    write_whole,
)
from .run import Position, Run

BEST, MODEL = "best.pt", "model.pt"
_JOB = ".job"  # names the job that writes here; if that is started again, it resumes
_REMOVE = "remove it, and --resume continues from the one before it"
_NAME = re.compile(r"checkpoint_(epoch|step)_\d+\.pt")


class Note(NamedTuple):
    """A complete checkpoint, which is not loaded yet."""

    path: Path
    step: int
    sha256: str


def pack_state(state: Mapping[str, Any]) -> bytes:
    """Return a state of tensors, numbers, texts, mappings and lists as ``torch.load`` reads it."""
    memory = io.BytesIO()
    torch.save(dict(state), memory)
    return memory.getvalue()


def write_checkpoint(path: Path, data: bytes, step: int) -> None:
    """Write a checkpoint and its note; a crash at any moment leaves all of it or nothing."""
    note = {"step": step, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    with explain_errors(
        f"the checkpoint {path} cannot be written",
        "check the free space and the permissions there; --resume continues from the last one",
    ):
        _locate_note(path).unlink(missing_ok=True)  # of another state than what comes now
        write_whole(path, data)
        write_whole(_locate_note(path), (json.dumps(note) + "\n").encode())


def list_complete(out: Path) -> list[Note]:
    """Return the complete checkpoints in a folder, oldest first."""
    notes = []
    for path in _list_checkpoints(out):
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raw = json.loads(_locate_note(path).read_text(encoding="utf-8"))
            notes.append(Note(path=path, step=int(raw["step"]), sha256=str(raw["sha256"])))
    return sorted(notes, key=lambda note: (note.step, note.path.name))


def _list_checkpoints(out: Path) -> list[Path]:
    return [path for path in sorted(out.glob("checkpoint_*.pt")) if _NAME.fullmatch(path.name)]


def find_newest(out: Path) -> tuple[Note, bytes] | None:
    """Return the newest sound checkpoint with its bytes; report damaged ones, and skip them."""
    for note in reversed(list_complete(out)):
        why = "is damaged"
        try:
            data = note.path.read_bytes()
            if hashlib.sha256(data).hexdigest() == note.sha256:
                return note, data
        except OSError as error:
            why = f"cannot be read ({error.strerror or error})"
        dist.write_line(f"warning: {note.path} {why}; the one before it is used")
        # Otherwise it would count when old checkpoints are removed, and sound ones would go first.
        with suppress(OSError):
            note.path.replace(f"{note.path}.damaged")
    if any(out.glob("checkpoint_*.json")):
        raise TrainerError(
            f"no checkpoint in {out} can be used",
            hint=f"rm {out}/checkpoint_* to start again there, or choose another --out",
        )
    return None


def load_state(data: bytes, name: str) -> dict[str, Any]:
    """Return the state in a checkpoint's bytes, without running any code in them."""
    # torch's, zip's and pickle's own errors: it is no checkpoint of ours.
    with explain_errors(f"{name} cannot be loaded", _REMOVE, Exception):
        return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def remove_older_checkpoints(out: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints; the best one has a name of its own."""
    for note in list_complete(out)[:-keep]:
        with suppress(OSError):
            _locate_note(note.path).unlink()
            note.path.unlink()


def remove_checkpoints(out: Path) -> None:
    """Remove every checkpoint, including damaged ones and the best one."""
    for path in [*out.glob("checkpoint_*.pt*"), *out.glob(BEST)]:
        if path.name == BEST or _NAME.fullmatch(path.name.removesuffix(".damaged")):
            path.unlink()
            _locate_note(path).unlink(missing_ok=True)


def _locate_note(path: Path) -> Path:
    return path.with_name(path.name.partition(".")[0] + ".json")


def prepare_folder(run: Run, environ: Mapping[str, str]) -> None:
    """Prepare the output folder, and resume from its newest sound checkpoint if requested."""
    options, world = run.options, run.world
    newest = dist.run_on_first_rank(world, lambda: _prepare(options, environ))
    _warn_of_other_disks(options, world)
    if world.is_first and run.mixed:
        where = "where that is accurate enough (--precision float32: nowhere)"
        dist.write_line(f"computing in bfloat16 {where}")
    if newest is not None:
        name, data = newest
        dist.run_on_all_ranks(world, lambda: _restore(run, load_state(data, name), name))
    if not world.is_first:
        return
    lost = progress.remove_later_steps(options.out, run.at.step)
    if newest is not None:
        done, left = (format_count(number, "step") for number in (run.at.step, lost))
        dist.write_line(f"resuming from {newest[0]}, after {done} ({left} to do again)")


def save_epoch(run: Run, accuracy: float) -> None:
    """Write the checkpoint at the end of an epoch, also as the best one if it is."""
    is_best, run.best = accuracy > run.best, max(accuracy, run.best)
    _save(run, f"checkpoint_epoch_{run.at.epoch}.pt", is_best=is_best)


def save_step(run: Run) -> None:
    """Write a checkpoint within an epoch."""
    run.sync.share()
    _save(run, f"checkpoint_step_{run.at.step}.pt", is_best=False)


def write_results(run: Run, done: progress.Progress, accuracy: float, loss: float) -> None:
    """Write the model's weights and the metrics."""
    options, world, task = run.options, run.world, run.task
    metrics: dict[str, float | int] = {
        "accuracy": accuracy,
        "loss": loss,
        "samples_per_second": round(done.rows / max(done.seconds, 1e-9), 3),
        "world_size": world.size,
        "epochs": options.epochs,
        "steps": run.at.step,
        "train_rows": len(task.train),
        "held_out_rows": len(task.held_out),
        "train_seconds": round(done.seconds, 3),
        **_measure_shares(run),
    }

    def write() -> None:
        dist.write_line(f"Saving model to {options.out / MODEL}")
        with guard_output_folder(options.out):
            write_whole(options.out / MODEL, pack_state(task.model.state_dict()))
            write_metrics(options.out, metrics, world.device)
        rows = format_count(len(task.held_out), "row")
        dist.write_line(f"held-out accuracy {accuracy:.3f} loss {loss:.3f} on {rows}")

    dist.run_on_first_rank(world, write)


def _measure_shares(run: Run) -> dict[str, float]:
    """Return the fractions of the steps' time by purpose (0 to 1), on average of the ranks."""
    whole = max(run.stepping, 1e-9)
    mine = [run.reading / whole, min(1.0, run.sync.spent / whole)]
    data, sync = (total / run.world.size for total in dist.sum_over_ranks(run.world, mine))
    if run.world.device != "cpu":
        return {}  # a GPU works on while the clock here stands still
    shares = {"data_share": data, "sync_share": sync, "compute_share": max(0.0, 1 - data - sync)}
    if run.world.is_first and run.stepping:
        words = ", ".join(f"{name[:-6]} {share:.0%}" for name, share in shares.items())
        dist.write_line(f"time of a rank's steps, on average: {words}")
    return {name: round(share, 4) for name, share in shares.items()}


def get_job_name(environ: Mapping[str, str]) -> str:
    """Return the job's name, which stays the same when it is started again; empty for none."""
    slurm, elastic = environ.get("SLURM_JOB_ID", ""), environ.get("TORCHELASTIC_RUN_ID", "")
    if slurm:
        return f"slurm {slurm}"
    return "" if elastic in ("", "none") else f"torchrun {elastic}"  # none is torchrun's default


def _prepare(options: Options, environ: Mapping[str, str]) -> tuple[str, bytes] | None:
    out, newest = options.out, None
    with guard_output_folder(out):
        out.mkdir(parents=True, exist_ok=True)
        if options.resume or _is_unfinished_work(out, environ):
            newest = find_newest(out)
            if newest is None and options.resume:
                dist.write_line(f"{out} has no checkpoint: starting from the beginning")
        else:
            _clear(out)
        (out / _JOB).write_text(get_job_name(environ), encoding="utf-8")
        (out / METRICS).unlink(missing_ok=True)
    return None if newest is None else (str(newest[0].path), newest[1])


def _is_unfinished_work(out: Path, environ: Mapping[str, str]) -> bool:
    """Return True if an earlier start of this job has left unfinished work here.

    For a job that is started again, finished work counts, too: a rank may have died after it.
    """
    job, mark = get_job_name(environ), out / _JOB
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    is_restart = any(environ.get(name, "0") not in ("", "0") for name in counts)
    if not job or not mark.is_file() or ((out / METRICS).is_file() and not is_restart):
        return False
    return mark.read_text("utf-8", errors="replace") == job


def _clear(out: Path) -> None:
    complete = [note.path for note in list_complete(out)]
    left = [path.name for path in complete or _list_checkpoints(out)]
    require_finished_run(out, left, f"{out}/checkpoint_*")
    if left:
        dist.write_line(f"{out} has a finished run: it is replaced")
    remove_checkpoints(out)
    (out / progress.LOG).unlink(missing_ok=True)


_RESTORED = ("model", "optimizer", "epoch", "row", "step", "best")


def _restore(run: Run, state: dict[str, Any], name: str) -> None:
    try:
        _require_same_run(run, state, name)
        model, optimizer, epoch, row, step, best = map(state.__getitem__, _RESTORED)
        run.task.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)
        at = Position(epoch=int(epoch), row=int(row), step=int(step))
        run.best = float(best)
        if not 0 <= at.row < run.order.rows or min(at.epoch, at.step) < 0:
            raise ValueError(f"epoch {at.epoch}, row {at.row}, step {at.step}")
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise TrainerError(
            f"{name} cannot be resumed from: {type(error).__name__}: {error}", hint=_REMOVE
        ) from error
    run.at = at


def _describe_run(run: Run) -> dict[str, object]:
    """Return what must be the same where a run resumes."""
    rows = len(run.task.train)
    return {"workload": run.options.workload, "rows": rows, "seed": run.options.seed}


def _require_same_run(run: Run, state: dict[str, Any], name: str) -> None:
    differences = [
        f"{key} {state.get(key)}, not {value}"
        for key, value in _describe_run(run).items()
        if state.get(key) != value
    ]
    mine, saved = run.task.model.state_dict(), state.get("model", {})
    shapes = [{key: tensor.shape for key, tensor in each.items()} for each in (mine, saved)]
    if not differences and shapes[0] != shapes[1]:
        differences = ["another model"]
    if differences:
        raise TrainerError(
            f"{name} belongs to another run: {'; '.join(differences)}",
            hint="resume with the same workload, --data, --subset, --held-out and --seed, or "
            "start again in another --out",
        )


def _save(run: Run, name: str, *, is_best: bool) -> None:
    options = run.options

    def save() -> None:
        states = run.task.model.state_dict(), run.optimizer.state_dict()
        at = run.at.epoch, run.at.row, run.at.step
        restored = zip(_RESTORED, (*states, *at, run.best), strict=True)
        data = pack_state({**_describe_run(run), **dict(restored)})
        if is_best:  # first: the epoch's checkpoint records its accuracy
            write_checkpoint(options.out / BEST, data, run.at.step)
        write_checkpoint(options.out / name, data, run.at.step)
        remove_older_checkpoints(options.out, options.keep)

    dist.run_on_first_rank(run.world, save)


def _warn_of_other_disks(options: Options, world: World) -> None:
    """Warn if the folder is not the same one on all nodes: a later run may start elsewhere."""
    out = options.out.absolute()
    if world.size == world.local_size:
        return

    def make_mark() -> str:
        name = f".seen-{secrets.token_hex(8)}"
        with guard_output_folder(options.out):
            (out / name).touch()
        return name

    mark = out / dist.run_on_first_rank(world, make_mark)
    unseen = dist.sum_over_ranks(world, [float(not mark.exists())])[0]
    if world.is_first:
        mark.unlink(missing_ok=True)
    if world.is_first and unseen:
        dist.write_line(
            f"warning: --out {out} is on this node's own disk: a run that is started again on "
            "other nodes will not find its checkpoints; name a folder on a shared file system"
        )
