"""Reports of rank 0 while it trains: at most a line a second, ``metrics.jsonl``, TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..config import explain_errors
from ..network import dist
from .checkpoints import write_whole

LOG = "metrics.jsonl"
_SECONDS = 1.0
_BOARD_SECONDS = 0.5  # between two points in TensorBoard: one costs as much as a small step
_BAR = 24


class Progress:
    """Counts steps and rows; the rank that ``speaks`` reports them for all."""

    def __init__(self, out: Path, steps: int, *, speaks: bool) -> None:
        self._steps, self._speaks = steps, speaks
        hint = "name a folder that can be written to with --out"
        with explain_errors(f"{out / LOG} cannot be written", hint):
            self._file = (out / LOG).open("a", encoding="utf-8") if speaks else None
        self._board: Any = None  # TensorBoard's, where it is installed
        if speaks and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            with self._guard_tensorboard():
                self._board = SummaryWriter(log_dir=str(out / "tensorboard"))
        self._started = self._said = time.monotonic()
        self._drawn = self._started - _BOARD_SECONDS
        self._bar = speaks and sys.stdout.isatty()
        self._count = 0
        self.rows = 0  # that all ranks have trained on since the beginning

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return time.monotonic() - self._started

    def step(self, step: int, epoch: float, loss: float, lr: float, rows: int) -> None:
        """Note a step, numbered from 1, of all ranks: ``rows``, and their mean ``loss``."""
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
        line = f"step {step}/{self._steps} epoch {epoch:.2f} loss {loss:.4f} lr {lr:.2e} "
        line += f"{rate:.0f} samples/s eta {_format_clock(left)}"
        if not self._bar:
            dist.write_line(line)
            return
        bar = ("#" * (_BAR * step // self._steps)).ljust(_BAR, ".")
        sys.stdout.write(f"\r[{bar}] {line}\x1b[K" + ("\n" if last else ""))
        sys.stdout.flush()

    def epoch(self, epoch: int, step: int, loss: float, accuracy: float) -> None:
        """Report on an epoch: the mean loss while training, and the share of right answers."""
        if self._speaks:
            values = {"avg_loss": round(loss, 6), "accuracy": round(accuracy, 6)}
            self._note({"step": step, "epoch": epoch, **values})
            self._draw(values, step)
            clear = "\r\x1b[K" if self._bar else ""
            figures = f"Avg Loss: {loss:.6f}, Accuracy: {accuracy:.2%}"
            dist.write_line(f"{clear}Epoch {epoch} - {figures}")

    def close(self) -> None:
        """Write everything that is still buffered."""
        if self._file is not None:
            self._file.close()
        with self._guard_tensorboard():
            if self._board is not None:
                self._board.close()

    def _note(self, values: dict[str, float]) -> None:
        if self._file is not None:
            values = {**values, "seconds": round(self.seconds, 3)}
            try:
                self._file.write(json.dumps(values) + "\n")
                self._file.flush()
            except OSError as error:  # the next checkpoint ends the run, on all ranks
                dist.write_line(f"warning: {LOG} is no longer written: {error.strerror or error}")
                self._file = None

    def _draw(self, values: dict[str, float], step: int) -> None:
        with self._guard_tensorboard():
            for name, value in values.items():
                if self._board is not None:
                    self._board.add_scalar(name, value, step)

    @contextmanager
    def _guard_tensorboard(self) -> Iterator[None]:
        """Give up the curves, with one warning, if they cannot be written."""
        try:
            yield
        except Exception as error:  # its writer passes on what failed in a thread of its own
            dist.write_line(f"warning: no more of TensorBoard's files are written: {error}")
            self._board = None


def remove_later_steps(out: Path, step: int) -> int:
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
        write_whole(path, "".join(kept).encode())
    return last - step


def _format_clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
