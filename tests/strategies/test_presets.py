"""Strategies by name: defaults build, ranges hold, mistakes are named."""

from __future__ import annotations

import math

import pytest

from strategies import presets
from strategies.client_rules import ControlVariates, Proximal
from strategies.presets import OPTIONS, OptionError
from strategies.strategy import Adaptive, WeightedMean

NUMERIC = [
    (name, key)
    for name, options in OPTIONS.items()
    for key, option in options.items()
    if isinstance(option.default, float) or option.is_integer
]


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_preset_builds_with_its_defaults(name: str) -> None:
    strategy = presets.get(name)
    assert strategy.name == name
    assert strategy == presets.get(name, **{key: option.default for key, option in OPTIONS[name].items()})
    assert all(option.accepts(option.default) and option.meaning for option in OPTIONS[name].values())


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("fedavgg", "fedavg"), ("FedAdam", "fedadam"), ("scafold", "scaffold")]
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(
        OptionError, match=f"'{wrong}' is unknown, did you mean '{nearest}'\\?; known: fedavg"
    ) as caught:
        presets.get(wrong)
    assert caught.value.option is None


def test_a_name_like_no_other_is_answered_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="'xyz' is unknown; known: fedavg, fedavgm"):
        presets.get("xyz")


def test_an_unknown_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="fedprox has no option 'muu', did you mean 'mu'") as caught:
        presets.get("fedprox", muu=0.1)
    assert caught.value.option == "muu"


def test_an_option_of_another_preset_is_unknown_here() -> None:
    with pytest.raises(
        OptionError, match="fedavg has no option 'mu'; known: server_lr, weighting, clip_norm"
    ):
        presets.get("fedavg", mu=0.1)
    with pytest.raises(OptionError, match="fedadagrad has no option 'beta2'"):
        presets.get("fedadagrad", beta2=0.9)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("fedavg", {"server_lr": 0}, "server_lr = 0 is not allowed for fedavg: expected > 0"),
        ("fedprox", {"mu": -0.1}, "mu = -0.1 is not allowed for fedprox: expected >= 0"),
        ("fedavgm", {"momentum": 1.0}, "momentum = 1.0 is not allowed for fedavgm: expected >= 0 and < 1"),
        ("fedadam", {"beta2": 1.5}, "beta2 = 1.5 is not allowed for fedadam: expected >= 0 and < 1"),
        ("fedadam", {"tau": "small"}, "tau = 'small' is not allowed for fedadam: expected > 0"),
        ("fedadam", {"flower_form": 1}, "flower_form = 1 is not allowed for fedadam: expected true or false"),
        (
            "fedavg",
            {"weighting": "rows"},
            "weighting = 'rows' is not allowed for fedavg: expected one of examples, uniform",
        ),
        ("fedavg", {"clip_norm": [1]}, r"clip_norm = \[1\] is not allowed for fedavg: expected >= 0"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(
    name: str, options: dict[str, object], expected: str
) -> None:
    with pytest.raises(OptionError, match=expected) as caught:
        presets.get(name, **options)
    assert [caught.value.option] == list(options)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, True, None, "1", -1e-300])
@pytest.mark.parametrize(("name", "key"), NUMERIC)
def test_no_number_may_be_infinite_or_something_else(name: str, key: str, value: object) -> None:
    with pytest.raises(OptionError):
        presets.get(name, **{key: value})


@pytest.mark.parametrize(("name", "key"), NUMERIC)
def test_ends_of_a_range_belong_to_it_unless_open(name: str, key: str) -> None:
    option = OPTIONS[name][key]
    assert option.accepts(option.low) != option.low_open
    if math.isfinite(option.high):
        assert option.accepts(option.high) != option.high_open


def test_options_reach_the_parts_they_are_for() -> None:
    strategy = presets.get("fedprox", mu=1, weighting="uniform")
    assert strategy.client_rule == Proximal(mu=1.0)
    assert isinstance(strategy.client_rule.mu, float)
    assert strategy.aggregator == WeightedMean("uniform")
    assert presets.get("scaffold").client_rule == ControlVariates()
    assert presets.get("scaffold").aggregator == WeightedMean("uniform")
    assert presets.get("fedadagrad").server_optimizer.beta1 == 0.0
    assert presets.get("fedyogi", beta1=0.5, beta2=0.75, tau=2).server_optimizer == Adaptive(
        "yogi", server_lr=0.03, beta1=0.5, beta2=0.75, tau=2.0
    )
