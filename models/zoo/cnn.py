"""A small convolutional classifier: two 3x3 convolutions, the second with stride 2, and one or two dense layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from models.zoo.spec import ModelSpec


class CNN(nn.Module):
    """x [B, H, W] or [B, C, H, W] -> logits [B, classes]."""

    def __init__(
        self, input_shape: tuple[int, int, int], channels: Sequence[int], hidden: int, classes: int
    ) -> None:
        super().__init__()
        depth, height, width = input_shape
        first, second = channels
        self.input_shape = input_shape
        self.conv1 = nn.Conv2d(depth, first, 3, padding=1)
        self.conv2 = nn.Conv2d(first, second, 3, stride=2, padding=1)
        flat = second * -(-height // 2) * -(-width // 2)
        self.hidden = nn.Linear(flat, hidden) if hidden else None
        self.fc = nn.Linear(hidden or flat, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, *self.input_shape)
        x = self.conv2(self.conv1(x).relu()).relu().flatten(1)
        if self.hidden is not None:
            x = self.hidden(x).relu()
        logits: torch.Tensor = self.fc(x)
        return logits


def spec(
    input_shape: tuple[int, ...], classes: int, channels: Sequence[int] = (8, 16), hidden: int = 0
) -> ModelSpec:
    """`input_shape` is (H, W) or (C, H, W)."""
    image = image_shape(input_shape)

    def twin() -> object:
        from models.zoo.tensorflow import twins

        return twins.small_cnn(image, channels, hidden)

    return ModelSpec(
        "cnn",
        lambda: CNN(image, channels, hidden, classes),
        input_shape,
        classes,
        tensorflow_twin=twin,
        options={"channels": list(channels), "hidden": hidden},
    )


def image_shape(input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(H, W) or (C, H, W) as (C, H, W).

    Raises:
        ValueError: any other rank.
    """
    match input_shape:
        case (height, width):
            return 1, height, width
        case (depth, height, width):
            return depth, height, width
    raise ValueError(
        f"expected images, (height, width) or (channels, height, width) per example, got {input_shape}"
    )
