"""Workload ``tiny-bert``: a two-layer BERT learns to sort short texts into four classes.

Hugging Face's Trainer does the training; for several ranks, in DistributedDataParallel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..config import Options, format_count, require_fitting_batch
from ..data import texts
from ..engine import checkpoints, sync
from ..engine.loop import measure_accuracy
from ..network import dist
from ..network.dist import World

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import BertForSequenceClassification, Trainer, TrainingArguments

MAX_TOKENS = 128
WARMUP = 50  # steps over which the learning rate rises, or a tenth of all steps when that is less


def run(options: Options, world: World) -> None:
    """Train, measure on the held-out rows, and save the model, the tokenizer and the metrics."""
    from transformers import set_seed

    train_texts, held_out_texts = dist.run_on_all_ranks(world, lambda: texts.load(options))
    tokenizer = dist.run_on_all_ranks(world, lambda: texts.load_tokenizer(options))
    train = texts.encode_rows(tokenizer, train_texts, MAX_TOKENS)
    held_out = texts.encode_rows(tokenizer, held_out_texts, MAX_TOKENS)
    unknown = texts.compute_unknown_share(tokenizer, train)
    dist.run_on_all_ranks(world, lambda: texts.refuse_unknown(unknown, options))
    dist.run_on_all_ranks(world, lambda: require_fitting_batch(options, len(train)))

    counts = {"rows to train on": str(len(train)), "rows held out": str(len(held_out))}
    sync.require_same_inputs(world, options, counts)
    steps = math.ceil(math.ceil(len(train) / options.batch_size) / world.size)
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
    model = make_model(len(tokenizer), padding)
    trainer = make_trainer(model, train, make_settings(options, world, steps), padding)
    if start.checkpoint is not None:
        checkpoints.register_safe_types()
    outcome = trainer.train(resume_from_checkpoint=start.checkpoint and str(start.checkpoint))

    accuracy, loss = evaluate(model, held_out, world, padding)
    if not world.is_first:
        return
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
    }
    dist.write_line(f"Saving model to {options.out}")
    with checkpoints.guard_output_folder(options.out):
        model.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
        checkpoints.write_metrics(options.out, metrics, world.device)
    rows = format_count(len(held_out), "row")
    dist.write_line(f"held-out accuracy {accuracy:.3f} loss {loss:.3f} on {rows}")


def make_model(words: int, padding: int) -> BertForSequenceClassification:
    """Return a BERT of two layers for so many tokens, small enough to train on a CPU."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=words,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=256,
        pad_token_id=padding,
        num_labels=texts.CLASSES,
    )
    model = BertForSequenceClassification(config)
    # The Trainer of transformers 5 multiplies the loss of a forward() with **kwargs by the number
    # of ranks. BERT's loss is a mean already: it, and each gradient, would be too large.
    model.accepts_loss_kwargs = False
    return model


def choose_learning_rate(rows_a_step: int) -> float:
    """Return 1e-3 for 16 rows a step, rising with their root to 2e-3; 4e-3 was seen to diverge."""
    return min(2e-3, 1e-3 * math.sqrt(rows_a_step / 16))


def make_settings(options: Options, world: World, steps: int) -> TrainingArguments:
    """Return the Trainer's settings; ``steps`` is the number of steps an epoch."""
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
    """Return the Trainer, with plain lines of progress from rank 0 in place of its own."""
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
    """Report progress; the Trainer calls it every ``logging_steps`` steps."""
    if state.is_world_process_zero and "loss" in logs:
        epoch, loss, lr = (float(logs[name]) for name in ("epoch", "loss", "learning_rate"))
        step = f"step {state.global_step}/{state.max_steps}"
        dist.write_line(f"{step} epoch {epoch:.2f} loss {loss:.4f} lr {lr:.2e}")


def evaluate(
    model: Module, examples: Sequence[texts.Example], world: World, padding: int
) -> tuple[float, float]:
    """Return the accuracy on some examples, and their mean loss in nats."""

    def score(numbers: Tensor) -> tuple[Tensor, Tensor]:
        batch = texts.make_batch([examples[number] for number in numbers.tolist()], padding)
        labels = batch.pop("labels")
        inputs = {name: tensor.to(world.device) for name, tensor in batch.items()}
        return model(**inputs).logits, labels

    return measure_accuracy(model, len(examples), 64, world, score)
