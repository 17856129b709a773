"""A short training: a tiny BERT on made-up rows, which says when its first step is done."""

import os
import sys
from typing import Any

import datasets  # noqa: F401 - a training has it; see rows()
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

STEPS, ROWS, TOKENS, WORDS, CLASSES = 3, 256, 32, 1000, 4


class Says(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Tells of the first step."""

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_more: Any) -> None:  # noqa: ANN401
        """The Trainer calls it after every step."""
        if state.global_step == 1 and state.is_world_process_zero:
            print("FIRST STEP", flush=True)


def rows() -> list[dict[str, Any]]:
    """The same rows on every rank.

    A plain list: to make a Dataset of them, datasets pickles classes of pyarrow, which dill cannot
    where packages come by way of PYTHONPATH, as the handout's launcher has them.
    """
    made = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (ROWS, TOKENS), generator=made).tolist()
    return [{"input_ids": row, "labels": sum(row) % CLASSES} for row in words]


def main() -> None:
    """Train a few steps."""
    print(f"[RANK {os.environ['RANK']}] WORLD_SIZE={os.environ['WORLD_SIZE']}", flush=True)
    small = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=TOKENS,
        num_labels=CLASSES,
    )
    settings = TrainingArguments(
        output_dir=os.path.join(os.environ.get("TMPDIR", "/tmp"), "bench-out"),  # noqa: PTH118, S108
        max_steps=STEPS,
        per_device_train_batch_size=8,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(
        model=BertForSequenceClassification(small),
        args=settings,
        train_dataset=rows(),
        callbacks=[Says()],
    ).train()


if __name__ == "__main__":
    main()
    # A thread of Gloo's may abort a rank that takes its interpreter apart (pytorch/pytorch#179291).
    sys.stdout.flush()
    os._exit(0)
