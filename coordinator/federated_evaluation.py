"""Evaluation on the devices' own held-out rows: sums come in, rows never do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.fleets.fleet import Fleet, Model
from edge_client.wire.device import EvaluationResult


class Devices(Fleet, Protocol):
    """A fleet that can also evaluate, and be told from another thread that its run is over."""

    def evaluate(self, number: int, model: Model, seconds: float) -> Mapping[str, EvaluationResult]:
        """Results by client, of all that answer in time."""

    def stop(self) -> None:
        """Every method raises `Stopped` from now on, one that waits too."""


@dataclass(frozen=True)
class Federated:
    """A model's score over devices, weighted by their labels. Accuracies by device and by site.

    Attributes:
        per_site: site -> test_rows, test_accuracy, test_loss, devices; a device without a site is one of its own.
    """

    loss: float
    accuracy: float
    rows: int
    devices: int
    clients: Mapping[str, float]
    per_site: Mapping[str, Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return {
            "test_loss": self.loss,
            "test_accuracy": self.accuracy,
            "test_rows": self.rows,
            "devices": self.devices,
        }


def summed(results: Mapping[str, EvaluationResult]) -> Federated | None:
    """The score of all results together; None where none came."""
    if not results:
        return None
    loss, accuracy, rows = _score(list(results.values()))
    sites: dict[str, list[EvaluationResult]] = {}
    for device in sorted(results):
        sites.setdefault(results[device].site or device, []).append(results[device])
    return Federated(
        loss=loss,
        accuracy=accuracy,
        rows=rows,
        devices=len(results),
        clients={device: _score([result])[1] for device, result in sorted(results.items())},
        per_site={site: _site(of_site) for site, of_site in sorted(sites.items())},
    )


def _site(results: list[EvaluationResult]) -> dict[str, Any]:
    loss, accuracy, rows = _score(results)
    return {"test_rows": rows, "test_accuracy": accuracy, "test_loss": loss, "devices": len(results)}


def _score(results: list[EvaluationResult]) -> tuple[float, float, int]:
    labels = sum(result.labels for result in results)
    return (
        sum(result.loss_sum for result in results) / labels,
        sum(result.correct for result in results) / labels,
        sum(result.rows for result in results),
    )
