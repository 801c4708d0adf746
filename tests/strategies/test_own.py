"""A strategy of one's own: what its function receives, and what its base still does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from strategies import own, presets
from strategies.params import Params, Tensors
from strategies.update import Update

PARAMS: Params = {"w": np.zeros(3, np.float32)}


def median(updates: Sequence[Update]) -> Tensors:
    return {name: np.median([each.delta[name] for each in updates], axis=0) for name in updates[0].delta}


def update(*values: float, examples: int = 1) -> Update:
    return Update({"w": np.array(values, np.float32)}, examples, 1, 1.0)


def test_the_median_ignores_one_liar_and_no_weight_counts() -> None:
    strategy = own.compose("mine:Median", presets.get("fedavg"), median)
    fold = strategy.start(3)
    for position, each in enumerate((update(1, 2, 3), update(1, 2, 4), update(-9, 9e9, 0, examples=1000))):
        fold.add(position, strategy.transform(each))
    aggregate = fold.finish()
    moved, _ = strategy.apply(PARAMS, strategy.init(PARAMS, ["w"]), aggregate, 3)
    assert np.asarray(moved["w"]).tolist() == [1, 2, 3]
    assert (aggregate.num_updates, aggregate.num_examples) == (3, 1002)


def test_updates_come_in_canonical_order_whatever_their_arrival() -> None:
    seen: list[float] = []

    def look(updates: Sequence[Update]) -> Tensors:
        seen.extend(float(each.delta["w"][0]) for each in updates)
        return updates[0].delta

    fold = own.compose("mine:Look", presets.get("fedavg"), look).start(4)
    for position in (2, 0, 3):
        fold.add(position, update(position, 0, 0))
    fold.finish()
    assert seen == [0, 2, 3]


def test_the_base_clips_moves_and_tells_clients_how_to_train() -> None:
    base = presets.get("fedprox", mu=0.5, server_lr=0.5, clip_norm=1.0)
    strategy = own.compose("mine:Median", base, median)
    assert strategy.client_rule == presets.get("fedprox", mu=0.5).client_rule
    fold = strategy.start(1)
    fold.add(0, strategy.transform(update(3, 0, 4)))
    moved, _ = strategy.apply(PARAMS, strategy.init(PARAMS, ["w"]), fold.finish(), 1)
    np.testing.assert_allclose(np.asarray(moved["w"]), [0.3, 0, 0.4], rtol=1e-6)


def test_streams_of_the_clients_rule_are_still_averaged() -> None:
    strategy = own.compose("mine:Median", presets.get("scaffold"), median)
    fold = strategy.start(2)
    for position, value in enumerate((1.0, 3.0)):
        control = {"control": {"w": np.full(3, value, np.float32)}}
        fold.add(position, Update(PARAMS, 1, 1, 1.0, control))
    assert fold.finish().extras["control"]["w"].tolist() == [2, 2, 2]


def test_a_position_counts_once_and_a_cohort_without_updates_has_no_aggregate() -> None:
    fold = own.compose("mine:Median", presets.get("fedavg"), median).start(2)
    with pytest.raises(ValueError, match="no update"):
        own.compose("mine:Median", presets.get("fedavg"), median).start(2).finish()
    fold.add(0, update(1, 2, 3))
    with pytest.raises(ValueError, match="already"):
        fold.add(0, update(1, 2, 3))
