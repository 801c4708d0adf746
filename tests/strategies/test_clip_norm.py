"""Clipping shortens what is too long and touches nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from strategies import presets
from strategies.strategy import ClipNorm
from strategies.update import Update

# Zero or clear of float32's subnormal range, where relative rounding bounds do not hold.
elements = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20)
vectors = st.lists(elements, min_size=2, max_size=12)
bounds = st.floats(1e-3, 1e3)

ROUNDING = (1 + 2**-24) ** 2
"""The factor is rounded to float32, then every product: each by 2^-24 at most."""


def update_of(values: list[float]) -> Update:
    delta = {"a": np.array(values[:1], np.float32), "b": np.array(values[1:], np.float32)}
    control = {"control": {"a": np.full(1, 1e9, np.float32)}}
    return Update(delta, num_examples=3, num_steps=2, train_loss=0.5, extras=control)


def clip(bound: float, update: Update) -> Update:
    clipped, kept = ClipNorm(bound).apply(update, {})
    assert kept == {}
    return clipped


def flat(update: Update) -> np.ndarray:
    return np.concatenate(list(update.delta.values())).astype(np.float64)


@given(values=vectors, bound=bounds)
def test_the_norm_is_at_most_the_bound(values: list[float], bound: float) -> None:
    assert np.linalg.norm(flat(clip(bound, update_of(values)))) <= bound * ROUNDING * (1 + 1e-14)


@given(values=vectors, fraction=st.floats(1e-4, 0.999))
def test_a_long_update_keeps_its_direction_and_gets_the_bounds_length(
    values: list[float], fraction: float
) -> None:
    before = flat(update_of(values))
    bound = float(np.linalg.norm(before)) * fraction
    assume(bound > 0)
    np.testing.assert_allclose(
        flat(clip(bound, update_of(values))), before * fraction, rtol=2**-22, atol=1e-38
    )


@given(values=vectors, slack=st.floats(1.001, 1e6))
def test_a_short_update_is_not_touched(values: list[float], slack: float) -> None:
    update = update_of(values)
    bound = float(np.linalg.norm(flat(update))) * slack
    assert clip(bound or slack, update) is update


def test_only_the_delta_is_clipped() -> None:
    clipped = clip(1.0, update_of([3.0, 4.0]))
    np.testing.assert_allclose(flat(clipped), [0.6, 0.8], rtol=1e-6)
    assert clipped.extras["control"]["a"] == np.float32(1e9)
    assert (clipped.num_examples, clipped.num_steps, clipped.train_loss) == (3, 2, 0.5)


def test_a_preset_clips_only_on_request() -> None:
    update = update_of([30.0, 40.0])
    assert presets.get("fedavg").transform(update) is update
    np.testing.assert_allclose(
        flat(presets.get("fedavg", clip_norm=5).transform(update)), [3.0, 4.0], rtol=1e-6
    )
