"""Expert parallelism: every process of the shard axis keeps some experts; tokens travel to theirs and back."""

from __future__ import annotations

from torch import nn

from models.pretrain.world import World
from models.zoo.layout import Layout


def split(module: nn.Module, layout: Layout, world: World) -> None:
    """Splits the experts of `module` in place."""
    raise NotImplementedError
