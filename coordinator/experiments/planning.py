"""The engine's plan of an experiment, in simulation and on a real fleet alike."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.experiments.schema import Experiment
from coordinator.rounds.closing import Closing
from coordinator.rounds.plan import LocalWork, RunPlan
from strategies import presets


def make_run_plan(experiment: Experiment, trainable: Sequence[str], clients_per_round: int) -> RunPlan:
    """The plan of a resolved experiment. `trainable`: names of the tensors that clients train."""
    federation, local = experiment.federation, experiment.local
    assert local.lr is not None  # resolved
    return RunPlan(
        seed=experiment.seed,
        rounds=federation.rounds,
        strategy=presets.get(experiment.strategy.name, **experiment.strategy.options),
        local=LocalWork(local.batch_size, local.lr, local.epochs, local.steps),
        trainable=tuple(trainable),
        closing=Closing(clients_per_round, federation.deadline_seconds),
        over_select=federation.over_select,
        min_updates=federation.min_updates,
        max_examples=federation.max_examples,
        outlier_factor=federation.outlier_factor,
        weight_cap=federation.weight_cap,
    )
