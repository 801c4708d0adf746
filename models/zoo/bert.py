"""BERT as published: a bidirectional transformer encoder (Devlin 2019), with post-norm blocks (Vaswani 2017).

It is pretrained to predict masked tokens (`objective = "masked"`) and then classifies texts (`"classify"`) with a
separate head. Token 0 is padding, which gets no attention. `models.hugging_face` reads and writes published checkpoints.

Shapes: B rows, T tokens, D width, H heads. Between modules pass `h` [B, T, D] and `real` [B, T], 1 for a token and 0 for
padding, as a pair.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F

from models.zoo import gpt
from models.zoo.blocks.attention import INITIAL_DEVIATION, linear
from models.zoo.blocks.variant import Variant
from models.zoo.gpt import require_dropout
from models.zoo.layout import Chain, Layout
from models.zoo.spec import ModelSpec
from models.zoo.transformer import MASKED, require_divisible, sequence_length

Objective = Literal["classify", "masked"]
Activation = Literal["gelu", "gelu_tanh"]
Pool = Literal["first", "mean"]
Hidden = tuple[torch.Tensor, torch.Tensor]

PAD = 0


@dataclass(frozen=True)
class Sizes:
    """The sizes of a BERT and the options that change what it computes, as `spec` has them; `tokens`: rows of the embedding."""

    length: int
    tokens: int
    classes: int
    width: int
    layers: int
    heads: int
    dropout: float
    objective: Objective
    tie: bool
    activation: Activation
    epsilon: float
    hidden: int
    types: int
    separator: int
    pool: Pool

    @property
    def variant(self) -> Variant:
        """As blocks take it."""
        return Variant(bias="all", epsilon=self.epsilon, activation=self.activation, hidden=self.hidden)


class BERT(Chain):
    """x [B, T] token ids -> logits [B, classes], or [B, T, classes] of masked tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = Embedding(sizes)
        self.layers = nn.ModuleDict({str(index): Block(sizes) for index in range(sizes.layers)})
        self.head = TokenPredictor(sizes) if sizes.objective == "masked" else Classifier(sizes)
        if isinstance(self.head, TokenPredictor) and sizes.tie:
            self.head.out.weight = self.embedding.token.weight


class Embedding(nn.Module):
    """Token ids [B, T] -> hidden states, and a mask of the tokens that are not padding.

    A row for the token plus rows for its position and its type, then LayerNorm and dropout. Tokens after the first
    `separator` are of type 1, the second text of a pair (Devlin 2019, figure 2); all others, of type 0.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.tokens, sizes.width)
        self.position = nn.Embedding(sizes.length, sizes.width)
        self.token_type = nn.Embedding(sizes.types, sizes.width)
        self.norm = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.dropout = nn.Dropout(sizes.dropout)
        self.separator = sizes.separator
        for table in (self.token, self.position, self.token_type):
            nn.init.normal_(table.weight, std=INITIAL_DEVIATION)

    def forward(self, x: torch.Tensor) -> Hidden:
        positions = torch.arange(x.shape[1], device=x.device)
        types = torch.zeros_like(x)
        if self.separator:
            ends = (x == self.separator).to(x.dtype)
            types = ((ends.cumsum(1) - ends > 0) & (x != PAD)).to(x.dtype)
        h = self.token(x) + self.token_type(types) + self.position(positions)
        return self.dropout(self.norm(h)), (x != PAD).to(x.dtype)


class Block(gpt.Block):
    """A block in which every token attends to all tokens that are not padding, with norms after its residual connections."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.width, sizes.heads, sizes.dropout, causal=False, variant=sizes.variant)

    def forward(self, hidden: Hidden) -> Hidden:  # type: ignore[override]
        h, real = hidden
        # finite, so that a text of only padding stays finite
        bias = ((1 - real) * MASKED)[:, None, None, :]
        h = self.norm1(h + self.dropout(self.attention(h, bias)))
        return self.norm2(h + self.dropout(self.mlp(h))), real


