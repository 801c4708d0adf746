"""A model of one's own, with annotations of single operators; given as `tests.models.pretrain.annotated:build`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.zoo import ModelSpec
from models.zoo.layout import Layout, Operator


class Gate(nn.Module):
    """A function of whole features, [B, T, F] -> [B, T, F]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.softmax(-1)


class Net(nn.Module):
    """Token ids [B, T] -> logits [B, T, vocab]."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 16)
        self.up = nn.Linear(16, 40)
        self.gate = Gate()
        self.down = nn.Linear(40, vocab)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.down(self.gate(F.gelu(self.up(self.embedding(x)))))
        return logits


OPERATORS = {
    # every process has some rows of the weight, and so some features
    "up": Operator(params={"weight": 0, "bias": 0}, output=-1),
    # softmax wants all features, so that tokens are split instead
    "gate": Operator(inputs=(1,), output=1),
    # some columns of the weight: features again, of all tokens; partial sums are added up
    "down": Operator(inputs=(-1,), params={"weight": 1}),
}


def build(input_shape: tuple[int, ...], classes: int) -> ModelSpec:
    return ModelSpec(
        "annotated",
        lambda: Net(classes),
        input_shape,
        classes,
        input_dtype="int32",
        task="next_token",
        layout=Layout(order=("embedding", "up", "gate", "down"), operators=OPERATORS),
    )
