"""Keys of asynchronous runs: what sets the mode, their defaults, and combinations that are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.errors import UserError
from coordinator.experiments.experiment import resolve
from coordinator.runs.model_setup import make_run_plan
from coordinator.toml_files import parse_toml
from strategies import presets
from strategies.own import compose
from strategies.staleness import Polynomial


def federation(**tables: Any) -> Any:
    return resolve(tables, "test").federation


def test_a_strategy_sets_its_mode_and_a_mode_its_keys() -> None:
    plain = federation()
    assert (plain.mode, plain.buffer, plain.concurrency, plain.staleness) == ("sync", None, None, None)
    buffered = federation(strategy={"name": "fedbuff"}, federation={"clients_per_round": 4})
    assert (buffered.mode, buffered.buffer, buffered.concurrency) == ("async", 2, 4)
    assert (buffered.staleness, buffered.max_staleness) == ("polynomial(0.5)", None)
    assert (
        federation(strategy={"name": "fedadam"}, federation={"mode": "async", "concurrency": 7}).buffer == 3
    )


def test_a_resolved_asynchronous_experiment_resolves_to_itself() -> None:
    experiment = resolve({"strategy": {"name": "fedbuff"}, "federation": {"buffer": 3}}, "test")
    assert resolve(parse_toml(experiment.to_toml(), "stored"), "stored") == experiment


def test_the_plan_has_what_the_keys_say() -> None:
    experiment = resolve(
        {"strategy": {"name": "fedbuff"}, "federation": {"buffer": 3, "concurrency": 7, "max_staleness": 5}},
        "test",
    )
    plan = make_run_plan(experiment, presets.get("fedbuff"), ("w",), 10)
    assert plan.closing.wanted == 3
    assert plan.asynchrony is not None
    assert (plan.asynchrony.concurrency, plan.asynchrony.max_staleness) == (7, 5)
    assert plan.asynchrony.staleness == Polynomial(0.5)


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"strategy": {"name": "scaffold"}, "federation": {"mode": "async"}}, ["federation.mode", "start from the same model"]),
        ({"strategy": {"name": "fedbuff"}, "federation": {"mode": "sync"}}, ["federation.mode", "does not wait"]),
        ({"federation": {"buffer": 5}}, ["federation.buffer = 5", 'federation.mode = "async"']),
        ({"federation": {"max_staleness": 5}}, ["federation.max_staleness = 5", 'federation.mode = "async"']),
        ({"federation": {"mode": "async", "over_select": 1.5}}, ["federation.over_select = 1.5", "federation.concurrency"]),
        ({"federation": {"mode": "async", "staleness": "exp(2)"}}, ["federation.staleness", "expected constant"]),
        ({"federation": {"mode": "async", "buffer": 30}}, ["federation.buffer = 30", "expected 1 to 20"]),
        ({"federation": {"mode": "async", "concurrency": 30}}, ["federation.concurrency = 30", "expected 1 to 20"]),
        ({"federation": {"mode": "async", "buffer": 3, "min_updates": 4}}, ["federation.min_updates = 4", "federation.buffer = 3"]),
        ({"federation": {"mode": "maybe"}}, ["federation.mode = 'maybe'", "'sync' or 'async'"]),
    ],
)  # fmt: skip
def test_contradictory_options_are_refused_with_the_reason(
    tables: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        resolve(tables, "test")
    assert "problems" not in str(refused.value)  # one mistake, one problem
    for words in expected:
        assert words in str(refused.value)


def test_a_strategy_of_ones_own_on_scaffold_is_refused_once_its_base_is_known() -> None:
    experiment = resolve({"strategy": {"name": "mine:Median"}, "federation": {"mode": "async"}}, "test")
    own = compose("mine:Median", presets.get("scaffold"), lambda updates: updates[0].delta)
    with pytest.raises(UserError, match="start from the same model"):
        make_run_plan(experiment, own, ("w",), 10)
