"""Releases that predict a quantity, compared on a device's rows: their labels may be scaled differently."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from edge_client.infer.runtime import LoadedRelease
from edge_client.ota import self_test_worker
from edge_client.wire.schema import DataSchema


def release(scale: tuple[float, float], task: str = "regression", error: float = 0.0) -> LoadedRelease:
    """Predicts the mean of each row plus `error`, standardised by `scale`."""
    mean, deviation = scale
    schema = DataSchema("array", (4,), "float32", label_scale=scale if task == "regression" else None)
    manifest = SimpleNamespace(task=task, data_schema=schema, classes=1, input=(4,))

    def predict(x: Any) -> Any:
        return ((x.mean(axis=1, keepdims=True) + error - mean) / deviation).astype(np.float32)

    return cast(LoadedRelease, SimpleNamespace(manifest=manifest, predict=predict))


def test_a_champion_of_another_scale_is_judged_in_the_candidates() -> None:
    x = np.random.default_rng(1).normal(10, 3, (100, 4)).astype(np.float32)
    scale = (10.0, 2.0)
    y = ((x.mean(axis=1) - scale[0]) / scale[1]).astype(np.float32)
    own = self_test_worker._evaluate(release(scale, error=1.0), x, y)
    same = self_test_worker._evaluate(release((-50.0, 9.0), error=1.0), x, y, scale)
    assert own["loss_sum"] == pytest.approx(100 * (1.0 / 2.0) ** 2, rel=1e-4)
    assert same["loss_sum"] == pytest.approx(own["loss_sum"], rel=1e-4)
    assert own["labels"] == same["labels"] == 100 and own["correct"] == 0


def test_a_quantity_and_a_class_are_not_compared() -> None:
    quantity, other = release((0.0, 1.0)), release((0.0, 1.0), "classification")
    assert self_test_worker._is_comparable(quantity, release((5.0, 2.0)))
    assert not self_test_worker._is_comparable(quantity, other)
