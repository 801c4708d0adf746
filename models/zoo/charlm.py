"""A causal transformer that predicts the next character at every position."""

from __future__ import annotations

import torch
from torch import nn

from models.zoo.spec import ModelSpec
from models.zoo.transformer import Block, TokenEmbedding, causal_bias, require_divisible, sequence_length


class CharLM(nn.Module):
    """x [B, T] int32 -> logits [B, T, classes]; position t sees tokens 0 to t only."""

    def __init__(self, length: int, classes: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(classes, length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        bias = causal_bias(x.shape[1], like=h)
        for block in self.blocks:
            h = block(h, bias)
        logits: torch.Tensor = self.fc(self.norm(h))
        return logits


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
        lambda: CharLM(length, classes, width, layers, heads),
        input_shape,
        classes,
        input_dtype="int32",
        task="next_token",
        options={"width": width, "layers": layers, "heads": heads},
        vocab=classes,
    )
