"""Evaluation of a run on devices: on the coordinator's held-out rows, and on the devices' own if the experiment wants it.

Devices send sums, never rows; `coordinator.rounds.pooling` combines them so that no single device decides the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from coordinator import failpoints
from coordinator.experiments.schema import Experiment
from coordinator.json_values import finite
from coordinator.rounds.fleet import Fleet, Model
from coordinator.rounds.pooling import bounded_loss, label_cap, pool_quantities
from coordinator.rounds.records import Score
from edge_client.wire.device import EvaluationResult
from strategies.params import Tensors

if TYPE_CHECKING:
    from coordinator.runs.live_preparation import HeldOut


class EvaluatingFleet(Fleet, Protocol):
    """A fleet that can also evaluate, and can be stopped from another thread."""

    def evaluate(self, number: int, model: Model, seconds: float) -> Mapping[str, EvaluationResult]:
        """Results by client, of those that answer in time."""

    def stop(self) -> None:
        """From now on every method raises `Stopped`, also one that is waiting."""


@dataclass(frozen=True)
class FederatedScore:
    """A model's score over devices, each weighted by its labels up to a cap.

    Attributes:
        figures: test_loss, test_accuracy, test_rows, devices, as the devices report them, and label_cap: the most labels
            that one device counts for, also in the score of its site.
        clients: accuracy by device; empty for a regression, whose figures have `metrics` instead of an accuracy.
        per_site: site -> its figures; a device without a site is its own site.
    """

    figures: Mapping[str, Any]
    clients: Mapping[str, float]
    per_site: Mapping[str, Mapping[str, Any]]


def pool_results(
    results: Mapping[str, EvaluationResult], label_scale: Sequence[float] | None = None
) -> FederatedScore | None:
    """The pooled score of all results; None if there are none. `label_scale`: mean and deviation of labels that are quantities."""
    if not results:
        return None
    cap = label_cap(result.labels for result in results.values())
    sites: dict[str, list[EvaluationResult]] = {}
    for device in sorted(results):
        sites.setdefault(results[device].site or device, []).append(results[device])
    return FederatedScore(
        figures={**_score(list(results.values()), cap, label_scale), "label_cap": cap},
        clients={}
        if label_scale
        else {device: result.correct / result.labels for device, result in sorted(results.items())},
        per_site={site: _score(of_site, cap, label_scale) for site, of_site in sorted(sites.items())},
    )


def _score(results: list[EvaluationResult], cap: int, label_scale: Sequence[float] | None) -> dict[str, Any]:
    """Loss and accuracy per label, and numbers of rows and devices. No device counts for more than `cap` labels."""
    shares = [min(1.0, cap / result.labels) for result in results]
    labels = sum(share * result.labels for share, result in zip(shares, results, strict=True))
    losses = (bounded_loss(result.loss_sum, result.labels) for result in results)
    correct = sum(share * result.correct for share, result in zip(shares, results, strict=True))
    metrics = pool_quantities(results, cap, label_scale[1]) if label_scale else None
    return {
        "test_loss": sum(share * loss for share, loss in zip(shares, losses, strict=True)) / labels,
        "test_accuracy": None if label_scale else correct / labels,
        "test_rows": sum(result.rows for result in results),
        "devices": len(results),
        **({"metrics": metrics} if metrics else {}),
    }


class LiveEvaluation:
    """Scores the model after each round.

    `held_out`: the coordinator's rows, None if it has none. `label_scale`: mean and deviation of labels that are quantities.
    """

    def __init__(
        self,
        experiment: Experiment,
        fleet: EvaluatingFleet,
        held_out: HeldOut | None,
        label_scale: Sequence[float] | None = None,
    ) -> None:
        self._experiment = experiment
        self._fleet = fleet
        self._held_out = held_out
        self._label_scale = label_scale
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
            return Score(scored.loss, self._held_out.accuracy(scored), clients)
        if self._on_devices is not None:
            figures = self._on_devices.figures
            return Score(figures["test_loss"], figures["test_accuracy"], clients)
        return Score(None, None, {})

    def more_figures(self) -> dict[str, Any]:
        """Values of the last score for the round's record, besides the engine's."""
        more: dict[str, Any] = {"per_site": dict(self._per_site)} if self._per_site else {}
        if self._on_devices is not None:
            more["on_devices"] = self._on_devices.figures
        return more

    def _evaluate_on_devices(self, number: int, params: Tensors) -> FederatedScore | None:
        devices, last = self._experiment.devices, self._experiment.federation.rounds
        if not devices.evaluate_every or (number % devices.evaluate_every and number != last):
            return None
        model = self._fleet.model(params, {})
        return pool_results(self._fleet.evaluate(number, model, devices.evaluate_seconds), self._label_scale)


def start_figures(held_out: HeldOut | None, params: Tensors) -> dict[str, Any]:
    """Loss, accuracy and number of rows of the initial model."""
    if held_out is None:
        return {"test_loss": None, "test_accuracy": None, "test_rows": None}
    scored = held_out.score(params)
    figures = {"test_loss": scored.loss, "test_accuracy": held_out.accuracy(scored)}
    return {**finite(figures), "test_rows": held_out.rows}
