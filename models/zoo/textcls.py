"""A transformer that classifies texts: attention over the tokens, their mean, one dense layer."""

from __future__ import annotations

import torch

from models.zoo.spec import ModelSpec
from models.zoo.transformer import MASKED, Transformer, require_divisible, sequence_length

PAD = 0
"""The padding token of short texts; it gets no attention and the mean leaves it out."""


class TextClassifier(Transformer):
    """x [B, T] int32, `PAD` after the end of the text -> logits [B, classes]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counted = (x != PAD).to(self.embedding.weight.dtype)
        h = self.features(x, ((1 - counted) * MASKED)[:, None, None, :])
        tokens = counted.sum(1, keepdim=True).clamp(min=1)
        mean = (h * counted.unsqueeze(-1)).sum(1) / tokens
        logits: torch.Tensor = self.fc(mean)
        return logits


def spec(
    input_shape: tuple[int, ...],
    classes: int,
    vocab: int = 2048,
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
) -> ModelSpec:
    """`input_shape` is (T,); token ids are 0 (padding) to `vocab` - 1.

    Raises:
        ValueError: not token sequences, a vocabulary without a token, or a width that `heads` does not divide.
    """
    length = sequence_length(input_shape)
    require_divisible(width, heads)
    if vocab < 2:
        raise ValueError(f"vocab counts padding and at least one token, so it is 2 or more; got {vocab}")
    return ModelSpec(
        "textcls",
        lambda: TextClassifier(length, vocab, classes, width, layers, heads),
        input_shape,
        classes,
        input_dtype="int32",
        options={"vocab": vocab, "width": width, "layers": layers, "heads": heads},
        vocab=vocab,
    )
