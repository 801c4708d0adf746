"""Runs that train few params on a frozen backbone (`model.adapt`): the backbone's file, and the merged model at the end.

1. freeze   the params of model.init are rounded to 8 bits and stored in the run's folder
2. the run  its params are the trained ones; the backbone is in the model's code and artifact (`models.zoo.adapted`)
3. merge    combines backbone and trained params into params of the model itself
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.files import file_sha256, write_durably
from edge_client.wire import arrays
from models import adaptation
from strategies.params import Params, Tensors

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment

BACKBONE = "backbone.safetensors"


def freeze(shipped: Params, folder: Path) -> None:
    """Stores the params that a run starts from as its backbone, unless it has one."""
    if not (folder / BACKBONE).exists():
        write_durably(folder / BACKBONE, arrays.encode(adaptation.quantize_backbone(shipped)))


def adapt_model(experiment: Experiment, model: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The description of `model` on the backbone in `folder`; unchanged if the run adapts nothing."""
    if experiment.model.adapt is None:
        return dict(model)
    options = {
        "base": model["name"],
        "base_options": model["options"],
        "adapt": experiment.model.adapt,
        "backbone": str((folder / BACKBONE).absolute()),
    }
    return {**model, "name": adaptation.MODEL, "options": options}


def merge(experiment: Experiment, params: Tensors, folder: Path) -> Tensors:
    """The params of the model itself: those of an adapting run, merged with its backbone."""
    if experiment.model.adapt is None:
        return params
    frozen = arrays.read(folder / BACKBONE)
    return adaptation.merge(frozen, dict(params), adaptation.parse(experiment.model.adapt))


def fingerprint(experiment: Experiment, folder: Path) -> dict[str, str]:
    """The backbone's part of a run's identity."""
    return {} if experiment.model.adapt is None else {"backbone": file_sha256(folder / BACKBONE)}
