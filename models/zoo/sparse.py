"""Block-sparse causal attention: a query sees nearby blocks of keys and every so many before (Child 2019, strided).

Queries and keys are cut into blocks of `block` tokens. Queries of block i see those of block j <= i where

    i - j < local, or i - j is a multiple of stride

and within their own block no later token. Only those blocks are multiplied: per query, about local + T / (2 · block ·
stride) of T / block blocks, against T / (2 · block) of dense causal attention. Two layers reach every earlier token if
`local` >= `stride` - 1.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class BlockSparseAttention(nn.Module):
    """Query, key and value [B, H, T, D/H] -> [B, H, T, D/H], for any T."""

    def __init__(self, block: int, local: int, stride: int) -> None:
        super().__init__()
        self.block, self.local, self.stride = block, local, stride

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = torch.split(key, self.block, dim=2), torch.split(value, self.block, dim=2)
        return torch.cat(
            [
                self._block(part, [keys[j] for j in seen], [values[j] for j in seen])
                for part, seen in zip(
                    torch.split(query, self.block, dim=2), self.seen(len(keys)), strict=True
                )
            ],
            dim=2,
        )

    def seen(self, blocks: int) -> list[list[int]]:
        """Blocks of keys that each block of queries sees, its own last."""
        return [
            [j for j in range(i + 1) if i - j < self.local or (i - j) % self.stride == 0]
            for i in range(blocks)
        ]

    def visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether queries at these positions see keys at those; both broadcast. Later keys are not considered."""
        distance = query // self.block - key // self.block
        return (distance < self.local) | (distance % self.stride == 0)

    def _block(
        self, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        key, value = torch.cat(keys, dim=2), torch.cat(values, dim=2)
        rows, before = query.shape[2], key.shape[2] - query.shape[2]
        fits = torch.ones(rows, before + rows, dtype=torch.bool, device=query.device).tril(before)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=fits, enable_gqa=grouped)


def require_sparsity(block: int, local: int, stride: int) -> None:
    """Raises ValueError unless all are at least 1."""
    for name, value in (("block", block), ("local", local), ("stride", stride)):
        if value < 1:
            raise ValueError(f"attention_{name} is at least 1, got {value}")
