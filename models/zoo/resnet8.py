"""A residual network with 8 layers: a stem, three stages of one block each, a classifier.

The small image model of the MLPerf Tiny benchmark (Banbury 2021, image classification), for any image size. With
`norm="group"` statistics are per example, so clients with few or skewed rows train it well (Hsieh 2020, section 6). With
`norm="batch"` federated training keeps the running statistics fixed and normalises with them: the variant for models
that were pretrained and will be quantized, because it folds into the convolutions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from models.zoo.cnn import image_shape
from models.zoo.spec import ModelSpec

Norm = Literal["group", "batch"]

_GROUPS = 4


class ResNet8(nn.Module):
    """x [B, H, W] or [B, C, H, W] -> logits [B, classes]; stages of width, 2·width and 4·width channels."""

    def __init__(self, input_shape: tuple[int, int, int], norm: Norm, width: int, classes: int) -> None:
        super().__init__()
        self.input_shape = input_shape
        self.stem = nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False)
        self.norm = normalisation(norm, width)
        self.stages = nn.Sequential(
            Residual(width, width, 1, norm),
            Residual(width, 2 * width, 2, norm),
            Residual(2 * width, 4 * width, 2, norm),
        )
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x.reshape(-1, *self.input_shape))).relu()
        logits: torch.Tensor = self.fc(self.stages(x).mean((2, 3)))
        return logits


class Residual(nn.Module):
    """Two 3x3 convolutions with a residual connection, which has a 1x1 convolution where the shape changes."""

    def __init__(self, depth: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(depth, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = normalisation(norm, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = normalisation(norm, channels)
        reshapes = stride != 1 or depth != channels
        self.shortcut = nn.Conv2d(depth, channels, 1, stride=stride) if reshapes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(self.conv1(x)).relu()
        added: torch.Tensor = self.norm2(self.conv2(y)) + self.shortcut(x)
        return added.relu()


def normalisation(norm: Norm, channels: int) -> nn.Module:
    return nn.GroupNorm(_GROUPS, channels) if norm == "group" else nn.BatchNorm2d(channels)


def require_norm(norm: str, width: int) -> None:
    """Raises ValueError for an unknown norm, or a width that its groups do not divide."""
    if norm not in ("group", "batch"):
        raise ValueError(f"norm is 'group' or 'batch', got {norm!r}")
    if width < 1 or width % _GROUPS:
        raise ValueError(
            f"width must be a positive multiple of {_GROUPS}, the groups of its norm; got {width}"
        )


def spec(input_shape: tuple[int, ...], classes: int, norm: Norm = "group", width: int = 16) -> ModelSpec:
    """`input_shape` is (H, W) or (C, H, W).

    Raises:
        ValueError: not images, an unknown norm, or a width that the norm's groups do not divide.
    """
    image = image_shape(input_shape)
    require_norm(norm, width)
    return ModelSpec(
        "resnet8",
        lambda: ResNet8(image, norm, width, classes),
        input_shape,
        classes,
        options={"norm": norm, "width": width},
    )
