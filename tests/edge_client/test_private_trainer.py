"""DP-SGD on a device: rows and noise come from its own source, and each row's gradient counts for no more than the norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edge_client.data.examples import Examples
from edge_client.train.private_trainer import UnpredictableBatches, make_private_trainer
from edge_client.train.resolve import CannotRun, private_trainer_for
from edge_client.train.torch_trainer import read
from edge_client.train.trainer import TrainTask
from edge_client.wire.device import ModelRef
from edge_client.wire.privacy import NoiseTask, RowLimit
from strategies.privacy.noise.secure import SecureSource, SeededSource, Source, draw_uniforms
from tests.support.row_models import Linear, Mixing

CLIP_NORM = 0.5


def fixed(seed: int) -> Source:
    return SeededSource(np.random.default_rng(seed))


def asked(noise_multiplier: float) -> NoiseTask:
    return NoiseTask("example", CLIP_NORM, noise_multiplier, (RowLimit(1, 1),))


def step(data: Examples, noise_multiplier: float, source: Source, seed: int = 3, **task: Any) -> np.ndarray:
    """What one step of rate 1 learns of a linear model."""
    module = Linear(data.x.shape[1])
    wanted = TrainTask(seed, **({"batch_size": len(data), "lr": 1.0, "steps": 1} | task))
    trainer = make_private_trainer(
        module, nn.functional.cross_entropy, asked(noise_multiplier), data, wanted.batch_size, source
    )
    update = trainer.train(read(module), wanted, data).update
    assert (update.num_examples, update.train_loss) == (len(data), 0)
    return np.asarray(update.delta["layer.weight"], np.float64)


def rows(count: int = 40, inputs: int = 600) -> Examples:
    rng = np.random.default_rng(5)
    return Examples((100 * rng.normal(size=(count, inputs))).astype(np.float32), rng.integers(0, 2, count))


def clipped_sum(data: Examples) -> np.ndarray:
    """Of the gradients of a model of zeros, (p - y) x, each of which is far longer than the norm."""
    alone = [np.outer(0.5 - np.eye(2)[label], row) for row, label in zip(data.x, data.y, strict=True)]
    return np.sum([CLIP_NORM * each / np.linalg.norm(each) for each in alone], axis=0)


def test_a_step_is_the_mean_of_clipped_gradients_with_noise_of_the_source() -> None:
    data = rows()
    quiet, noised = step(data, 1e-6, fixed(1)), step(data, 2.0, fixed(1))
    np.testing.assert_allclose(quiet, -clipped_sum(data) / 40, atol=1e-6)
    assert (noised - quiet).std() == pytest.approx(2.0 * CLIP_NORM / 40, rel=0.1)
    np.testing.assert_array_equal(noised, step(data, 2.0, fixed(1), seed=4))
    other = step(data, 2.0, fixed(2)) - quiet
    assert abs(np.corrcoef(other.ravel(), (noised - quiet).ravel())[0, 1]) < 0.1


def test_the_source_decides_which_rows_a_step_takes() -> None:
    data = rows()
    taken = np.flatnonzero(draw_uniforms(fixed(7), 40) < 8 / 40)
    assert 0 < len(taken) < 20
    for seed in (3, 4):
        found = step(data, 1e-6, fixed(7), seed, batch_size=8)
        np.testing.assert_allclose(found, -clipped_sum(data.rows(taken)) / 8, atol=1e-6)


def test_each_row_is_taken_by_itself_with_the_same_probability() -> None:
    batches = UnpredictableBatches(SecureSource())
    taken = np.zeros((4000, 10))
    for number, batch in enumerate(batches(10, 3, epochs=None, steps=4000, rng=np.random.default_rng(0))):
        taken[number, batch] = 1
    np.testing.assert_allclose(taken.mean(0), 0.3, atol=0.05)
    assert np.abs(np.corrcoef(taken.T) - np.eye(10)).max() < 0.1


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
def test_a_row_whose_gradient_is_not_finite_does_not_spoil_the_sum(value: float) -> None:
    data = rows()
    spoilt = Examples(data.x.copy(), data.y)
    spoilt.x[7] = value
    found = step(spoilt, 1e-6, fixed(1))
    np.testing.assert_allclose(found, -clipped_sum(data.rows(np.delete(np.arange(40), 7))) / 40, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_equal_rows_do_not_hide_that_a_model_mixes_rows(dtype: type, count: int) -> None:
    alike = Examples(np.ones((count, 4), dtype), np.zeros(count, np.int64))
    trainer = make_private_trainer(Mixing(), nn.functional.cross_entropy, asked(1.0), alike, 1)
    x = torch.arange(12.0).reshape(3, 4) ** 2
    together = trainer.runtime.row_gradients(x, torch.zeros(3, dtype=torch.long))  # type: ignore[attr-defined]
    for gradients in (each[1] for each in together if each.dim() == 3):
        assert not gradients.any()  # a row alone is its own mean


def test_models_that_normalise_by_statistics_of_rows_are_refused() -> None:
    model = ModelRef("resnet8", {"norm": "batch", "width": 8}, (8, 8), 10, "float32", "classification")
    data = Examples(np.zeros((4, 8, 8), np.float32), np.zeros(4, np.int32))
    with pytest.raises(CannotRun, match="normalise by statistics of training rows, which no noise hides"):
        private_trainer_for(model, asked(1.0), data, 2)
