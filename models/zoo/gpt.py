"""A causal transformer: GPT-2 by default, without biases (Radford 2019); by its options also Llama and Qwen2.

    GPT-2    learned positions, LayerNorm, GELU, biases everywhere, tied head
    Llama    rotary positions, RMSNorm, SwiGLU, grouped-query attention (Touvron 2023; Ainslie 2023)
    Qwen2    as Llama, with biases of query, key and value

`models.hugging_face` reads and writes their published checkpoints. For pretraining in the datacenter: its embedding is a
lookup and its attention is torch's fused one, which devices cannot train; `charlm` is the student to distil it into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from models.zoo.blocks.attention import INITIAL_DEVIATION as INITIAL_DEVIATION
from models.zoo.blocks.attention import SelfAttention
from models.zoo.blocks.attention import linear as linear
from models.zoo.blocks.variant import Variant
from models.zoo.layout import Chain, Layout
from models.zoo.sparse import BlockSparseAttention, require_sparsity
from models.zoo.spec import ModelSpec
from models.zoo.transformer import sequence_length

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
        variant: Variant | None = None,
    ) -> None:
        super().__init__()
        variant = (variant or Variant()).complete(length, width, heads)
        learned = variant.max_length if variant.positions == "learned" else 0
        self.embedding = Embedding(vocab, learned, width, dropout)
        self.layers = nn.ModuleDict(
            {str(index): Block(width, heads, dropout, variant=variant) for index in range(layers)}
        )
        self.norm = make_norm(width, variant)
        self.head = linear(width, vocab)
        if tie:
            self.head.weight = self.embedding.token.weight
        for block in self.layers.values():
            scale_residual_init(block, layers)
            if core is not None:
                block.get_submodule("attention").register_module("core", core())


class Embedding(nn.Module):
    """Token ids [B, T] -> [B, T, D]: a row for the token plus a row for its position, then dropout.

    Args:
        length: rows for positions; 0: none.

    Attributes:
        offset: position of the first token, when this module sees only a part of a sequence.
    """

    def __init__(self, vocab: int, length: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(length, width) if length else None
        self.dropout = nn.Dropout(dropout)
        self.offset = 0
        for table in (self.token, self.position):
            if table is not None:
                nn.init.normal_(table.weight, std=INITIAL_DEVIATION)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.token(x)
        if self.position is not None:
            positions = torch.arange(self.offset, self.offset + x.shape[1], device=x.device)
            h = h + self.position(positions)
        dropped: torch.Tensor = self.dropout(h)
        return dropped


class Block(nn.Module):
    """Attention, then a feed-forward network, each with a residual connection, after a norm and before dropout.

    Dropout applies only to activations that all ranks sharing matrices have, never inside the heads, so that with equal
    random numbers they drop the same elements.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        causal: bool = True,
        variant: Variant | None = None,
    ) -> None:
        super().__init__()
        variant = (variant or Variant()).complete(0, width, heads)
        self.norm1 = make_norm(width, variant)
        self.attention = SelfAttention(width, heads, causal, variant)
        self.norm2 = make_norm(width, variant)
        self.mlp = GatedMLP(width, variant) if variant.activation == "swiglu" else MLP(width, variant)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.dropout(self.attention(self.norm1(h)))
        output: torch.Tensor = h + self.dropout(self.mlp(self.norm2(h)))
        return output


class MLP(nn.Module):
    """[B, T, D] -> [B, T, D] through the hidden features."""

    def __init__(self, width: int, variant: Variant) -> None:
        super().__init__()
        bias = variant.bias == "all"
        self.up = linear(width, variant.hidden, bias)
        self.down = linear(variant.hidden, width, bias)
        self.approximation = "tanh" if variant.activation == "gelu_tanh" else "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(F.gelu(self.up(x), approximate=self.approximation))
        return output


class GatedMLP(nn.Module):
    """[B, T, D] -> [B, T, D] through hidden features times gates (Shazeer 2020, equation 6)."""

    def __init__(self, width: int, variant: Variant) -> None:
        super().__init__()
        bias = variant.bias == "all"
        self.gate = linear(width, variant.hidden, bias)
        self.up = linear(width, variant.hidden, bias)
        self.down = linear(variant.hidden, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


def make_norm(width: int, variant: Variant) -> nn.Module:
    if variant.norm == "rms":
        return nn.RMSNorm(width, eps=variant.epsilon)
    return nn.LayerNorm(width, eps=variant.epsilon)


def scale_residual_init(block: nn.Module, layers: int) -> None:
    """Initializes the last matrices of residual paths smaller, since the paths add up (Radford 2019, section 2.3)."""
    for last in ("attention.out.weight", "mlp.down.weight"):
        nn.init.normal_(block.get_parameter(last), std=INITIAL_DEVIATION * (2 * layers) ** -0.5)


def require_dropout(dropout: float) -> None:
    """Raises ValueError unless `dropout` is a share below 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a share from 0 to below 1, got {dropout}")


def layout(length: int, width: int, heads: int, tie: bool = False, variant: Variant | None = None) -> Layout:
    variant = (variant or Variant()).complete(length, width, heads)
    rotates, gated = variant.positions == "rope", variant.activation == "swiglu"
    whole = Layout(
        ("embedding", "layers.*", "norm", "head"),
        attention=("layers.*.attention.core",),
        positions=("layers.*.attention.rotations",) if rotates else ("embedding.position",),
        heads=heads,
        kv_heads=variant.kv_heads,
        width=width,
        hidden=variant.hidden,
        length=length,
        tied=tie,
    )
    projections = ("query", "key", "value")
    whole = replace(
        whole,
        columns=(
            *(f"layers.*.attention.{name}" for name in projections),
            *(f"layers.*.mlp.{name}" for name in (("gate", "up") if gated else ("up",))),
        ),
        rows=("layers.*.attention.out", "layers.*.mlp.down"),
        norms=("layers.*.norm1", "layers.*.norm2", "norm"),
    )
    # tied, they are one tensor, which every process has whole
    return whole if tie else replace(whole, vocabulary="embedding.token", head="head")


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
    vocab: int = 0,
    **options: Any,
) -> ModelSpec:
    """`input_shape` is (T,); `classes` is the vocabulary of both input and labels, if `vocab` is not larger.

    Args:
        tie: one matrix is both embedding and head (Press 2017), which every process has whole: no pp.
        attention: full, or block_sparse with blocks of `attention_block` tokens (see `models.zoo.sparse`).
        vocab: token ids of the model, which may be more than those of its data; 0: `classes`.
        options: those of `Variant`.

    Raises:
        ValueError: not token sequences, sizes that do not fit, or an invalid option.
    """
    length = sequence_length(input_shape)
    require_dropout(dropout)
    if attention not in ATTENTIONS:
        raise ValueError(f"attention is {attention!r}, expected one of {', '.join(ATTENTIONS)}")
    sparse = {"block": attention_block, "local": attention_local, "stride": attention_stride}
    require_sparsity(**sparse)
    core = partial(BlockSparseAttention, **sparse) if attention == "block_sparse" else None
    if vocab and vocab < classes:
        raise ValueError(f"vocab is {vocab}, but the data have {classes} classes")
    tokens = vocab or classes
    variant = Variant(**options)
    variant.complete(length, width, heads)
    return ModelSpec(
        "gpt",
        lambda: GPT(length, tokens, width, layers, heads, dropout, tie, core, variant),
        input_shape,
        tokens,
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
            "vocab": vocab,
            **asdict(variant),
            "rope_scaling": list(variant.rope_scaling),
        },
        vocab=tokens,
        layout=layout(length, width, heads, tie, variant),
    )
