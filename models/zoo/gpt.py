"""A causal transformer in the manner of GPT-2: learned positions, pre-norm blocks, GELU (Radford 2019).

For pretraining in the datacenter. Its embedding is a lookup and its attention is torch's fused one, which devices cannot
train; `charlm` is the student to distil it into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from models.zoo.layout import Chain, Layout
from models.zoo.sparse import BlockSparseAttention, require_sparsity
from models.zoo.spec import ModelSpec
from models.zoo.transformer import require_divisible, sequence_length

INITIAL_DEVIATION = 0.02
ATTENTIONS = ("full", "block_sparse")


class GPT(Chain):
    """x [B, T] token ids -> logits [B, T, vocab]; position t sees tokens 0 to t only."""

    def __init__(
        self,
        length: int,
        vocab: int,
        width: int,
        layers: int,
        heads: int,
        dropout: float = 0.0,
        tie: bool = False,
        core: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocab, length, width, dropout)
        self.layers = nn.ModuleDict({str(index): Block(width, heads, dropout) for index in range(layers)})
        self.norm = nn.LayerNorm(width)
        self.head = linear(width, vocab)
        if tie:
            self.head.weight = self.embedding.token.weight
        for block in self.layers.values():
            scale_residual_init(block, layers)
            if core is not None:
                block.get_submodule("attention").register_module("core", core())


class Embedding(nn.Module):
    """Token ids [B, T] -> [B, T, D]: a row for the token plus a row for its position, then dropout.

    Attributes:
        offset: position of the first token, when this module sees only a part of a sequence.
    """

    def __init__(self, vocab: int, length: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.offset = 0
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=INITIAL_DEVIATION)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(self.offset, self.offset + x.shape[1], device=x.device)
        h: torch.Tensor = self.dropout(self.token(x) + self.position(positions))
        return h


class Block(nn.Module):
    """Attention, then a feed-forward network, each with a residual connection, after a LayerNorm and before dropout.

    Dropout applies only to activations that all ranks sharing matrices have, never inside the heads, so that with equal
    random numbers they drop the same elements.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.dropout(self.attention(self.norm1(h)))
        output: torch.Tensor = h + self.dropout(self.mlp(self.norm2(h)))
        return output


class SelfAttention(nn.Module):
    """Multi-head self-attention on [B, T, D]; the number of heads follows from the projections, which may be split."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value, self.out = (linear(width, width) for _ in range(4))
        self.core = FusedAttention(causal)

    def forward(self, x: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        """`bias`: added to the scores, if the core takes one."""
        B, T, _ = x.shape
        query, key, value = (
            projection(x).view(B, T, -1, self.head_width).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = self.core(query, key, value, *bias)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(B, T, -1))
        return output


class FusedAttention(nn.Module):
    """Query, key and value [B, H, T, D/H] -> [B, H, T, D/H]."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        mask = None if bias is None else bias.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)


class MLP(nn.Module):
    """[B, T, D] -> [B, T, D] through 4 · D features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return output


def linear(features_in: int, features_out: int) -> nn.Linear:
    """A linear layer with small normal weights and no bias, as usual in large transformers."""
    layer = nn.Linear(features_in, features_out, bias=False)
    nn.init.normal_(layer.weight, std=INITIAL_DEVIATION)
    return layer


def scale_residual_init(block: nn.Module, layers: int) -> None:
    """Initializes the last matrices of residual paths smaller, since the paths add up (Radford 2019, section 2.3)."""
    for last in ("attention.out.weight", "mlp.down.weight"):
        nn.init.normal_(block.get_parameter(last), std=INITIAL_DEVIATION * (2 * layers) ** -0.5)


def require_dropout(dropout: float) -> None:
    """Raises ValueError unless `dropout` is a share below 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a share from 0 to below 1, got {dropout}")


def layout(length: int, width: int, heads: int, tie: bool = False) -> Layout:
    whole = Layout(
        ("embedding", "layers.*", "norm", "head"),
        attention=("layers.*.attention.core",),
        positions=("embedding.position",),
        heads=heads,
        width=width,
        hidden=4 * width,
        length=length,
        tied=tie,
    )
    if tie:
        return whole
    projections = ("attention.query", "attention.key", "attention.value", "mlp.up")
    return replace(
        whole,
        columns=tuple(f"layers.*.{name}" for name in projections),
        rows=("layers.*.attention.out", "layers.*.mlp.down"),
        vocabulary="embedding.token",
        head="head",
        norms=("layers.*.norm1", "layers.*.norm2", "norm"),
    )


def spec(
    input_shape: tuple[int, ...],
    classes: int,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
    tie: bool = False,
    attention: str = "full",
    attention_block: int = 64,
    attention_local: int = 2,
    attention_stride: int = 4,
) -> ModelSpec:
    """`input_shape` is (T,); `classes` is the vocabulary of both input and labels.

    `tie`: one matrix is both embedding and head (Press 2017), which must be on one process: no tp, no pp.
    `attention`: full, or block_sparse with blocks of `attention_block` tokens (see `models.zoo.sparse`).

    Raises:
        ValueError: not token sequences, a width that `heads` does not divide, or an invalid dropout or attention.
    """
    length = sequence_length(input_shape)
    require_divisible(width, heads)
    require_dropout(dropout)
    if attention not in ATTENTIONS:
        raise ValueError(f"attention is {attention!r}, expected one of {', '.join(ATTENTIONS)}")
    sparse = {"block": attention_block, "local": attention_local, "stride": attention_stride}
    require_sparsity(**sparse)
    core = partial(BlockSparseAttention, **sparse) if attention == "block_sparse" else None
    return ModelSpec(
        "gpt",
        lambda: GPT(length, classes, width, layers, heads, dropout, tie, core),
        input_shape,
        classes,
        input_dtype="int32",
        task="next_token",
        options={
            "width": width,
            "layers": layers,
            "heads": heads,
            "dropout": dropout,
            "tie": tie,
            "attention": attention,
            **{f"attention_{key}": value for key, value in sparse.items()},
        },
        vocab=classes,
        layout=layout(length, width, heads, tie),
    )
