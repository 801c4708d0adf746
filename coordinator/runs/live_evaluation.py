"""Evaluation of a run on devices: on the coordinator's held-out rows, and on the devices' own if the experiment wants it.

Devices send sums, never rows; `coordinator.rounds.pooling` combines them so that no single device decides the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from coordinator import failpoints
from coordinator.experiments.schema import Experiment
from coordinator.json_values import finite
from coordinator.reports.pooled_metrics import pooled_classification
from coordinator.rounds.fleet import Fleet, Model
from coordinator.rounds.pooling import bounded_loss, label_cap, pool_quantities
from coordinator.rounds.records import UNSCORED, Score
from coordinator.rounds.scores import pool_scores
from coordinator.rounds.step import AsynchronousFleet
from edge_client.wire.device import EvaluationResult
from strategies.params import Tensors

if TYPE_CHECKING:
    from coordinator.runs.live_preparation import HeldOut


class Evaluating(Protocol):
    """What a fleet can do besides carrying updates: evaluate, and be stopped from another thread."""

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        """As `Fleet.model`."""

    def evaluate(self, number: int, model: Model, seconds: float) -> Mapping[str, EvaluationResult]:
        """Results by client, of those that answer in time."""

    def traits(self, number: int) -> Mapping[str, Mapping[str, str]]:
        """How the evaluators of a round are grouped: client -> its `runtime` and `class`."""

    def stop(self) -> None:
        """From now on every method raises `Stopped`, also one that is waiting."""


class EvaluatingFleet(Fleet, Evaluating, Protocol):
    """A fleet that can also evaluate."""


class AsynchronousEvaluatingFleet(AsynchronousFleet, Evaluating, Protocol):
    """A fleet of an asynchronous run that can also evaluate."""


MAX_DETAILED_SITES = 50
"""Most sites that list figures of every class; each round's record holds them."""


@dataclass(frozen=True)
class Labels:
    """What the labels of a run are.

    Attributes:
        names: of the classes; empty if they have none.
        positive: index of the positive class of two.
        scale: mean and deviation of labels that are quantities; None: classes.
    """

    names: Sequence[str] = ()
    positive: int = 1
    scale: Sequence[float] | None = None


CLASSES = Labels()


@dataclass(frozen=True)
class FederatedScore:
    """A model's score over devices, each weighted by its labels up to a cap.

    Attributes:
        figures: test_loss, test_accuracy, test_rows, devices, as the devices report them, and label_cap: the most labels
            that one device counts for, also in the score of its site; and `metrics` if devices report what they need.
        clients: accuracy by device; empty for a regression, which has none.
        per_site: site -> its figures; a device without a site is its own site.
        per_trait: trait, such as `runtime` -> its value -> loss, accuracy, rows and devices of those that have it.
    """

    figures: Mapping[str, Any]
    clients: Mapping[str, float]
    per_site: Mapping[str, Mapping[str, Any]]
    per_trait: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)


def pool_results(
    results: Mapping[str, EvaluationResult],
    about: Labels = CLASSES,
    traits: Mapping[str, Mapping[str, str]] | None = None,
) -> FederatedScore | None:
    """The pooled score of all results; None if there are none. `traits`: as `EvaluatingFleet.traits`."""
    if not results:
        return None
    cap = label_cap(result.labels for result in results.values())
    sites: dict[str, list[EvaluationResult]] = {}
    for device in sorted(results):
        sites.setdefault(results[device].site or device, []).append(results[device])
    return FederatedScore(
        figures={**_score(list(results.values()), cap, about, detailed=True), "label_cap": cap},
        clients={}
        if about.scale
        else {device: result.correct / result.labels for device, result in sorted(results.items())},
        per_site={
            site: _score(of_site, cap, about, detailed=len(sites) <= MAX_DETAILED_SITES)
            for site, of_site in sorted(sites.items())
        },
        per_trait=_score_traits(results, cap, about, traits or {}),
    )


def _score_traits(
    results: Mapping[str, EvaluationResult],
    cap: int,
    about: Labels,
    traits: Mapping[str, Mapping[str, str]],
) -> dict[str, dict[str, dict[str, Any]]]:
    groups: dict[str, dict[str, list[EvaluationResult]]] = {}
    for device, result in sorted(results.items()):
        for trait, value in traits.get(device, {}).items():
            groups.setdefault(trait, {}).setdefault(value, []).append(result)
    return {
        trait: {value: _summary(of_value, cap, about) for value, of_value in sorted(values.items())}
        for trait, values in sorted(groups.items())
    }


