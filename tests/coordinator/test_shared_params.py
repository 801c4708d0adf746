"""Params in shared memory: what is read is what was written, and nobody can change or shorten it."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from coordinator.workers import shared_params
from edge_client.wire import arrays
from strategies.params import Params

tensors = st.dictionaries(
    st.text(min_size=1, max_size=9),
    npst.arrays(np.float32, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)),
    max_size=4,
)


@given(tensors)
def test_reading_returns_what_was_written(params: Params) -> None:
    descriptor, published = shared_params.write(params)
    try:
        got = shared_params.read(descriptor)
    finally:
        os.close(descriptor)
    assert list(got) == sorted(params)
    assert all(got[name].shape == value.shape for name, value in params.items())
    assert all(got[name].tobytes() == value.tobytes() for name, value in params.items())
    encoded = arrays.encode(params)
    assert (published.sha256, published.size_bytes) == (arrays.sha256(encoded), len(encoded))


def test_readers_cannot_change_it_and_nobody_can_shorten_it() -> None:
    descriptor, _ = shared_params.write({"w": np.ones(3, np.float32)})
    try:
        got = shared_params.read(descriptor)
        with pytest.raises(ValueError, match="read-only"):
            got["w"][0] = 2
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
