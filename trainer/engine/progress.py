"""The rows of each rank in each step, and reports of rank 0 about them."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..config import TrainerError
from ..network import dist

if TYPE_CHECKING:
    from torch import Tensor


# --- The rows of each rank in each step: every row once an epoch, for any number of ranks --------

# The order is a function of the seed and the epoch, and a step's rows are those at a position in
# it. So a run can resume from a position alone, also with another number of ranks than before.

_EPOCHS = 1 << 20
"""More epochs than any run has: the seeds of different runs stay apart."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in a run."""

    epoch: int = 0
    """Number of whole epochs that are done."""
    row: int = 0
    """Rows of the next one that are done, over all ranks."""
    step: int = 0
    """Steps that are done, in all."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The work of one rank in one step."""

    rows: Tensor
    """The numbers of its rows, at least one: whole numbers, shape (n,)."""
    weights: Tensor
    """1 for each row, and 0 for one that only keeps a rank without rows busy: shape (n,)."""
    total: int
    """Rows of the step over all ranks."""


class Order:
    """The order of rows in each epoch."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        """Describe the order; ``batch`` counts the rows of one step over all ranks."""
        self.rows, self.batch = rows, batch
        self._seed = seed
        self._epoch, self._order = -1, None

    @property
    def steps(self) -> int:
        """Steps of a whole epoch; the last one may be a shorter one."""
        return -(-self.rows // self.batch)

    def share(self, at: Position, rank: int, size: int) -> Share:
        """Return the work of rank ``rank`` of ``size`` in the step at a position.

        The ranks take turns with the rows. In a last, short step a rank may have none: it works on
        one of another's, which does not count, as all ranks have to take part.
        """
        import torch

        order = self._of(at.epoch)
        step = order[at.row : at.row + self.batch]
        mine = step[rank::size]
        weights = torch.ones(max(1, len(mine)))
        if not len(mine):
            mine, weights = step[:1], torch.zeros(1)
        return Share(rows=mine, weights=weights, total=len(step))

    def after(self, at: Position) -> Position:
        """Return the position after the step at a position."""
        row = at.row + self.batch
        if row >= self.rows:
            return Position(epoch=at.epoch + 1, row=0, step=at.step + 1)
        return Position(epoch=at.epoch, row=row, step=at.step + 1)

    def _of(self, epoch: int) -> Tensor:
        import torch

        if self._order is None or epoch != self._epoch:
            source = torch.Generator().manual_seed(self._seed * _EPOCHS + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.rows, generator=source)
        return self._order


# --- Reports of rank 0 while it trains: at most a line a second, ``metrics.jsonl``, TensorBoard

LOG = "metrics.jsonl"
_SECONDS = 1.0
_BOARD_SECONDS = 0.5
"""Between two points of a curve in TensorBoard: a point costs as much as a small network's step."""
_BAR = 24


class Progress:
    """Counts steps and rows, and reports for all ranks, on one of them."""

    def __init__(self, out: Path, steps: int, *, speaks: bool) -> None:
        """Begin; only the rank that ``speaks`` writes ``metrics.jsonl``, and reports."""
        self._steps, self._speaks = steps, speaks
        self._file: IO[str] | None = _log(out) if speaks else None
        self._board = _board(out) if speaks else None
        self._started = self._said = time.monotonic()
        self._drawn = self._started - _BOARD_SECONDS
        self._bar = speaks and sys.stdout.isatty()
        self._count = 0
        self.rows = 0
        """Rows that all ranks have trained on since the beginning."""

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started

    def step(self, step: int, epoch: float, loss: float, lr: float, rows: int) -> None:
        """Note a step, numbered from 1; ``rows`` are those of all ranks, ``loss`` is their mean."""
        self.rows, self._count = self.rows + rows, self._count + 1
        if not self._speaks:
            return
        rate = self.rows / max(self.seconds, 1e-9)
        values = {"loss": round(loss, 6), "lr": lr, "samples_per_second": round(rate, 1)}
        self._note({"step": step, "epoch": round(epoch, 4), **values})
        now = time.monotonic()
        last = step == self._steps
        if now - self._drawn >= _BOARD_SECONDS or last:
            self._drawn = now
            self._draw(values, step)
        if now - self._said < _SECONDS and not last:
            return
        self._said = now
        left = (self._steps - step) * self.seconds / self._count
        line = (
            f"step {step}/{self._steps} epoch {epoch:.2f} loss {loss:.4f} lr {lr:.2e} "
            f"{rate:.0f} samples/s eta {_clock(left)}"
        )
        if not self._bar:
            dist.say(line)
            return
        filled = _BAR * step // max(1, self._steps)
        sys.stdout.write(f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {line}\x1b[K")
        sys.stdout.write("\n" if last else "")
        sys.stdout.flush()

    def epoch(self, epoch: int, step: int, loss: float, accuracy: float) -> None:
        """Report on an epoch: the mean loss while training, and the share of right answers."""
        if self._speaks:
            values = {"avg_loss": round(loss, 6), "accuracy": round(accuracy, 6)}
            self._note({"step": step, "epoch": epoch, **values})
            self._draw(values, step)
            clear = "\r\x1b[K" if self._bar else ""
            dist.say(f"{clear}Epoch {epoch} - Avg Loss: {loss:.6f}, Accuracy: {accuracy:.2%}")

    def close(self) -> None:
        """Write everything that is still buffered."""
        if self._file is not None:
            self._file.close()
        with self._drawing():
            if self._board is not None:
                self._board.close()

    def _note(self, values: dict[str, float]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps({**values, "seconds": round(self.seconds, 3)}) + "\n")
                self._file.flush()
            except OSError as error:  # the next checkpoint ends the run, on all ranks
                dist.say(f"warning: {LOG} is no longer written: {error.strerror or error}")
                self._file = None

    def _draw(self, values: dict[str, float], step: int) -> None:
        board = self._board
        if board is None:
            return
        with self._drawing():
            for name, value in values.items():
                board.add_scalar(name, value, step)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Give up the curves, with one warning, if they cannot be written."""
        try:
            yield
        except Exception as error:  # its writer passes on what failed in a thread of its own
            dist.say(f"warning: TensorBoard's files are no longer written: {error}")
            self._board = None


def rewind(out: Path, step: int) -> int:
    """Remove the steps after a checkpoint from ``metrics.jsonl``; return their number."""
    path = out / LOG
    kept, last = [], step
    with suppress(OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines(keepends=True):
            try:
                number = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue  # cut off when the run was killed
            last = max(last, number)
            if number <= step:
                kept.append(line)
        partial = path.with_name(f".{LOG}.part")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)
    return last - step


def _log(out: Path) -> IO[str]:
    try:
        return (out / LOG).open("a", encoding="utf-8")
    except OSError as error:
        raise TrainerError(
            f"{out / LOG} cannot be written: {error.strerror or error}",
            hint="name a folder that can be written to with --out",
        ) from error


def _board(out: Path) -> Any:  # noqa: ANN401 - a type of a package that need not be there
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    try:
        return SummaryWriter(log_dir=str(out / "tensorboard"))
    except OSError as error:
        dist.say(f"warning: there will be no TensorBoard files: {error}")
        return None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
