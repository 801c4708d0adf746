"""The description of an experiment's model, from which workers and devices build it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.experiments.schema import Experiment

MODEL_KEYS = ("input_shape", "classes", "input_dtype", "task")
"""Properties of the data that a model depends on."""


def describe_model(experiment: Experiment, shape: Mapping[str, Any]) -> dict[str, Any]:
    """The description from which workers and devices build the model. `shape`: the `MODEL_KEYS` of the data."""
    return {
        "name": experiment.model.name,
        "options": experiment.model.options,
        **{key: shape[key] for key in MODEL_KEYS},
    }