class Classifier(nn.Module):
    """Hidden states -> logits [B, classes], from that of the first token, or their mean over tokens that are not padding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.pool = linear(sizes.width, sizes.width, bias=True)
        self.dropout = nn.Dropout(sizes.dropout)
        self.out = linear(sizes.width, sizes.classes, bias=True)
        self.of_first = sizes.pool == "first"

    def forward(self, hidden: Hidden) -> torch.Tensor:
        h, real = hidden
        pooled = h[:, 0] if self.of_first else _mean(h, real)
        logits: torch.Tensor = self.out(self.dropout(torch.tanh(self.pool(pooled))))
        return logits


def _mean(h: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    weight = real.to(h.dtype)
    return (h * weight.unsqueeze(-1)).sum(1) / weight.sum(1, keepdim=True).clamp(min=1)


class TokenPredictor(nn.Module):
    """Hidden states -> logits [B, T, classes] of the original tokens (Devlin 2019, section 3.1, task 1)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.dense = linear(sizes.width, sizes.width, bias=True)
        self.norm = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.out = (
            Decoder(sizes.width, sizes.classes)
            if sizes.tie
            else linear(sizes.width, sizes.classes, bias=True)
        )
        self.approximation = "none" if sizes.activation == "gelu" else "tanh"

    def forward(self, hidden: Hidden) -> torch.Tensor:
        h, _ = hidden
        logits: torch.Tensor = self.out(self.norm(F.gelu(self.dense(h), approximate=self.approximation)))
        return logits


class Decoder(nn.Module):
    """[B, T, D] -> logits [B, T, classes] by the first rows of the embedding, whose tensor is its `weight`."""

    weight: nn.Parameter

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, width))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight[: len(self.bias)], self.bias)


def layout(sizes: Sizes) -> Layout:
    """Without a `length`: sequences cannot be split, because padding is known only for whole ones."""
    masked = sizes.objective == "masked"
    tied = masked and sizes.tie
    whole = gpt.layout(0, sizes.width, sizes.heads, tied, sizes.variant)
    whole = replace(whole, order=("embedding", "layers.*", "head"), norms=(), attention=(), positions=())
    return whole if tied else replace(whole, head="head.out" if masked else "")


def spec(
    input_shape: tuple[int, ...],
    classes: int,
    vocab: int = 2048,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
    objective: Objective = "classify",
    tie: bool = True,
    activation: Activation = "gelu",
    epsilon: float = 1e-12,
    hidden: int = 0,
    max_length: int = 0,
    types: int = 2,
    mask_token: int = 0,
    separator: int = 0,
    pool: Pool = "first",
) -> ModelSpec:
    """`input_shape` is (T,); token ids are 0 (padding) to `vocab` - 1. With `objective = "masked"` the classes are these tokens, of which the
    data may have fewer.

    Args:
        tie: the head of masked tokens is the embedding (Press 2017), which must be on one process: no tp, no pp.
        hidden: features of the feed-forward network; 0: 4 · `width`.
        max_length: rows of the learned positions; 0: as many as an example has tokens.
        types: rows for types of tokens.
        mask_token: one of the tokens; 0: a further one, `vocab`.
        separator: token that ends the first text of a pair; 0: there are no pairs.
        pool: what the classifier sees: the first token, which is [CLS] in published models, or the mean of all.

    Raises:
        ValueError: not token sequences, more classes than tokens, sizes that do not fit, or an invalid option.
    """
    length = sequence_length(input_shape)
    require_divisible(width, heads)
    require_dropout(dropout)
    for key, value, kind in (
        ("objective", objective, Objective),
        ("activation", activation, Activation),
        ("pool", pool, Pool),
    ):
        if value not in get_args(kind):
            raise ValueError(f"{key} is {' or '.join(map(repr, get_args(kind)))}, got {value!r}")
    if vocab < 2:
        raise ValueError(f"vocab counts padding and at least one token, so it is 2 or more; got {vocab}")
    for key, token in (("mask_token", mask_token), ("separator", separator)):
        if not 0 <= token < vocab:
            raise ValueError(f"{key} is {token}, expected one of the tokens below vocab = {vocab}")
    if separator and types < 2:
        raise ValueError(
            f"separator = {separator} begins tokens of type 1, so types is 2 or more; got {types}"
        )
    if max_length and max_length < length:
        raise ValueError(f"max_length is {max_length}, but examples have {length} tokens")
    if objective == "masked" and classes > vocab:
        raise ValueError(
            f"a hidden token is one of the vocab = {vocab} tokens, but there are {classes} classes"
        )
    classes = vocab if objective == "masked" else classes
    tokens = vocab if mask_token else vocab + 1
    sizes = Sizes(
        max_length or length, tokens, classes, width, layers, heads, dropout, objective, tie, activation, epsilon, hidden,
        types, separator, pool,
    )  # fmt: skip
    return ModelSpec(
        "bert",
        lambda: BERT(sizes),
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
            "tie": tie,
            "activation": activation,
            "epsilon": epsilon,
            "hidden": hidden,
            "max_length": max_length,
            "types": types,
            "mask_token": mask_token,
            "separator": separator,
            "pool": pool,
        },
        vocab=tokens,
        layout=layout(sizes),
        mask_token=(mask_token or vocab) if objective == "masked" else None,
    )
