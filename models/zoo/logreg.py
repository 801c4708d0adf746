"""Multinomial logistic regression; two classes are a two-logit softmax."""

from __future__ import annotations

from dataclasses import replace

from models.zoo import mlp
from models.zoo.spec import ModelSpec


def spec(input_shape: tuple[int, ...], classes: int) -> ModelSpec:
    """One linear layer `fc` over the flattened input: a perceptron without hidden layers."""
    return replace(mlp.spec(input_shape, classes, hidden=()), name="logreg", options={})
