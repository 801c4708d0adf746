"""A narrower variant of a model as a client of a smaller device class trains it (see `models.widths`).

Its scaler divides the outputs of hidden layers by the width (Diao 2021, section 3). The params are those of the plain narrower model, whose
outputs are the same once these layers' params are divided themselves (`widths.fold_scaler`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edge_client.train.torch_trainer import divide_outputs
from models import widths
from models.zoo.spec import ModelSpec


def spec(narrower: ModelSpec, base_options: Mapping[str, Any], width: float) -> ModelSpec:
    """`narrower`, the plain model with scaled options, with its scaler. `base_options`: of the model at full width."""
    divisors = widths.divisors(narrower.name, narrower.options, width)
    options = {"base": narrower.name, "base_options": dict(base_options), "width": width}
    return replace(
        narrower,
        name=widths.MODEL,
        module=lambda: divide_outputs(narrower.module(), divisors),
        options=options,
        tensorflow_twin=None,
        layout=None,
    )
