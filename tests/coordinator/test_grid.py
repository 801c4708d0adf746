"""A grid of experiments: all combinations, refused before any runs."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.errors import UserError
from coordinator.experiments.grid import Axis, Combination, expand, parse_axes


def grid(*over: str, seeds: int = 1, document: dict[str, Any] | None = None) -> list[Combination]:
    return expand(document or {}, parse_axes(over), seeds, "my.toml")


def test_commas_in_brackets_and_quotes_do_not_part_values() -> None:
    over = ["model.hidden=[64],[32, 32]", 'name="a,b",c', "data.partition=iid,dirichlet(0.3)"]
    assert parse_axes(over) == [
        Axis("model.hidden", ("[64]", "[32, 32]")),
        Axis("name", ('"a,b"', "c")),
        Axis("data.partition", ("iid", "dirichlet(0.3)")),
    ]


def test_every_combination_has_every_seed() -> None:
    combinations = grid("strategy.name=fedavg,fedadam,scaffold", "local.lr=0.02,0.05", seeds=3)
    assert [each.label for each in combinations] == [
        f"strategy.name={name} local.lr={lr}"
        for name in ("fedavg", "fedadam", "scaffold")
        for lr in ("0.02", "0.05")
    ]
    for each in combinations:
        assert [one.seed for one in each.experiments] == [7, 8, 9]
        assert {one.data_seed for one in each.experiments} == {7}
        assert {one.strategy.name for one in each.experiments} == {each.values["strategy.name"]}
        assert {one.local.lr for one in each.experiments} == {float(each.values["local.lr"])}


def test_a_table_is_a_value() -> None:
    combinations = grid('strategy={name="fedavg"},{name="fedprox",mu=0.1}')
    assert [each.experiments[0].strategy.options.get("mu") for each in combinations] == [None, 0.1]


def test_without_axes_there_is_one_combination() -> None:
    (only,) = grid(seeds=2, document={"seed": 3})
    assert [each.seed for each in only.experiments] == [3, 4]


@pytest.mark.parametrize(
    ("over", "named"),
    [
        (["local.lr"], "KEY=VALUE,VALUE"),
        (["local.lr=0.1,"], "KEY=VALUE,VALUE"),
        (["local.lr=0.1,0.1"], "a value is there twice"),
        (["local.lr=0.1", "local.lr=0.2"], "local.lr has values already"),
        (["seed=1,2"], "--seeds"),
        (["model.hidden=[64"], "has no partner"),
        (["local.lr=0.1,1e-1"], "are the same experiment"),
    ],
)
def test_a_wrong_axis_is_refused(over: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        grid(*over)


def test_a_refused_combination_is_named() -> None:
    with pytest.raises(UserError) as refused:
        grid("strategy.name=fedavg,fedadan", "local.lr=0.1,0.2")
    assert str(refused.value).startswith(
        "my.toml, with strategy.name=fedadan local.lr=0.1; strategy.name=fedadan local.lr=0.2: strategy.name: "
    )


def test_a_problem_everywhere_is_reported_once() -> None:
    with pytest.raises(UserError) as refused:
        grid("local.lr=0.1,0.2", document={"federation": {"round": 3}})
    assert str(refused.value).count("federation.round") == 1
