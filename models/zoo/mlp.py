"""Multi-layer perceptron with ReLU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

from models.zoo.spec import ModelSpec


class MLP(nn.Module):
    """x [B, …] -> logits [B, classes] through the hidden widths in turn."""

    def __init__(self, features: int, hidden: Sequence[int], classes: int) -> None:
        super().__init__()
        widths = [features, *hidden]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = layer(x).relu()
        logits: torch.Tensor = self.fc(x)
        return logits


def spec(input_shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (64,)) -> ModelSpec:
    features = math.prod(input_shape)

    def twin() -> object:
        from models.zoo.tensorflow import twins

        return twins.dense_stack([f"hidden.{i}" for i in range(len(hidden))] + ["fc"])

    return ModelSpec(
        "mlp",
        lambda: MLP(features, hidden, classes),
        input_shape,
        classes,
        tensorflow_twin=twin,
        options={"hidden": list(hidden)},
    )
