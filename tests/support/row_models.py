"""Small models for tests of DP-SGD."""

from __future__ import annotations

import torch
from torch import nn


class Linear(nn.Module):
    """Two classes, without bias, from zero."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 2, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(x)
        return answer


class Mixing(nn.Module):
    """A model whose answer for a row depends on the other rows of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(x.float() - x.float().mean(0))
        return answer
