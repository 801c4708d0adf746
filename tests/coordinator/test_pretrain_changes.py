"""What may be another when a pretraining goes on, and what is refused by name."""

from __future__ import annotations

import pytest

from coordinator.datacenter.pretrain_config import change, resolve
from coordinator.errors import UserError

BEGUN = resolve({"data": {"dataset": "shakespeare"}, "train": {"steps": 40}}, "x", "tp=2,pp=2").model_dump(
    exclude_none=True
)


def test_a_plan_takes_the_place_of_the_old_one_and_other_steps_that_of_theirs() -> None:
    after, lines = change(BEGUN, "config.toml", ["train.steps=80", "checkpoint.every=7"], "dp=3,zero=1")
    assert str(after.parallel_plan) == "dp=3,zero=1"
    assert (after.train["steps"], after.checkpoint.every) == (80, 7)
    assert sorted(lines) == [
        "checkpoint.every: 50 -> 7",
        "plan: tp=2,pp=2 -> dp=3,zero=1",
        "train.steps: 40 -> 80",
    ]


def test_a_key_of_the_plan_changes_alone() -> None:
    after, _ = change(BEGUN, "config.toml", ["plan.tp=1"], "")
    assert str(after.parallel_plan) == "pp=2"


def test_requested_epochs_replace_steps() -> None:
    assert change(BEGUN, "config.toml", ["train.epochs=3"], "")[0].train["steps"] == 0


def test_an_empty_request_changes_nothing() -> None:
    after, lines = change(BEGUN, "config.toml", ["train.batch_size=32"], "")  # as it was
    assert not lines
    assert after == resolve(BEGUN, "x")


def test_changes_of_keys_that_decide_batches_and_params_are_refused_all_at_once() -> None:
    sets = ["train.batch_size=8", "seed=1", "model.width=32", "data.length=9", "train.optimizer=sgd"]
    with pytest.raises(UserError) as refused:
        change(BEGUN, "config.toml", sets, "")
    for words in (
        "train.batch_size was 32, requested is 8",
        "seed was 7, requested is 1",
        "model.width was 128, requested is 32",
        "data.length was 64, requested is 9",
        "train.optimizer was 'adamw', requested is 'sgd'",
        "start again with another --out",
    ):
        assert words in str(refused.value)
