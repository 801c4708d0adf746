"""Canonical params go to TensorFlow's layout and come back the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.zoo.cnn import CNN
from models.zoo.mlp import MLP
from tests.support.local_data import noise_like

if TYPE_CHECKING:
    from models.zoo.tensorflow import twins

sizes = st.integers(1, 6)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    image=st.tuples(sizes, sizes, sizes),
    channels=st.tuples(sizes, sizes),
    hidden=st.integers(0, 5),
    classes=sizes,
    seed=st.integers(0, 2**32 - 1),
)
def test_convolutional_params_survive_the_round_trip(
    image: tuple[int, int, int], channels: tuple[int, int], hidden: int, classes: int, seed: int
) -> None:
    from models.zoo.tensorflow import twins  # takes seconds

    module = CNN(image, channels, hidden, classes)
    assert_round_trip(twins.small_cnn(image, channels, hidden), module, seed)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(widths=st.lists(sizes, max_size=3), features=sizes, classes=sizes, seed=st.integers(0, 2**32 - 1))
def test_dense_params_survive_the_round_trip(
    widths: list[int], features: int, classes: int, seed: int
) -> None:
    from models.zoo.tensorflow import twins  # takes seconds

    twin = twins.dense_stack([f"hidden.{i}" for i in range(len(widths))] + ["fc"])
    assert_round_trip(twin, MLP(features, widths, classes), seed)


def assert_round_trip(twin: twins.Twin, module: CNN | MLP, seed: int) -> None:
    params = noise_like({name: value.numpy() for name, value in module.state_dict().items()}, seed=seed)
    assert twin.names == tuple(params)
    for name, value in params.items():
        there = twin.to_tensorflow(name, value)
        back = twin.from_tensorflow(name, there)
        assert there.flags.c_contiguous and back.flags.c_contiguous
        assert back.shape == value.shape and back.tobytes() == value.tobytes()
        again = twin.to_tensorflow(name, back)
        assert again.shape == there.shape and again.tobytes() == there.tobytes()


@pytest.mark.slow
def test_every_element_goes_where_tensorflow_looks_for_it() -> None:
    from models.zoo.tensorflow import twins  # takes seconds

    twin = twins.small_cnn((2, 5, 3), (4, 6), hidden=7)
    kernel = np.arange(4 * 2 * 3 * 3).reshape(4, 2, 3, 3)
    behind_flatten = np.arange(7 * 6 * 3 * 2).reshape(7, 6 * 3 * 2)
    dense = np.arange(5 * 7).reshape(5, 7)

    placed_kernel = twin.to_tensorflow("conv1.weight", kernel)
    placed_behind = twin.to_tensorflow("hidden.weight", behind_flatten)

    assert placed_kernel.shape == (3, 3, 2, 4)
    assert placed_kernel[2, 0, 1, 3] == kernel[3, 1, 2, 0]
    assert placed_behind.shape == (3 * 2 * 6, 7)
    channel, row, column = 4, 2, 1
    assert (
        placed_behind[(row * 2 + column) * 6 + channel, 5]
        == behind_flatten[5, (channel * 3 + row) * 2 + column]
    )
    assert (twin.to_tensorflow("fc.weight", dense) == dense.T).all()
    assert (twin.to_tensorflow("fc.bias", dense[0]) == dense[0]).all()
