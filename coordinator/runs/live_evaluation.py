"""Evaluation of a run on devices: on the coordinator's held-out rows, and on the devices' own if the experiment wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator import failpoints
from coordinator.experiments.schema import Experiment
from coordinator.json_values import finite
from coordinator.rounds.records import Score
from coordinator.runs.federated_evaluation import EvaluatingFleet, FederatedScore, pool_results
from coordinator.runs.live_preparation import HeldOut
from strategies.params import Tensors


class LiveEvaluation:
    """Scores the model after each round. `held_out`: the coordinator's rows, None if it has none."""

    def __init__(self, experiment: Experiment, fleet: EvaluatingFleet, held_out: HeldOut | None) -> None:
        self._experiment = experiment
        self._fleet = fleet
        self._held_out = held_out
        self._on_devices: FederatedScore | None = None
        self._per_site: Mapping[str, Any] = {}

    def score(self, number: int, params: Tensors) -> Score:
        """The score after round `number`; the coordinator's rows take precedence."""
        failpoints.reach("round.folded")
        self._on_devices = self._evaluate_on_devices(number, params)
        self._per_site = self._on_devices.per_site if self._on_devices else {}
        clients = self._on_devices.clients if self._on_devices else {}
        if self._held_out is not None:
            scored = self._held_out.score(params)
            self._per_site = self._per_site or self._held_out.per_site(scored)
            return Score(scored.loss, scored.accuracy, clients)
        if self._on_devices is not None:
            return Score(self._on_devices.loss, self._on_devices.accuracy, clients)
        return Score(None, None, {})

    def more_figures(self) -> dict[str, Any]:
        """Values of the last score for the round's record, besides the engine's."""
        more: dict[str, Any] = {"per_site": dict(self._per_site)} if self._per_site else {}
        if self._on_devices is not None:
            more["on_devices"] = self._on_devices.to_json()
        return more

    def _evaluate_on_devices(self, number: int, params: Tensors) -> FederatedScore | None:
        devices, last = self._experiment.devices, self._experiment.federation.rounds
        if not devices.evaluate_every or (number % devices.evaluate_every and number != last):
            return None
        model = self._fleet.model(params, {})
        return pool_results(self._fleet.evaluate(number, model, devices.evaluate_seconds))


def start_figures(held_out: HeldOut | None, params: Tensors) -> dict[str, Any]:
    """Loss, accuracy and number of rows of the initial model."""
    if held_out is None:
        return {"test_loss": None, "test_accuracy": None, "test_rows": None}
    scored = held_out.score(params)
    figures = {"test_loss": scored.loss, "test_accuracy": scored.accuracy}
    return {**finite(figures), "test_rows": held_out.rows}
