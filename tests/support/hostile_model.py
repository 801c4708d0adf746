"""A model of a user's own code that ends or hangs its process for some rows."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

KILLS, HANGS, FAILS = 100.0, 200.0, 300.0
"""First number of a row that has each effect."""


class Hostile(nn.Module):
    """Row sums as ten equal logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x.flatten(1)[:, 0]
        if (first == KILLS).any():
            os._exit(3)
        if (first == HANGS).any():
            time.sleep(3600)
        if (first == FAILS).any():
            raise ValueError("these rows are too hard")
        return (x.flatten(1).sum(1, keepdim=True) * self.scale).expand(-1, 10).contiguous()


def build(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Hostile()
