"""The configuration of a pretraining: defaults, and every mistake reported at once."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from coordinator.datacenter.pretrain_config import load, resolve
from coordinator.errors import UserError


def problems_of(document: dict[str, Any], plan: str = "") -> str:
    with pytest.raises(UserError) as error:
        resolve(document, "my.toml", plan)
    return str(error.value)


def test_nothing_given_is_digits_on_one_process() -> None:
    config = resolve({}, "defaults")
    assert (config.name, config.data.dataset, config.model.name) == ("digits", "digits", "cnn")
    assert config.parallel_plan.processes == 1
    assert config.train["batch_size"] == 32


def test_shakespeare_brings_its_own_model_and_length() -> None:
    config = resolve({"data": {"dataset": "shakespeare"}}, "x")
    assert (config.model.name, config.data.length) == ("gpt", 64)
    assert config.model.options["width"] == 128


def test_epochs_take_the_place_of_the_default_number_of_steps() -> None:
    config = resolve({"data": {"dataset": "shakespeare"}, "train": {"epochs": 3}}, "x")
    assert (config.train["steps"], config.train["epochs"]) == (0, 3)


def test_written_values_are_read_back_unchanged() -> None:
    config = resolve({"data": {"dataset": "shakespeare"}, "plan": {"zero": 2}}, "x", "dp=4,split=2+2,pp=2")
    assert config.plan["split"] == [2, 2]
    assert resolve(tomllib.loads(config.to_toml()), "again") == config


def test_the_command_line_goes_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[plan]\ndp = 2\nzero = 3\n[train]\nlr = 0.5\n")
    config = load(path, ["train.lr=0.1"], "dp=4")
    assert str(config.parallel_plan) == "dp=4,zero=3"
    assert config.train["lr"] == 0.1


def test_every_problem_is_reported_at_once_with_the_nearest_known_key() -> None:
    result = problems_of(
        {
            "data": {"dataset": "digitz", "length": 8},
            "model": {"name": "gptt"},
            "train": {"lrr": 1, "steps": -1, "decay": "none"},
        },
        "zerro=2",
    )
    assert result.startswith("my.toml: 7 problems")
    for words in (
        "'digitz' is unknown, did you mean 'digits'",
        "data.length = 8 is for shakespeare",
        "model.name = 'gptt' is unknown, did you mean 'gpt'",
        "unknown key 'lrr', did you mean 'lr'",
        "train.steps is -1, expected a whole number from 0",
        "train.decay is 'none', expected one of 'constant'",
        "unknown key 'zerro', did you mean 'zero'",
    ):
        assert words in result


def test_problems_of_several_keys_are_reported_beside_those_of_one() -> None:
    result = problems_of({"seed": -1, "data": {"length": 8}, "model": {"head": "new"}})
    assert result.startswith("my.toml: 3 problems")
    for words in ("seed = -1", "data.length = 8 is for", "model.head selects what to use of model.init"):
        assert words in result


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"modl": {}}, "modl is not a known key, did you mean 'model'"),
        ({"checkpoint": {"evry": 1}}, "checkpoint.evry is not a known key, did you mean 'every'"),
        ({"checkpoint": {"every": "often"}}, "checkpoint.every = 'often'"),
        ({"model": {"name": "gpt", "width": "wide"}}, "model.width = 'wide'"),
        ({"model": {"name": "gpt", "with": 3}}, "model.with is not an option of gpt, did you mean 'width'"),
        ({"model": {"head": "new"}}, "model.head selects what to use of model.init, which is missing"),
        ({"data": {"dataset": "csv"}}, "needs data.path"),
        ({"data": {"dataset": "text"}}, "data.dataset = 'text' needs data.path"),
        ({"data": {"dataset": "shakespeare", "encoding": "bpe"}}, "data.encoding = 'bpe'"),
        ({"data": {"encoding": "bytes"}}, "data.encoding = 'bytes' is for csv and shakespeare and text"),
        ({"server": {"wrkers": 2}}, "unknown key 'wrkers', did you mean 'workers'"),
        ({"server": {}, "plan": {"dp": 2}}, "server and plan are both given"),
        ({"server": {"mode": "k-of-n", "keep": 9}}, "server: keep is 9, expected 1 to 2, the workers"),
        ({"plan": {"dp": 0}}, "dp is 0, expected a whole number from 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(document: dict[str, Any], message: str) -> None:
    assert message in problems_of(document)


def test_options_follow_the_batch_where_scaling_says_what_they_are_right_for() -> None:
    document = {"train": {"batch_size": 128, "lr": 0.01, "steps": 400, "optimizer": "sgd"}}
    plain = resolve(document, "x").options(1000)
    assert (plain.lr, plain.steps, plain.warmup) == (0.01, 400, 0)
    config = resolve({**document, "scaling": {"base_batch_size": 32}}, "x")
    scaled = config.options(1000)
    assert (scaled.lr, scaled.steps, scaled.warmup) == (pytest.approx(0.04), 100, 10)
    root = resolve({**document, "scaling": {"base_batch_size": 32, "rule": "sqrt"}}, "x")
    assert root.options(1000).lr == pytest.approx(0.02)
    # what is written down is what was asked, so that going on scales no second time
    again = resolve(tomllib.loads(config.to_toml()), "x")
    assert again.options(1000) == scaled


def test_the_planner_keeps_what_is_named_but_degrees_of_one() -> None:
    named = {"dp": 2, "tp": 1, "zero": 1, "sync_every": 1}
    assert resolve({"plan": named}, "x").fixed_plan == {"dp": 2, "zero": 1, "sync_every": 1}
    assert resolve({}, "x").fixed_plan == {}
