"""The whole model of which processes train parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from models.pretrain import initial
from models.pretrain.params import save_parts
from models.pretrain.world import World
from models.zoo import ModelSpec


def whole(parts: Sequence[nn.Module], spec: ModelSpec, here: World) -> nn.Module | None:
    """The module that a training's params file holds, on process 0. A collective."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        if save_parts(parts, spec, here, path) is None:
            return None
        return initial.with_params(spec, path, new_head=False).build(0)
