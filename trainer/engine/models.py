"""The models, small enough to train on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import BertForSequenceClassification


def tiny_bert(*, words: int, padding: int, classes: int) -> BertForSequenceClassification:
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
