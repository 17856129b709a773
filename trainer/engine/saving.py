"""The files of a run: checkpoints while it lasts, model and metrics at its end."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Options, TrainerError
from ..counts import counted
from ..network import dist
from . import checkpoints, memory, progress, snapshot
from .sampling import Position

if TYPE_CHECKING:
    from ..network.dist import World
    from .loop import Run

MODEL = "model.pt"
_JOB = ".job"
"""The file with the job that writes here; if that is started again, it resumes."""


def begin(run: Run, environ: Mapping[str, str]) -> None:
    """Prepare the output folder, and resume from its newest sound checkpoint if requested.

    Raises:
        TrainerError: on every rank, if the folder or a checkpoint is unusable.
    """
    options, world = run.options, run.world
    again = _is_restart(environ)
    newest = dist.by_first(world, lambda: _prepare(options, job_of(environ), again=again))
    _warn_of_other_disks(options, world)
    if world.is_first and run.mixed:
        dist.say(
            "computing in bfloat16 where that is accurate enough (--precision float32: nowhere)"
        )
    if newest is None:
        if world.is_first:
            progress.rewind(options.out, 0)
        return
    name, data = newest
    dist.together(world, lambda: _restore(run, snapshot.load(data, name), name))
    if world.is_first:
        lost = progress.rewind(options.out, run.at.step)
        left = f"{counted(lost, 'step')} to do again"
        dist.say(f"resuming from {name}, after {counted(run.at.step, 'step')} ({left})")


def save_epoch(run: Run, accuracy: float) -> None:
    """Write the checkpoint at the end of an epoch, also as the best one if it is.

    Raises:
        TrainerError: on every rank, if it cannot be written.
    """
    is_best, run.best = accuracy > run.best, max(accuracy, run.best)
    _save(run, f"checkpoint_epoch_{run.at.epoch}.pt", is_best=is_best)


def save_step(run: Run) -> None:
    """Write a checkpoint within an epoch.

    Raises:
        TrainerError: on every rank, if it cannot be written.
    """
    run.sync.share()
    _save(run, f"checkpoint_step_{run.at.step}.pt", is_best=False)


def finish(run: Run, done: progress.Progress, accuracy: float, loss: float) -> None:
    """Write the model's weights and the metrics.

    Raises:
        TrainerError: on every rank, if they cannot be written.
    """
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
        **_shares(run),
        **memory.peak(world.device),
    }

    def write() -> None:
        dist.say(f"Saving model to {options.out / MODEL}")
        snapshot.write_whole(options.out / MODEL, snapshot.packed(task.model.state_dict()))
        checkpoints.write_metrics(options.out, metrics)
        rows = counted(len(task.held_out), "row")
        dist.say(f"held-out accuracy {accuracy:.3f} loss {loss:.3f} on {rows}")

    dist.by_first(world, lambda: _written(options, write))


def _shares(run: Run) -> dict[str, float]:
    """Return the fractions of the steps' time by purpose (0 to 1), on average of the ranks."""
    whole = max(run.stepping, 1e-9)
    mine = [run.reading / whole, min(1.0, run.sync.spent / whole)]
    data, sync = (total / run.world.size for total in dist.sums(run.world, mine))
    if run.world.device != "cpu":
        return {}  # a GPU works on while the clock here stands still
    shares = {"data_share": data, "sync_share": sync, "compute_share": max(0.0, 1 - data - sync)}
    if run.world.is_first and run.stepping:
        words = ", ".join(f"{name[:-6]} {share:.0%}" for name, share in shares.items())
        dist.say(f"time of a rank's steps, on average: {words}")
    return {name: round(share, 4) for name, share in shares.items()}


def job_of(environ: Mapping[str, str]) -> str:
    """Return the job's name, which stays the same when it is started again; empty for none.

    Slurm keeps a job's number when it goes back into the queue; torchrun has an id for each launch,
    which is ``none`` by default.
    """
    slurm, elastic = environ.get("SLURM_JOB_ID", ""), environ.get("TORCHELASTIC_RUN_ID", "")
    if slurm:
        return f"slurm {slurm}"
    if elastic in ("", "none"):
        return ""
    return f"torchrun {elastic}"


def _prepare(options: Options, job: str, *, again: bool) -> tuple[str, bytes] | None:
    """Prepare the folder; return the path and the bytes of the checkpoint to resume from."""
    out = options.out
    newest = None

    def prepare() -> None:
        nonlocal newest
        out.mkdir(parents=True, exist_ok=True)
        if options.resume or _is_its_own(out, job, again=again):
            newest = snapshot.newest(out)
            if newest is None and options.resume:
                dist.say(f"{out} has no checkpoint: starting from the beginning")
        else:
            _clear(out)
        (out / _JOB).write_text(job, encoding="utf-8")
        (out / checkpoints.METRICS).unlink(missing_ok=True)

    _written(options, prepare)
    if newest is None:
        return None
    note, data = newest
    return str(note.path), data


