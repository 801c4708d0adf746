"""Self-attention: with biases, fewer heads of keys and values, and rotary positions, by its variant.

Shapes: B rows, T tokens, D width, H heads, G heads of keys and values, W features of a head.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.zoo.blocks.variant import Variant

INITIAL_DEVIATION = 0.02


class SelfAttention(nn.Module):
    """Multi-head self-attention on [B, T, D]; the numbers of heads follow from the projections, which may be split.

    Attributes:
        offset: position of the first token, as in `Embedding`.
    """

    def __init__(self, width: int, heads: int, causal: bool, variant: Variant) -> None:
        super().__init__()
        self.head_width = W = variant.head_width
        inner = variant.bias != "none"
        self.query = linear(width, heads * W, inner)
        self.key = linear(width, variant.kv_heads * W, inner)
        self.value = linear(width, variant.kv_heads * W, inner)
        self.out = linear(heads * W, width, variant.bias in ("attention", "all"))
        rotates = variant.positions == "rope"
        self.rotations = Rotations(W, variant.rope_base, variant.rope_scaling) if rotates else None
        self.offset = 0
        self.core = FusedAttention(causal)

    def forward(self, x: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        """`bias`: added to the scores, if the core takes one."""
        B, T, _ = x.shape
        query, key, value = (
            projection(x).view(B, T, -1, self.head_width).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if self.rotations is not None:
            angles = self.rotations(torch.arange(self.offset, self.offset + T, device=query.device))
            query, key = rotate(query, angles), rotate(key, angles)
        mixed = self.core(query, key, value, *bias)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(B, T, -1))
        return output


class Rotations(nn.Module):
    """Positions [T] -> angles [T, W/2], float32, of the rotations of each pair of features (Su 2021, equation 15).

    They are computed anew each time, so the module has no tensors that a checkpoint or an empty model would lack.
    """

    def __init__(self, head_width: int, base: float, scaling: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.head_width, self.base, self.scaling = head_width, base, tuple(scaling)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        pairs = torch.arange(0, self.head_width, 2, device=positions.device).float() / self.head_width
        frequencies = 1.0 / self.base**pairs
        if self.scaling:
            frequencies = self._stretched(frequencies)
        return positions.float()[:, None] * frequencies

    def _stretched(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Llama 3.1: wavelengths above `length / low` grow by `factor`, those below `length / high` stay, others lie between."""
        factor, low, high, length = self.scaling
        turns = length * frequencies / (2 * torch.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / factor)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, W] with feature i and feature i + W/2 of each token rotated by angles [T, W/2]."""
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class FusedAttention(nn.Module):
    """Query [B, H, T, W], key and value [B, G, T, W] -> [B, H, T, W]; each key serves H / G heads of queries.

    `bias` broadcasts to the scores [B, H, T, T] and is added to them; or it is bool and says which keys a query sees, and then also leaves
    out later keys of a causal module.
    """

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        chosen = bias is not None and bias.dtype == torch.bool
        mask = bias if bias is None or chosen else bias.to(query.dtype)
        causal = self.causal and not chosen
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1]
        )


def linear(features_in: int, features_out: int, bias: bool = False) -> nn.Linear:
    """A linear layer with small normal weights, by default without a bias, as usual in large transformers."""
    layer = nn.Linear(features_in, features_out, bias=bias)
    nn.init.normal_(layer.weight, std=INITIAL_DEVIATION)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
