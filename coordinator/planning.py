"""From the experiment file to what the engine and the devices are told; the same in simulation and on a real fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.experiment import Experiment
from coordinator.rounds.plan import LocalWork, RunPlan
from strategies import presets

MODEL_KEYS = ("input_shape", "classes", "input_dtype", "task")
"""What a model must know of its data."""


def run_plan(experiment: Experiment, trainable: Sequence[str], clients_per_round: int) -> RunPlan:
    """The plan of a resolved experiment. `trainable`: names of the tensors that clients train."""
    federation, local = experiment.federation, experiment.local
    assert local.lr is not None  # resolved
    return RunPlan(
        seed=experiment.seed,
        rounds=federation.rounds,
        strategy=presets.get(experiment.strategy.name, **experiment.strategy.options),
        local=LocalWork(local.batch_size, local.lr, local.epochs, local.steps),
        trainable=tuple(trainable),
        clients_per_round=clients_per_round,
        over_select=federation.over_select,
        deadline_seconds=federation.deadline_seconds,
        min_updates=federation.min_updates,
        max_examples=federation.max_examples,
        outlier_factor=federation.outlier_factor,
        weight_cap=federation.weight_cap,
    )


def model_for(experiment: Experiment, shape: Mapping[str, Any]) -> dict[str, Any]:
    """What builds the model, as workers and devices are told. `shape`: the `MODEL_KEYS`, of the data."""
    return {
        "name": experiment.model.name,
        "options": experiment.model.options,
        **{key: shape[key] for key in MODEL_KEYS},
    }
