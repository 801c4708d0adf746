"""Multinomial logistic regression; two classes are a two-logit softmax."""

from __future__ import annotations

import math

import torch
from torch import nn

from models.zoo.spec import ModelSpec


class LogisticRegression(nn.Module):
    """x [B, …] -> logits [B, classes], one linear layer over the flattened input."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(x.flatten(1))
        return logits


def spec(input_shape: tuple[int, ...], classes: int) -> ModelSpec:
    features = math.prod(input_shape)

    def twin() -> object:
        from models.zoo.tensorflow import twins

        return twins.dense_stack(["fc"])

    return ModelSpec(
        "logreg", lambda: LogisticRegression(features, classes), input_shape, classes, tensorflow_twin=twin
    )
