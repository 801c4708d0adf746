"""A deep residual network (He 2016) whose blocks a pipeline may split between.

Four stages of two blocks each are ResNet-18; the stem is the one for small images, a 3x3 convolution without pooling.
With `norm="group"` statistics are per example and any plan trains the same; with `norm="batch"` every process normalises
with its own rows, as is usual (Goyal 2017, section 2.3), so a plan changes the training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from models.zoo.cnn import image_shape
from models.zoo.layout import Chain, Layout
from models.zoo.resnet8 import Norm, Residual, normalisation, require_norm
from models.zoo.spec import ModelSpec


class ResNet(Chain):
    """x [B, H, W] or [B, C, H, W] -> logits [B, classes]; stage i has width · 2^i channels."""

    def __init__(
        self, input_shape: tuple[int, int, int], blocks: Sequence[int], width: int, norm: Norm, classes: int
    ) -> None:
        super().__init__()
        self.stem = Stem(input_shape, width, norm)
        shapes = [
            (max(stage - (block == 0), 0), stage, 2 if stage and block == 0 else 1)
            for stage, count in enumerate(blocks)
            for block in range(count)
        ]
        self.layers = nn.ModuleDict(
            {
                str(index): Residual(width << before, width << after, stride, norm)
                for index, (before, after, stride) in enumerate(shapes)
            }
        )
        self.head = Classifier(width << (len(blocks) - 1), classes)


class Stem(nn.Module):
    """Images -> [B, width, H, W]."""

    def __init__(self, input_shape: tuple[int, int, int], width: int, norm: Norm) -> None:
        super().__init__()
        self.input_shape = input_shape
        self.convolution = nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False)
        self.norm = normalisation(norm, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.norm(self.convolution(x.reshape(-1, *self.input_shape)))
        return h.relu()


class Classifier(nn.Module):
    """[B, C, H, W] -> logits [B, classes], from the mean over the image."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, classes)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(h.mean((2, 3)))
        return logits


def spec(
    input_shape: tuple[int, ...],
    classes: int,
    blocks: Sequence[int] = (2, 2, 2, 2),
    width: int = 64,
    norm: Norm = "group",
) -> ModelSpec:
    """`input_shape` is (H, W) or (C, H, W); `blocks` has the number of blocks of every stage.

    Raises:
        ValueError: not images, a stage without a block, an unknown norm, or a width that its groups do not divide.
    """
    image = image_shape(input_shape)
    require_norm(norm, width)
    if not blocks or min(blocks) < 1:
        raise ValueError(f"blocks has a number of 1 or more for every stage, got {list(blocks)}")
    return ModelSpec(
        "resnet",
        lambda: ResNet(image, blocks, width, norm, classes),
        input_shape,
        classes,
        options={"blocks": list(blocks), "width": width, "norm": norm},
        layout=Layout(order=("stem", "layers.*", "head"), width=width),
    )
