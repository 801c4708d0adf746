"""BERT as published: a bidirectional transformer encoder (Devlin 2019), with post-norm blocks (Vaswani 2017).

It is pretrained to predict masked tokens (`objective = "masked"`) and then classifies texts (`"classify"`) with a
separate head. Token 0 is padding, which gets no attention. `models.hugging_face` reads and writes published checkpoints.

Shapes: B rows, T tokens, D width, H heads. Between modules pass `h` [B, T, D] and `real` [B, T], 1 for a token and 0 for
padding, as a pair.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

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
class Options:
    """The options of a BERT.

    Attributes:
        vocab: token ids are 0 (padding) to `vocab` - 1.
        tie: the head of masked tokens is the embedding (Press 2017), which every process has whole: no pp.
        hidden: features of the feed-forward network; 0: 4 · D.
        max_length: rows of the learned positions; 0: as many as an example has tokens.
        types: rows for types of tokens.
        mask_token: one of the tokens; 0: a further one, `vocab`.
        separator: token that ends the first text of a pair; 0: there are no pairs.
        pool: what the classifier sees: the first token, which is [CLS] in published models, or the mean of all.
    """

    vocab: int = 2048
    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0
    objective: Objective = "classify"
    tie: bool = True
    activation: Activation = "gelu"
    epsilon: float = 1e-12
    hidden: int = 0
    max_length: int = 0
    types: int = 2
    mask_token: int = 0
    separator: int = 0
    pool: Pool = "first"

    @property
    def masked(self) -> bool:
        return self.objective == "masked"

    @property
    def mask(self) -> int:
        """The token id that hides others."""
        return self.mask_token or self.vocab

    @property
    def tokens(self) -> int:
        """Rows of the embedding."""
        return max(self.vocab, self.mask + 1)

    @property
    def variant(self) -> Variant:
        """As blocks take it."""
        return Variant(bias="all", epsilon=self.epsilon, activation=self.activation, hidden=self.hidden)

    def check(self, length: int, classes: int) -> None:
        """Raises ValueError unless they fit each other, examples of `length` tokens and the classes."""
        require_divisible(self.width, self.heads)
        require_dropout(self.dropout)
        for key, kind in (("objective", Objective), ("activation", Activation), ("pool", Pool)):
            if (value := getattr(self, key)) not in get_args(kind):
                raise ValueError(f"{key} is {' or '.join(map(repr, get_args(kind)))}, got {value!r}")
        vocab = self.vocab
        if vocab < 2:
            raise ValueError(f"vocab counts padding and at least one token, so it is 2 or more; got {vocab}")
        for key in ("mask_token", "separator"):
            if not 0 <= (token := getattr(self, key)) < vocab:
                raise ValueError(f"{key} is {token}, expected one of the tokens below vocab = {vocab}")
        if self.separator and self.types < 2:
            raise ValueError(f"separator = {self.separator} begins tokens of type 1, so types is 2 or more")
        if self.max_length and self.max_length < length:
            raise ValueError(f"max_length is {self.max_length}, but examples have {length} tokens")
        if self.masked and classes > vocab:
            raise ValueError(
                f"a hidden token is one of the vocab = {vocab} tokens, but there are {classes} classes"
            )


class BERT(Chain):
    """x [B, T] token ids -> logits [B, classes], or [B, T, classes] of masked tokens."""

    def __init__(self, length: int, classes: int, options: Options) -> None:
        super().__init__()
        self.embedding = Embedding(length, options)
        self.layers = nn.ModuleDict({str(index): Block(options) for index in range(options.layers)})
        self.head = TokenPredictor(classes, options) if options.masked else Classifier(classes, options)
        if isinstance(self.head, TokenPredictor) and options.tie:
            self.head.out.weight = self.embedding.token.weight


class Embedding(nn.Module):
    """Token ids [B, T] -> hidden states, and a mask of the tokens that are not padding.

    A row for the token plus rows for its position and its type, then LayerNorm and dropout. Tokens after the first
    `separator` are of type 1, the second text of a pair (Devlin 2019, figure 2); all others, of type 0.
    """

    def __init__(self, length: int, options: Options) -> None:
        super().__init__()
        self.token = nn.Embedding(options.tokens, options.width)
        self.position = nn.Embedding(options.max_length or length, options.width)
        self.token_type = nn.Embedding(options.types, options.width)
        self.norm = nn.LayerNorm(options.width, eps=options.epsilon)
        self.dropout = nn.Dropout(options.dropout)
        self.separator = options.separator
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

    def __init__(self, options: Options) -> None:
        super().__init__(options.width, options.heads, options.dropout, causal=False, variant=options.variant)

    def forward(self, hidden: Hidden) -> Hidden:  # type: ignore[override]
        h, real = hidden
        # finite, so that a text of only padding stays finite
        bias = ((1 - real) * MASKED)[:, None, None, :]
        h = self.norm1(h + self.dropout(self.attention(h, bias)))
        return self.norm2(h + self.dropout(self.mlp(h))), real


class Classifier(nn.Module):
    """Hidden states -> logits [B, classes], from that of the first token, or their mean over tokens that are not padding."""

    def __init__(self, classes: int, options: Options) -> None:
        super().__init__()
        self.pool = linear(options.width, options.width, bias=True)
        self.dropout = nn.Dropout(options.dropout)
        self.out = linear(options.width, classes, bias=True)
        self.of_first = options.pool == "first"

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

    def __init__(self, classes: int, options: Options) -> None:
        super().__init__()
        self.dense = linear(options.width, options.width, bias=True)
        self.norm = nn.LayerNorm(options.width, eps=options.epsilon)
        self.out = (
            Decoder(options.width, classes) if options.tie else linear(options.width, classes, bias=True)
        )
        self.approximation = "none" if options.activation == "gelu" else "tanh"

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


def layout(options: Options) -> Layout:
    """Without a `length`: sequences cannot be split, because padding is known only for whole ones."""
    tied = options.masked and options.tie
    whole = gpt.layout(0, options.width, options.heads, tied, options.variant)
    whole = replace(whole, order=("embedding", "layers.*", "head"), norms=(), attention=(), positions=())
    if tied:
        return whole
    return replace(whole, vocabulary="embedding.token", head="head.out" if options.masked else "")


def spec(input_shape: tuple[int, ...], classes: int, **options: Any) -> ModelSpec:
    """`input_shape` is (T,). With `objective = "masked"` the classes are the `vocab` tokens, of which the data may have fewer.

    Args:
        options: those of `Options`.

    Raises:
        TypeError: an unknown option.
        ValueError: not token sequences, more classes than tokens, sizes that do not fit, or an invalid option.
    """
    length = sequence_length(input_shape)
    chosen = Options(**options)
    chosen.check(length, classes)
    classes = chosen.vocab if chosen.masked else classes
    return ModelSpec(
        "bert",
        lambda: BERT(length, classes, chosen),
        input_shape,
        classes,
        input_dtype="int32",
        task="next_token" if chosen.masked else "classification",
        options=asdict(chosen),
        vocab=chosen.tokens,
        layout=layout(chosen),
        mask_token=chosen.mask if chosen.masked else None,
    )
