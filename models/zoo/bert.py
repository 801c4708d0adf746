"""A bidirectional transformer encoder in the manner of BERT (Devlin 2019), with pre-norm blocks.

It is pretrained to predict masked tokens (`objective = "masked"`) and then classifies texts (`"classify"`) with a
separate head. Token 0 is padding, which gets no attention; the last row of the embedding is the mask token.

Shapes: B rows, T tokens, D width, H heads. Between modules pass `h` [B, T, D] and `real` [B, T], 1 for a token and 0 for
padding, as a pair.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from models.zoo import gpt
from models.zoo.gpt import Embedding, require_dropout, scale_residual_init
from models.zoo.layout import Chain, Layout
from models.zoo.spec import ModelSpec
from models.zoo.transformer import MASKED, require_divisible, sequence_length

Objective = Literal["classify", "masked"]
Hidden = tuple[torch.Tensor, torch.Tensor]

PAD = 0


class BERT(Chain):
    """x [B, T] token ids -> logits [B, classes], or [B, T, classes] of masked tokens."""

    def __init__(
        self,
        length: int,
        vocab: int,
        classes: int,
        width: int,
        layers: int,
        heads: int,
        dropout: float,
        objective: Objective,
    ) -> None:
        super().__init__()
        self.embedding = PaddedEmbedding(vocab + 1, length, width, dropout)
        self.layers = nn.ModuleDict({str(index): Block(width, heads, dropout) for index in range(layers)})
        self.norm = Norm(width)
        self.head = (
            TokenPredictor(width, classes) if objective == "masked" else Classifier(width, classes, dropout)
        )
        for block in self.layers.values():
            scale_residual_init(block, layers)


class PaddedEmbedding(nn.Module):
    """Token ids [B, T] -> hidden states, and a mask of the tokens that are not padding."""

    def __init__(self, vocab: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.rows = Embedding(vocab, length, width, dropout)

    def forward(self, x: torch.Tensor) -> Hidden:
        return self.rows(x), (x != PAD).to(x.dtype)


class Block(gpt.Block):
    """A block of `gpt` in which every token attends to all tokens that are not padding."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout, causal=False)

    def forward(self, hidden: Hidden) -> Hidden:  # type: ignore[override]
        h, real = hidden
        # finite, so that a text of only padding stays finite
        bias = ((1 - real) * MASKED)[:, None, None, :]
        h = h + self.dropout(self.attention(self.norm1(h), bias))
        return h + self.dropout(self.mlp(self.norm2(h))), real


class Norm(nn.Module):
    """LayerNorm of the hidden states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.LayerNorm(width)

    def forward(self, hidden: Hidden) -> Hidden:
        h, real = hidden
        return self.features(h), real


class Classifier(nn.Module):
    """Hidden states -> logits [B, classes], from their mean over the tokens that are not padding."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.pool = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, classes)

    def forward(self, hidden: Hidden) -> torch.Tensor:
        h, real = hidden
        weight = real.to(h.dtype)
        mean = (h * weight.unsqueeze(-1)).sum(1) / weight.sum(1, keepdim=True).clamp(min=1)
        logits: torch.Tensor = self.out(self.dropout(torch.tanh(self.pool(mean))))
        return logits


class TokenPredictor(nn.Module):
    """Hidden states -> logits [B, T, vocab] of the original tokens (Devlin 2019, section 3.1, task 1)."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab)

    def forward(self, hidden: Hidden) -> torch.Tensor:
        h, _ = hidden
        logits: torch.Tensor = self.out(self.norm(F.gelu(self.dense(h), approximate="tanh")))
        return logits


def layout(width: int, heads: int, objective: Objective) -> Layout:
    """Without a `length`: sequences cannot be split, because padding is known only for whole ones."""
    return replace(
        gpt.layout(0, width, heads),
        vocabulary="embedding.rows.token",
        head="head.out" if objective == "masked" else "",
        attention=(),
    )


def spec(
    input_shape: tuple[int, ...],
    classes: int,
    vocab: int = 2048,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
    objective: Objective = "classify",
) -> ModelSpec:
    """`input_shape` is (T,); token ids are 0 (padding) to `vocab` - 1, and `vocab` is the mask token.

    With `objective = "masked"` the classes are the `vocab` tokens.

    Raises:
        ValueError: not token sequences, classes other than the tokens, a width that `heads` does not divide, or an
            invalid dropout or objective.
    """
    length = sequence_length(input_shape)
    require_divisible(width, heads)
    require_dropout(dropout)
    if objective not in ("classify", "masked"):
        raise ValueError(f"objective is 'classify' or 'masked', got {objective!r}")
    if vocab < 2:
        raise ValueError(f"vocab counts padding and at least one token, so it is 2 or more; got {vocab}")
    if objective == "masked" and classes != vocab:
        raise ValueError(
            f"a hidden token is one of the vocab = {vocab} tokens, but there are {classes} classes"
        )
    return ModelSpec(
        "bert",
        lambda: BERT(length, vocab, classes, width, layers, heads, dropout, objective),
        input_shape,
        classes,
        input_dtype="int32",
        task="next_token" if objective == "masked" else "classification",
        options={
            "vocab": vocab,
            "width": width,
            "layers": layers,
            "heads": heads,
            "dropout": dropout,
            "objective": objective,
        },
        vocab=vocab + 1,
        layout=layout(width, heads, objective),
        masked=objective == "masked",
    )
