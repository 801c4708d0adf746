"""The table `[privacy]`: what it accepts, completes and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.errors import UserError
from coordinator.experiments import experiment
from coordinator.toml_files import parse_toml


def refused(*sets: str) -> str:
    with pytest.raises(UserError) as caught:
        experiment.load(None, sets)
    return str(caught.value)


def test_an_experiment_without_privacy_has_no_such_table() -> None:
    assert "privacy" not in experiment.load(None).to_toml()


CENTRAL = ("privacy.mechanism=central", "privacy.clip_norm=0.5", "privacy.noise_multiplier=1")


def test_a_mechanism_completes_what_depends_on_it() -> None:
    loaded = experiment.load(None, [*CENTRAL, "privacy.clipping=adaptive"])
    table = loaded.privacy
    assert (table.delta, table.sampling, table.accountant, table.budget) == (1e-5, "poisson", "pld", None)
    assert (table.clip_quantile, table.clip_learning_rate) == (0.5, 0.2)
    assert loaded.strategy.options["weighting"] == "uniform" and loaded.federation.outlier_factor == 0


def test_a_target_epsilon_is_the_budget_too() -> None:
    table = experiment.load(None, [*CENTRAL[:2], "privacy.epsilon=8", "privacy.sampling=fixed"]).privacy
    assert (table.budget, table.accountant) == (8, "rdp")


def test_a_resolved_table_is_read_again_as_it_is() -> None:
    loaded = experiment.load(None, [*CENTRAL, "privacy.clipping=adaptive"])
    assert experiment.resolve(parse_toml(loaded.to_toml(), "again"), "again") == loaded


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["privacy.clip_norm=1"], "privacy.clip_norm = 1.0 is about differential privacy; set privacy.mechanism too"),
        (["privacy.mechanism=secret"], "privacy.mechanism = 'secret'"),
        (["privacy.clipnorm=1"], "privacy.clipnorm is not a known key, did you mean 'clip_norm'?"),
        (["privacy.mechanism=central"], "privacy.clip_norm is missing"),
        (["privacy.mechanism=central"], "privacy.noise_multiplier and privacy.epsilon are both missing"),
        ([*CENTRAL, "privacy.epsilon=8"], "privacy.noise_multiplier = 1 and privacy.epsilon = 8 are both set"),
        ([*CENTRAL, "privacy.clip_quantile=0.3"], "privacy.clip_quantile = 0.3 is for privacy.clipping = \"adaptive\""),
        ([*CENTRAL, "privacy.sampling=fixed", "privacy.accountant=pld"], "privacy.accountant = \"pld\" does not go with"),
        ([*CENTRAL[:2], "privacy.epsilon=8", "privacy.budget=4"], "privacy.budget = 4 is less than privacy.epsilon = 8"),
        ([*CENTRAL, "federation.mode=async"], "federation.mode = 'async' does not go with privacy.mechanism = 'central'"),
        ([*CENTRAL, "federation.relays=2"], "federation.relays = 2 does not go with"),
        ([*CENTRAL, "federation.over_select=1.5"], "federation.over_select = 1.5 does not go with"),
        ([*CENTRAL, "federation.min_updates=2"], "federation.min_updates = 2 does not go with"),
        ([*CENTRAL, "federation.outlier_factor=100"], "federation.outlier_factor = 100.0 does not go with"),
        ([*CENTRAL, "federation.keep=best"], "federation.keep = 'best' does not go with"),
        ([*CENTRAL, "federation.early_stop=3"], "federation.early_stop = 3 does not go with"),
        ([*CENTRAL, "simulation.attack={ name = 'alie', clients = 2 }"], "simulation.attack.name = 'alie' does not go with"),
        ([*CENTRAL, "strategy.weighting=examples"], "strategy.weighting = 'examples' does not go with"),
        ([*CENTRAL, "strategy.clip_norm=1"], "strategy.clip_norm = 1 and privacy.clip_norm both clip updates"),
        ([*CENTRAL, "strategy.name=median"], "it compares or scales single updates"),
        ([*CENTRAL, "strategy.name=fednova"], "it compares or scales single updates"),
        ([*CENTRAL, "strategy.name=scaffold"], "its clients keep or send more than an update"),
        ([*CENTRAL, "strategy.name=my.code:Mean"], "a strategy of your own gets every update"),
        ([*CENTRAL, "uplink.code=topk"], "uplink.code = 'topk' does not go with"),
        ([*CENTRAL, "privacy.sampling=fixed", "simulation.availability=0.5"], "simulation.availability = '0.5' does not go with"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(settings: list[str], words: str) -> None:
    assert words in refused(*settings)


def of_devices(*settings: str) -> tuple[Any, list[str]]:
    document = experiment.apply_settings({}, [*CENTRAL, *settings])
    return experiment.check(document, "devices")


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["privacy.clipping=adaptive"],
        ["privacy.sampling=poisson"],
        [
            "privacy.mechanism=ftrl",
            "privacy.minimum_separation=40",
        ],  # nobody knows how many devices there will be
    ],
)
def test_on_devices_nothing_is_claimed_of_how_rounds_get_them_unless_it_is_asked_for(
    settings: list[str],
) -> None:
    found, problems = of_devices(*settings)
    assert problems == []
    assert found.privacy.sampling == ("poisson" if "privacy.sampling=poisson" in settings else "none")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["privacy.sampling=fixed"], 'privacy.sampling = "fixed" cannot be claimed of devices'),
        (["federation.mode=async"], "federation.mode = 'async' does not go with"),
        (["federation.relays=2"], "federation.relays = 2 does not go with"),
        (["federation.over_select=1.5"], "federation.over_select = 1.5 does not go with"),
        (["federation.min_updates=2"], "federation.min_updates = 2 does not go with"),
        (["federation.outlier_factor=100"], "federation.outlier_factor = 100.0 does not go with"),
        (["federation.keep=best"], "federation.keep = 'best' does not go with"),
        (["federation.early_stop=3"], "federation.early_stop = 3 does not go with"),
        (["strategy.name=heterofl", "strategy.memory_mib={ full = 900, half = 0 }"], "strategy.name = 'heterofl' does not go with"),
        (["strategy.name=fedper"], "strategy.name = 'fedper' does not go with"),
        (["strategy.name=ditto"], "strategy.name = 'ditto' does not go with"),
        (["strategy.name=fedbuff"], "federation.mode = 'async' does not go with"),
        (["strategy.name=krum"], "it compares or scales single updates"),
        (["strategy.name=my.code:Mean"], "a strategy of your own gets every update"),
        (["uplink.code=topk"], "uplink.code = 'topk' does not go with"),
        (["strategy.clip_norm=1"], "strategy.clip_norm = 1 and privacy.clip_norm both clip updates"),
    ],
)  # fmt: skip
def test_what_is_unsound_on_devices_is_refused(settings: list[str], words: str) -> None:
    _, problems = of_devices(*settings)
    assert any(words in each for each in problems), problems


@pytest.mark.parametrize("mechanism", ["local", "distributed", "example"])
def test_devices_may_add_the_noise_in_any_number(mechanism: str) -> None:
    table: dict[str, Any] = {"mechanism": mechanism, "clip_norm": 0.5, "noise_multiplier": 1.0}
    table |= {"minimum_separation": 100, "secure_aggregation": mechanism == "distributed"}
    document = {"privacy": table, "federation": {"clients": 20, "runtimes": {"torch": 1}}}
    _, problems = experiment.check(document, "devices")
    assert not problems


def test_more_rounds_for_a_target_epsilon_are_refused_on_resume() -> None:
    before = experiment.load(None, [*CENTRAL[:2], "privacy.epsilon=8"])
    with pytest.raises(UserError, match=r"federation\.rounds was 30, requested is 40"):
        experiment.change(before, "run", ["federation.rounds=40"])
