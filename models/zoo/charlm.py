"""A causal transformer that predicts the next character at every position."""

from __future__ import annotations

import torch

from models.zoo.layout import Layout
from models.zoo.spec import ModelSpec
from models.zoo.transformer import Transformer, causal_bias, require_divisible, sequence_length


class CharLM(Transformer):
    """x [B, T] int32 -> logits [B, T, classes]; position t sees tokens 0 to t only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.features(x, causal_bias(x.shape[1], like=self.embedding.weight)))
        return logits


LAYOUT = Layout(
    order=(),
    head="fc",
    attention=("blocks.*.attention.core",),
    positions=("embedding.rows",),
)
"""Where cached keys and values and positions go in; the blocks, which share a mask, do not split into stages."""


def spec(
    input_shape: tuple[int, ...], classes: int, width: int = 32, layers: int = 2, heads: int = 4
) -> ModelSpec:
    """`input_shape` is (T,); `classes` is the vocabulary of both input and labels.

    Raises:
        ValueError: not token sequences, or a width that `heads` does not divide.
    """
    length = sequence_length(input_shape)
    require_divisible(width, heads)
    return ModelSpec(
        "charlm",
        lambda: CharLM(length, classes, classes, width, layers, heads),
        input_shape,
        classes,
        input_dtype="int32",
        task="next_token",
        options={"width": width, "layers": layers, "heads": heads},
        vocab=classes,
        layout=LAYOUT,
    )
