"""Evaluation on the devices' own held-out rows: sums come in, rows never do.

How they are added up, so that no device owns the result, is `coordinator.pooling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.fleets.fleet import Fleet, Model
from coordinator.pooling import bounded_loss, label_cap
from edge_client.wire.device import EvaluationResult


class Devices(Fleet, Protocol):
    """A fleet that can also evaluate, and be told from another thread that its run is over."""

    def evaluate(self, number: int, model: Model, seconds: float) -> Mapping[str, EvaluationResult]:
        """Results by client, of all that answer in time."""

    def stop(self) -> None:
        """Every method raises `Stopped` from now on, one that waits too."""


@dataclass(frozen=True)
class Federated:
    """A model's score over devices, weighted by their labels up to `label_cap`. Accuracies by device and by site.

    Attributes:
        rows: held-out rows of all devices together, as they say.
        label_cap: the most labels that one device counts for, in the score of its site too.
        per_site: site -> test_rows, test_accuracy, test_loss, devices; a device without a site is one of its own.
    """

    loss: float
    accuracy: float
    rows: int
    devices: int
    label_cap: int
    clients: Mapping[str, float]
    per_site: Mapping[str, Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return {
            "test_loss": self.loss,
            "test_accuracy": self.accuracy,
            "test_rows": self.rows,
            "devices": self.devices,
            "label_cap": self.label_cap,
        }


def summed(results: Mapping[str, EvaluationResult]) -> Federated | None:
    """The score of all results together; None where none came."""
    if not results:
        return None
    most = label_cap(result.labels for result in results.values())
    loss, accuracy, rows = _score(list(results.values()), most)
    sites: dict[str, list[EvaluationResult]] = {}
    for device in sorted(results):
        sites.setdefault(results[device].site or device, []).append(results[device])
    return Federated(
        loss=loss,
        accuracy=accuracy,
        rows=rows,
        devices=len(results),
        label_cap=most,
        clients={device: result.correct / result.labels for device, result in sorted(results.items())},
        per_site={site: _site(of_site, most) for site, of_site in sorted(sites.items())},
    )


def _site(results: list[EvaluationResult], most: int) -> dict[str, Any]:
    loss, accuracy, rows = _score(results, most)
    return {"test_rows": rows, "test_accuracy": accuracy, "test_loss": loss, "devices": len(results)}


def _score(results: list[EvaluationResult], most: int) -> tuple[float, float, int]:
    """Loss and accuracy a label, and rows. A device with more than `most` labels counts for so many."""
    shares = [min(1.0, most / result.labels) for result in results]
    labels = sum(share * result.labels for share, result in zip(shares, results, strict=True))
    losses = (bounded_loss(result.loss_sum, result.labels) for result in results)
    return (
        sum(share * loss for share, loss in zip(shares, losses, strict=True)) / labels,
        sum(share * result.correct for share, result in zip(shares, results, strict=True)) / labels,
        sum(result.rows for result in results),
    )
