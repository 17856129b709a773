"""The same by Hugging Face's Trainer alone.

    torchrun ... huggingface.py DATA BATCH EPOCHS

Rank 0 prints the rows a second of each epoch, over all ranks.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from trainer.data import images
from trainer.workloads import mnist


class Classifier(nn.Module):  # type: ignore[misc]  # torch need not be where this is checked
    """The network as the Trainer wants it: with its loss."""

    def __init__(self) -> None:
        """Make it with first weights."""
        super().__init__()
        self.inner = mnist.make_model(42)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compute scores and loss."""
        scores = self.inner(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


class Rates(TrainerCallback):  # type: ignore[misc]  # as above
    """Prints the rows a second of each epoch."""

    def __init__(self, rows: int) -> None:
        """Remember how many rows an epoch has."""
        self._rows, self._started = rows, 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the Trainer's own
        """Begin to count."""
        self._started = time.perf_counter()

    def on_epoch_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Say how quick it was."""
        if state.is_world_process_zero:
            seconds = time.perf_counter() - self._started
            print(f"RATE {self._rows / seconds:.1f}", flush=True)


def main(data: str, batch: int, epochs: int) -> None:
    """Train."""
    rows = images.normalize_images(images.read_mnist(Path(data))[0], mnist.MEAN, mnist.SPREAD)
    pairs = [
        {"inputs": one, "labels": label}
        for one, label in zip(rows.inputs, rows.labels, strict=True)
    ]
    with tempfile.TemporaryDirectory() as out:
        settings = TrainingArguments(
            output_dir=out,
            num_train_epochs=epochs,
            per_device_train_batch_size=batch,
            learning_rate=1e-3,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
        )
        model = Classifier()
        trainer = Trainer(
            model=model, args=settings, train_dataset=pairs, callbacks=[Rates(len(pairs))]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
