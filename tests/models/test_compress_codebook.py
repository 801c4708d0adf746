"""Few values a tensor, zeros left alone, an encoding that can be read back, and a model that still works."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from models.compress import report
from models.compress.quantization import codebook
from models.compress.step import StepModel, StepRefused
from models.labels import PADDING
from tests.support.compressing import cnn, context, digits

VALUES = hnp.arrays(
    np.float32,
    st.integers(1, 200),
    elements=st.one_of(st.just(0.0), st.floats(-3, 3, width=32, allow_subnormal=False)),
)
BITS = st.integers(1, 8)


@given(VALUES, BITS)
def test_there_are_at_most_as_many_values_as_bits_tell_and_zeros_stay(values: np.ndarray, bits: int) -> None:
    shared = codebook.codebook(values, bits)
    assert len(shared.centroids) <= 2**bits
    assert shared.values().shape == values.shape
    assert not shared.values()[values == 0].any()


@given(VALUES, BITS)
def test_packed_values_can_be_read_back(values: np.ndarray, bits: int) -> None:
    shared = codebook.codebook(values, bits)
    packed = shared.packed()
    head = shared.centroids.nbytes
    assert len(packed) == head + -(-values.size * bits // 8)
    spread = np.unpackbits(np.frombuffer(packed[head:], np.uint8))[: values.size * bits].reshape(-1, bits)
    indices = spread @ (1 << np.arange(bits)[::-1])
    np.testing.assert_array_equal(np.frombuffer(packed[:head], np.float32)[indices], shared.values())


def test_centroids_lie_where_the_values_are() -> None:
    """Better than a uniform grid, because the values are not spread uniformly."""
    values = np.random.default_rng(0).normal(size=4000).astype(np.float32)
    grid = np.linspace(values.min(), values.max(), 8)
    uniform = grid[np.abs(values[:, None] - grid).argmin(1)]
    shared = codebook.codebook(values, 3).values()
    assert np.square(shared - values).mean() < 0.5 * np.square(uniform - values).mean()


@pytest.mark.slow
def test_weights_that_were_pruned_stay_pruned_through_fine_tuning_and_frozen_ones_stay_as_they_are() -> None:
    module = copy.deepcopy(cnn().module)
    with torch.no_grad():
        weight = module.get_parameter("fc.weight")
        weight[weight.abs() < weight.abs().median()] = 0
    options = codebook.CodebookOptions(bits=3, epochs=1, batch_size=64, freeze="conv2", max_accuracy_drop=0.5)
    books = codebook.codebooks(module, options)
    made = _clustered(StepModel(cnn().spec, module), options)

    tuned = {name: p.detach().numpy() for name, p in made.named_parameters()}
    assert not tuned["fc.weight"][module.get_parameter("fc.weight").detach().numpy() == 0].any()
    assert len(np.unique(tuned["fc.weight"])) <= 8
    assert not np.allclose(tuned["fc.weight"], books["fc.weight"].values())
    np.testing.assert_array_equal(tuned["conv2.weight"], books["conv2.weight"].values())
    np.testing.assert_array_equal(tuned["conv2.bias"], module.get_parameter("conv2.bias").detach().numpy())
    assert not np.array_equal(tuned["conv1.weight"], module.get_parameter("conv1.weight").detach().numpy())


def test_rows_without_labels_cannot_fine_tune() -> None:
    unlabelled = replace(digits(), y_train=np.full_like(digits().y_train, PADDING))
    with pytest.raises(StepRefused, match="none of 1000 training rows has a label"):
        codebook.share_weights(cnn(), unlabelled, codebook.CodebookOptions(epochs=1), context(cnn()))


@pytest.mark.extended
@pytest.mark.slow
def test_a_model_of_sixteen_values_a_tensor_travels_in_a_sixth() -> None:
    made = codebook.cluster(cnn(), digits(), codebook.CodebookOptions(), context(cnn()))
    assert (made.precision, made.tflite is None) == ("codebook", False)
    assert (
        report.quality(made.module, digits().x_test, digits().y_test) >= made.facts["float32_accuracy"] - 0.02
    )
    assert made.facts["transport_bytes"] < made.facts["params_bytes"] / 6
    assert made.facts["transport_bytes"] == sum(
        made.facts[name] for name in ("codebook_bytes", "index_bytes", "other_bytes")
    )
    assert made.facts["zlib_bytes"] < 0.4 * made.facts["bytes"]


@pytest.mark.slow
@pytest.mark.extended
def test_fine_tuning_finds_back_what_four_values_a_tensor_cost() -> None:
    coarse = codebook.CodebookOptions(bits=2)
    with pytest.raises(StepRefused, match="codebook accuracy is"):
        codebook.cluster(cnn(), digits(), coarse, context(cnn()))
    made = codebook.cluster(
        cnn(), digits(), replace(coarse, epochs=4, batch_size=32, lr=2e-3), context(cnn())
    )
    assert set(made.facts["values"].values()) == {4}


def _clustered(model: StepModel, options: codebook.CodebookOptions) -> torch.nn.Module:
    module, _ = codebook.share_weights(model, digits(), options, context(model))
    return module
