"""Runs that train few params on a frozen backbone (`model.adapt`): the backbone's file, and the whole model at the end.

1. freeze   model.init is checked against the model, rounded to 8 bits and kept in the run's folder
2. the run  its params are those that are trained; the backbone is in the model's code and artifact (`models.zoo.adapted`)
3. merge    what the run came to, as params of the model itself
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.experiment import Experiment
from edge_client.files import write_durably
from edge_client.wire import arrays
from models import adaptation
from strategies.params import Params, Tensors

BACKBONE = "backbone.safetensors"


def freeze(shipped: Params, folder: Path) -> None:
    """Keeps the params that a run begins with as its backbone; one that is there already stays."""
    if not (folder / BACKBONE).exists():
        write_durably(folder / BACKBONE, arrays.encode(adaptation.backbone(shipped)))


def adapted(experiment: Experiment, model: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`model`, as workers are told of it, on the backbone in `folder`; as it is where the run adapts nothing."""
    if experiment.model.adapt is None:
        return dict(model)
    options = {
        "base": model["name"],
        "base_options": model["options"],
        "adapt": experiment.model.adapt,
        "backbone": str((folder / BACKBONE).absolute()),
    }
    return {**model, "name": adaptation.MODEL, "options": options}


def whole(experiment: Experiment, params: Tensors, folder: Path) -> Tensors:
    """The params of the model itself, where the run's own are a few of them."""
    if experiment.model.adapt is None:
        return params
    frozen = arrays.read(folder / BACKBONE)
    return adaptation.merged(frozen, dict(params), adaptation.parse(experiment.model.adapt))


def fingerprint(experiment: Experiment, folder: Path) -> dict[str, str]:
    """What of a run's identity is its backbone."""
    return {} if experiment.model.adapt is None else {"backbone": arrays.sha256_of(folder / BACKBONE)}
