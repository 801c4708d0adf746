"""The transformer that `charlm` and `textcls` share: embedding, attention, blocks.

Pre-norm blocks without dropout (Xiong 2020). The token embedding is a product with a compared one-hot instead of a
lookup, because the gradient of a lookup, a scatter, has no LiteRT builtin that prepares; with a few thousand tokens the
product is cheap.

Shapes: B rows, T tokens, D width, H heads.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

MASKED = -100.0
"""Added to an attention score that must not count: leaves e⁻¹⁰⁰ of its weight, which is nothing in float32.

Finite, so a row without any token stays finite. No larger, because scores of a statically quantized model share one
scale of 255 steps with it: at -1e9 all scores that count become the same.
"""


class TokenEmbedding(nn.Module):
    """Token ids [B, T] int32 -> [B, T, D], plus learned positions. An id outside the vocabulary is zero."""

    def __init__(self, vocab: int, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, width) * width**-0.5)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.rows = AllPositions()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(self.weight.shape[0], dtype=x.dtype, device=x.device)
        one_hot = (x.unsqueeze(-1) == ids).to(self.weight.dtype)
        h: torch.Tensor = one_hot @ self.weight + self.rows(self.position)
        return h


class AllPositions(nn.Module):
    """A table of learned positions [T, D] -> its rows, one for each of T tokens in turn."""

    def forward(self, table: torch.Tensor) -> torch.Tensor:
        return table


class Attention(nn.Module):
    """Multi-head self-attention on [B, T, D]. Vaswani 2017, section 3.2.

    The number of heads follows from the projections' width, so that the projections may be split by head.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        # A bias of the keys would add the same value to all scores of a query, which softmax ignores.
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.core = SoftmaxAttention()

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """`bias` is added to the scores [B, H, T, T] and broadcasts to them."""
        rows, length, _ = x.shape
        by_head = (rows, length, -1, self.head_width)
        q, k, v = (part(x).reshape(by_head).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = self.core(q, k, v, bias).transpose(1, 2).reshape(rows, length, -1)
        output: torch.Tensor = self.out(mixed)
        return output


class SoftmaxAttention(nn.Module):
    """Query, key and value [B, H, T, D/H] -> [B, H, T, D/H]; `bias` is added to the scores [B, H, T, T]."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias
        mixed: torch.Tensor = scores.softmax(-1) @ value
        return mixed


class Block(nn.Module):
    """Attention and a feed-forward layer four times as wide, each after a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), bias)
        output: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return output


class Transformer(nn.Module):
    """Token ids [B, T] -> features of every token [B, T, D], after the last norm; and the layer that makes logits of them."""

    def __init__(self, length: int, vocab: int, classes: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocab, length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def features(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """`bias`: as for `Attention`."""
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h, bias)
        normed: torch.Tensor = self.norm(h)
        return normed


def causal_bias(length: int, like: torch.Tensor) -> torch.Tensor:
    """[T, T]: zero where a token may attend, to itself and earlier ones; `MASKED` for later ones."""
    position = torch.arange(length, device=like.device)
    return (position > position.unsqueeze(-1)).to(like.dtype) * MASKED


def sequence_length(input_shape: tuple[int, ...]) -> int:
    """T of (T,). Raises ValueError for any other rank."""
    match input_shape:
        case (length,) if length > 0:
            return length
    raise ValueError(f"expected token sequences, (length,) per example, got {input_shape}")


def require_divisible(width: int, heads: int) -> None:
    """Raises ValueError with both values unless heads divide the width."""
    if min(width, heads) < 1 or width % heads:
        raise ValueError(f"width must be divisible by heads, got width {width} and heads {heads}")
