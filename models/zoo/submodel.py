"""A narrower variant of a model as a client of a smaller device class trains it (see `models.widths`).

Its scaler divides the outputs of hidden layers by the width (Diao 2021, section 3). The params are those of the plain narrower model, whose
outputs are the same once these layers' params are divided themselves (`widths.fold_scaler`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from models import widths
from models.zoo.spec import ModelSpec


def spec(narrower: ModelSpec, base_options: Mapping[str, Any], width: float) -> ModelSpec:
    """`narrower`, the plain model with scaled options, with its scaler. `base_options`: of the model at full width."""
    layers = widths.scaled_layers(narrower.name, narrower.options)
    options = {"base": narrower.name, "base_options": dict(base_options), "width": width}
    return replace(
        narrower,
        name=widths.MODEL,
        module=lambda: add_scaler(narrower.module(), layers, width),
        options=options,
        tensorflow_twin=None,
        layout=None,
    )


def add_scaler(module: nn.Module, layers: Sequence[str], width: float) -> nn.Module:
    """Divides the outputs of these layers by `width`, in place."""

    def scale(layer: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output / width

    for name in layers:
        module.get_submodule(name).register_forward_hook(scale)
    return module
