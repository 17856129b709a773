"""Workload ``tiny-bert``: a two-layer BERT learns to sort short texts into four classes.

Hugging Face's Trainer does the training. Under a launcher it wraps the model in
DistributedDataParallel: every rank takes its share of each step's rows, and the gradients are
averaged after every step, so that all ranks keep the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import Options, format_count, require_fitting_batch
from ..data import texts
from ..engine import checkpoints, sync
from ..network import dist
from ..network.dist import World

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import BertForSequenceClassification, Trainer, TrainingArguments


# --- The models, small enough to train on a CPU --------------------------------------------------


def make_model(*, words: int, padding: int, classes: int) -> BertForSequenceClassification:
    """A BERT of two layers with first weights, for a vocabulary of ``words`` tokens.

    ``padding`` is the number of the padding token.
    """
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=words,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=256,
            max_position_embeddings=256,
            pad_token_id=padding,
            num_labels=classes,
        )
    )
    # The Trainer of transformers 5 takes a forward() with **kwargs for one that divides its loss by
    # the rows of all ranks, and multiplies it by their number. BERT's loss is a mean already: it,
    # and each gradient, would come out as many times too large as there are ranks.
    model.accepts_loss_kwargs = False
    return model


MAX_TOKENS = 128
WARMUP = 50
"""Steps over which the learning rate rises, or a tenth of all steps when that is less."""


def run(options: Options, world: World) -> None:
    """Train, measure on the held-out rows, and save the model, the tokenizer and the metrics."""
    from transformers import set_seed

    corpus = dist.run_on_all_ranks(world, lambda: texts.load(options))
    tokenizer = dist.run_on_all_ranks(world, lambda: texts.load_tokenizer(options))
    train = texts.encode_rows(tokenizer, corpus.train, MAX_TOKENS)
    held_out = texts.encode_rows(tokenizer, corpus.held_out, MAX_TOKENS)
    unknown = texts.unknown_share(tokenizer, train)
    dist.run_on_all_ranks(world, lambda: texts.refuse_unknown(unknown, options))
    dist.run_on_all_ranks(world, lambda: require_fitting_batch(options, len(train)))

    counts = {"rows to train on": str(len(train)), "rows held out": str(len(held_out))}
    sync.require_same_inputs(world, options, counts)
    steps = steps_an_epoch(len(train), options.batch_size, world.size)
    start = dist.run_on_first_rank(world, lambda: checkpoints.prepare(options, steps))
    dist.run_on_all_ranks(world, lambda: checkpoints.require_visible_checkpoint(start))
    if world.is_first:
        dist.write_line(
            f"{format_count(len(train), 'row')} to train on, {len(held_out)} held out, "
            f"{unknown:.1%} of the tokens unknown, {format_count(steps, 'step')} an epoch"
        )
    if world.is_first and start.checkpoint is not None:
        dist.write_line(f"resuming from {start.checkpoint}, after epoch {start.epochs_done:g}")

    set_seed(options.seed)
    padding = tokenizer.pad_token_id
    model = make_model(words=len(tokenizer), padding=padding, classes=texts.CLASSES)
    trainer = make_trainer(model, train, arguments(options, world, steps), padding)
    if start.checkpoint is not None:
        checkpoints.register_safe_types()
    outcome = trainer.train(resume_from_checkpoint=start.checkpoint and str(start.checkpoint))

    accuracy, loss = evaluate(model, held_out, world, padding)
    if not world.is_first:
        return
    dist.write_line(f"Saving model to {options.out}")
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    seconds = outcome.metrics["train_runtime"]
    seen = len(train) * max(0.0, options.epochs - start.epochs_done)
    metrics = {
        "accuracy": accuracy,
        "loss": loss,
        "samples_per_second": round(seen / seconds, 3),
        "world_size": world.size,
        "epochs": options.epochs,
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "train_seconds": seconds,
        **checkpoints.measure_peak_memory(world.device),
    }
    checkpoints.write_metrics(options.out, metrics)
    dist.write_line(
        f"held-out accuracy {accuracy:.3f} loss {loss:.3f} on {format_count(len(held_out), 'row')}"
    )


def steps_an_epoch(rows: int, batch_size: int, ranks: int) -> int:
    """Steps in which ``ranks`` processes see ``rows`` rows, ``batch_size`` each a step."""
    return math.ceil(math.ceil(rows / batch_size) / ranks)


def choose_learning_rate(rows_a_step: int) -> float:
    """A rate that learns: 1e-3 for 16 rows a step, rising with the square root of their number.

    Not above 2e-3, which is good for 64 and 96 rows a step; 4e-3 was seen to diverge.
    """
    return min(2e-3, 1e-3 * math.sqrt(rows_a_step / 16))


def arguments(options: Options, world: World, steps: int) -> TrainingArguments:
    """The Trainer's settings; ``steps`` is the number of steps an epoch."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(options.out),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr or choose_learning_rate(options.batch_size * world.size),
        warmup_steps=min(WARMUP, max(1, steps * options.epochs // 10)),
        seed=options.seed,
        logging_steps=10,
        save_strategy="epoch",
        save_total_limit=2,
        ddp_find_unused_parameters=False,
        ddp_backend=world.backend if world.launched else None,
        use_cpu=world.device == "cpu",
        dataloader_pin_memory=world.device == "cuda",
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
    )


def make_trainer(
    model: Module, train: Sequence[texts.Example], settings: TrainingArguments, padding: int
) -> Trainer:
    """The Trainer, with plain lines of progress from rank 0 in place of its own."""
    from transformers import PrinterCallback, Trainer, TrainerCallback

    # Only the one event matters, and the base class ignores the rest.
    progress = TrainerCallback()
    progress.on_log = report
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=train,
        data_collator=partial(texts.make_batch, padding=padding),
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def report(_settings: Any, state: Any, _control: Any, *, logs: dict[str, float], **_: Any) -> None:  # noqa: ANN401
    """Say how far the training is; the Trainer calls it every ``logging_steps`` steps."""
    if state.is_world_process_zero and "loss" in logs:
        dist.write_line(
            f"step {state.global_step}/{state.max_steps} epoch {logs['epoch']:.2f} "
            f"loss {float(logs['loss']):.4f} lr {float(logs['learning_rate']):.2e}"
        )


def evaluate(
    model: Module, examples: Sequence[texts.Example], world: World, padding: int
) -> tuple[float, float]:
    """The share of right answers, and the mean cross-entropy in nats; each row counts once.

    The ranks take turns with the rows and add up what they found: no row is seen twice, as it
    would be where shares are padded to the same length.
    """
    import torch
    from torch.nn.functional import cross_entropy

    mine = examples[world.rank :: world.size]
    right = loss = 0.0
    model.eval()
    with torch.inference_mode():
        for first in range(0, len(mine), 64):
            batch = texts.make_batch(mine[first : first + 64], padding)
            rows = {name: tensor.to(world.device) for name, tensor in batch.items()}
            labels = rows.pop("labels")
            scores = model(**rows).logits
            right += float((scores.argmax(dim=-1) == labels).sum())
            loss += float(cross_entropy(scores, labels, reduction="sum"))
    right, loss = dist.sum_over_ranks(world, [right, loss])
    return right / len(examples), loss / len(examples)
