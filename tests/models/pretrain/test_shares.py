"""Unequal shares of a batch: the same training whoever computes what, and shares that follow speeds."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.pretrain.parallel.data import shares
from tests.models.pretrain.curves import Case
from tests.support import ranks

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


HERE = "tests.models.pretrain.test_shares"
CURVES = "tests.models.pretrain.curves:curves"
SPEEDS = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


@given(speeds=SPEEDS, more=st.integers(0, 8))
def test_no_other_shares_are_faster(speeds: list[float], more: int) -> None:
    rows = len(speeds) + more
    found = shares.fastest(speeds, rows)
    assert sum(found) == rows
    assert min(found) >= 1
    others = (
        other for other in itertools.product(range(1, rows + 1), repeat=len(speeds)) if sum(other) == rows
    )
    assert shares.seconds(found, speeds) <= min(shares.seconds(other, speeds) for other in others) * (
        1 + 1e-12
    )


@given(speeds=SPEEDS, rows=st.integers(4, 200), scale=st.floats(0.5, 2))
def test_only_relative_speeds_matter_and_faster_takes_more(
    speeds: list[float], rows: int, scale: float
) -> None:
    found = shares.fastest(speeds, rows)
    for (one, share), (other, least) in itertools.combinations(zip(speeds, found, strict=True), 2):
        assert (one <= other and share <= least + 1) or (one >= other and share + 1 >= least)
    # powers of two are exact
    assert shares.fastest([speed * 2.0 ** round(scale) for speed in speeds], rows) == found


@given(speeds=SPEEDS, rows=st.integers(4, 200))
def test_the_fastest_stays(speeds: list[float], rows: int) -> None:
    best = shares.fastest(speeds, rows)
    assert shares.rebalanced(best, speeds, rows) == best


@given(speeds=SPEEDS, rows=st.integers(4, 200))
def test_a_small_gain_changes_nothing(speeds: list[float], rows: int) -> None:
    equal = (1,) * len(speeds)
    found = shares.rebalanced(equal, speeds, rows)
    now = shares.seconds([rows / len(speeds)] * len(speeds), speeds)
    gain = now / shares.seconds(shares.fastest(speeds, rows), speeds)
    assert (found == equal) == (gain <= shares.GAIN)


@given(old=st.floats(0.1, 10), new=st.floats(0.1, 10))
def test_smoothing_lies_between_and_begins_with_what_is_measured(old: float, new: float) -> None:
    assert shares.smoothed((), (new,)) == (new,)
    (found,) = shares.smoothed((old,), (new,))
    assert min(old, new) * (1 - 1e-12) <= found <= max(old, new) * (1 + 1e-12)


def test_unequal_shares_train_the_same() -> None:
    alone = ranks.run(1, CURVES, [Case("dp=1")])[0][0]
    cases = [
        Case(f"dp=2,{rest}")
        for rest in (
            "batch_shares=3+1",
            "batch_shares=1+7",
            "batch_shares=1+100",
            "batch_shares=3+1,microbatches=2",
            "batch_shares=3+1,zero=1",
            "batch_shares=1+3,zero=3",
        )
    ]
    for case, found in zip(cases, ranks.run(2, CURVES, cases)[0], strict=True):
        np.testing.assert_allclose(found, alone, atol=1e-5, err_msg=case.plan)


def test_shares_follow_speeds_and_the_training_stays_the_same() -> None:
    alone = ranks.run(1, CURVES, [Case("dp=1", options={"steps": 12})])[0][0]
    first, second = ranks.run(2, f"{HERE}:followed")
    assert first == second
    rows, losses = first
    np.testing.assert_allclose(losses, alone, atol=1e-5)
    # one takes 3 s a row and the other 1; from step 6 on it is the other way round
    assert rows[:2] == [(1, 1), (1, 1)]
    assert rows[2:6] == [(2, 6)] * 4
    assert rows[-1] == (5, 3) or rows[-1] == (6, 2)


def test_a_sleeping_worker_is_given_less() -> None:
    for rows in ranks.run(2, f"{HERE}:one_sleeps"):
        assert rows[0] > rows[1]


# what the processes run


@dataclass
class Work:
    """A clock that only work on rows moves on."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def followed() -> tuple[list[tuple[int, ...]], list[float]]:
    """Shares before every step, and losses."""
    from models.pretrain import plan as plans
    from models.pretrain import trainer, world
    from tests.models.pretrain.curves import settings, small_gpt, tokens

    clock = Work()
    with world.join(plans.parse("dp=2,rebalance=2")) as here:
        training = trainer.build(small_gpt(), tokens(), settings(steps=12), here, seed=5, clock=clock)

        def work(_: Any, inputs: tuple[Any, ...]) -> None:
            slow = here.rank == (0 if training.step < 6 else 1)
            clock.now += len(inputs[0]) * (3 if slow else 1)

        training.parallel.parts[0].register_forward_pre_hook(work)
        rows = []
        for _ in range(12):
            rows.append(training.batches.share.rows)
            training.train_step()
        return rows, training.losses()


def one_sleeps() -> tuple[int, ...]:
    """Shares after four steps in which the second process sleeps for every row."""
    from models.pretrain import plan as plans
    from models.pretrain import trainer, world
    from tests.models.pretrain.curves import settings, small_gpt, tokens

    with world.join(plans.parse("dp=2,rebalance=2")) as here:
        training = trainer.build(small_gpt(), tokens(), settings(), here, seed=5)
        if here.rank == 1:
            training.parallel.parts[0].register_forward_pre_hook(
                lambda _, inputs: time.sleep(0.05 * len(inputs[0]))
            )
        for _ in range(4):
            training.train_step()
        return training.batches.share.rows