def _score(results: list[EvaluationResult], cap: int, about: Labels, *, detailed: bool) -> dict[str, Any]:
    """The summary of these results, and `metrics` if devices report what they need."""
    metrics = _metrics(results, cap, about, detailed=detailed)
    return {**_summary(results, cap, about), **({"metrics": metrics} if metrics else {})}


def _summary(results: list[EvaluationResult], cap: int, about: Labels) -> dict[str, Any]:
    """Loss and accuracy per label, and numbers of rows and devices. No device counts for more than `cap` labels."""
    shares = [min(1.0, cap / result.labels) for result in results]
    labels = sum(share * result.labels for share, result in zip(shares, results, strict=True))
    losses = (bounded_loss(result.loss_sum, result.labels) for result in results)
    correct = sum(share * result.correct for share, result in zip(shares, results, strict=True))
    return {
        "test_loss": sum(share * loss for share, loss in zip(shares, losses, strict=True)) / labels,
        "test_accuracy": None if about.scale else correct / labels,
        "test_rows": sum(result.rows for result in results),
        "devices": len(results),
    }


def _metrics(
    results: list[EvaluationResult], cap: int, about: Labels, *, detailed: bool
) -> Mapping[str, Any] | None:
    """The figures besides loss and accuracy; None if no device reports what they need."""
    if about.scale:
        return pool_quantities(results, cap, about.scale[1])
    pooled = pool_scores(results, cap)
    if pooled is None:
        return None
    return pooled_classification(pooled, about.names, about.positive, detailed=detailed)


class LiveEvaluation:
    """Scores the model after each round. `held_out`: the coordinator's rows, None if it has none."""

    def __init__(
        self,
        experiment: Experiment,
        fleet: Evaluating,
        held_out: HeldOut | None,
        about: Labels = CLASSES,
    ) -> None:
        self._experiment = experiment
        self._fleet = fleet
        self._held_out = held_out
        self._about = about
        self._on_devices: FederatedScore | None = None
        self._per_site: Mapping[str, Any] = {}

    def score(self, number: int, params: Tensors) -> Score:
        """The score after round `number`; the coordinator's rows take precedence."""
        failpoints.reach("round.folded")
        self._on_devices = self._evaluate_on_devices(number, params)
        self._per_site = self._on_devices.per_site if self._on_devices else {}
        clients = self._on_devices.clients if self._on_devices else {}
        metric, rounds = self._experiment.federation.metric, self._experiment.federation.rounds
        if self._held_out is not None and self._experiment.evaluation.is_due(number, rounds):
            scored = self._held_out.score(params, metric)
            self._per_site = self._per_site or self._held_out.per_site(scored)
            figure = self._held_out.metric(metric, scored)
            return Score(scored.loss, self._held_out.accuracy(scored), clients, figure)
        if self._held_out is None and self._on_devices is not None:
            figures = self._on_devices.figures
            figure = figures.get("metrics", {}).get(metric)
            return Score(figures["test_loss"], figures["test_accuracy"], clients, figure)
        return replace(UNSCORED, clients=clients)

    def more_figures(self) -> dict[str, Any]:
        """Values of the last score for the round's record, besides the engine's."""
        more: dict[str, Any] = {"per_site": dict(self._per_site)} if self._per_site else {}
        if self._on_devices is not None:
            more["on_devices"] = self._on_devices.figures
            more |= {f"per_{trait}": values for trait, values in self._on_devices.per_trait.items()}
        return more

    def _evaluate_on_devices(self, number: int, params: Tensors) -> FederatedScore | None:
        devices, last = self._experiment.devices, self._experiment.federation.rounds
        if not devices.evaluate_every or (number % devices.evaluate_every and number != last):
            return None
        model = self._fleet.model(params, {})
        results = self._fleet.evaluate(number, model, devices.evaluate_seconds)
        return pool_results(results, self._about, self._fleet.traits(number))


def start_figures(held_out: HeldOut | None, params: Tensors) -> dict[str, Any]:
    """Loss, accuracy and number of rows of the initial model."""
    if held_out is None:
        return {"test_loss": None, "test_accuracy": None, "test_rows": None}
    scored = held_out.score(params)
    figures = {"test_loss": scored.loss, "test_accuracy": held_out.accuracy(scored)}
    return {**finite(figures), "test_rows": held_out.rows}