def _is_restart(environ: Mapping[str, str]) -> bool:
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(environ.get(name, "0") not in ("", "0") for name in counts)


def _is_its_own(out: Path, job: str, *, again: bool) -> bool:
    """Return True if an earlier start of this job has left unfinished work here.

    For a job that is started ``again``, finished work counts, too: a rank may have died after it.
    """
    mark = out / _JOB
    is_finished = (out / checkpoints.METRICS).is_file()
    if not job or not mark.is_file():
        return False
    if is_finished and not again:
        return False
    return mark.read_text("utf-8", errors="replace") == job


def _clear(out: Path) -> None:
    """Remove the files of a finished run; TrainerError if it did not finish."""
    names = [note.path.stem for note in snapshot.complete(out)]
    left = names or sorted(snapshot.without_note(out))
    if left and not (out / checkpoints.METRICS).is_file():
        raise TrainerError(
            f"{out} has checkpoints of a run that did not finish, the newest {left[-1]}.pt",
            hint=f"continue it with --resume, discard it with rm {out}/checkpoint_*, or choose "
            "another --out",
        )
    if left:
        dist.say(f"{out} has a finished run: it is replaced")
    snapshot.clear(out)
    (out / progress.LOG).unlink(missing_ok=True)


def _restore(run: Run, state: dict[str, Any], name: str) -> None:
    """Set a run to a state's position and weights; TrainerError if it is another run's."""
    try:
        _require_same_run(run, state, name)
        run.task.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        at = Position(epoch=int(state["epoch"]), row=int(state["row"]), step=int(state["step"]))
        run.best = float(state["best"])
        inside = 0 <= at.row < run.order.rows and at.epoch >= 0 and at.step >= 0
        if not inside:
            raise ValueError(f"epoch {at.epoch}, row {at.row}, step {at.step}")
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise TrainerError(
            f"{name} cannot be resumed from: {type(error).__name__}: {error}",
            hint="remove it, and --resume continues from the one before it",
        ) from error
    run.at = at


def _require_same_run(run: Run, state: dict[str, Any], name: str) -> None:
    options = run.options
    expected = {"workload": options.workload, "rows": len(run.task.train), "seed": options.seed}
    differences = [
        f"{key} {state.get(key)}, not {value}"
        for key, value in expected.items()
        if state.get(key) != value
    ]
    shapes = _shapes(run.task.model.state_dict())
    if not differences and _shapes(state.get("model", {})) != shapes:
        differences = ["another model"]
    if differences:
        raise TrainerError(
            f"{name} belongs to another run: {'; '.join(differences)}",
            hint="resume with the same workload, --data, --subset, --held-out and --seed, or "
            "start again in another --out",
        )


def _shapes(weights: Mapping[str, Any]) -> dict[str, object]:
    return {key: tensor.shape for key, tensor in weights.items()}


def _save(run: Run, name: str, *, is_best: bool) -> None:
    options = run.options

    def save() -> None:
        state = {
            "workload": options.workload,
            "rows": len(run.task.train),
            "seed": options.seed,
            "model": run.task.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "epoch": run.at.epoch,
            "row": run.at.row,
            "step": run.at.step,
            "best": run.best,
        }
        data = snapshot.packed(state)
        if is_best:  # first: the epoch's checkpoint records its accuracy
            snapshot.save(options.out / snapshot.BEST, data, run.at.step)
        snapshot.save(options.out / name, data, run.at.step)
        snapshot.thin_out(options.out, options.keep)

    dist.by_first(run.world, save)


def _written(options: Options, work: Any) -> None:  # noqa: ANN401 - a callable without a result
    try:
        work()
    except OSError as error:
        raise TrainerError(
            f"--out {options.out} cannot be used: {error.strerror or error}",
            hint="name a folder that can be written to, with room for the model",
        ) from error


def _warn_of_other_disks(options: Options, world: World) -> None:
    """Warn if the folder is not the same one on all nodes: a later run may start elsewhere."""
    out = options.out
    if world.size == world.local_size:
        return
    name = dist.by_first(world, lambda: _mark(options))
    unseen = dist.sums(world, [float(not (out / name).exists())])[0]
    if world.is_first:
        (out / name).unlink(missing_ok=True)
        if unseen:
            dist.say(
                f"warning: --out {out.absolute()} is on this node's own disk: a run that is "
                "started again on other nodes will not find its checkpoints; name a folder on a "
                "shared file system"
            )


def _mark(options: Options) -> str:
    name = f".seen-{secrets.token_hex(8)}"
    _written(options, (options.out / name).touch)
    return name
