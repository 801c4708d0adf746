"""Named strategies: compositions under the names the field uses.

`get("fedadam", server_lr=0.03)` checks names and ranges; the coordinator shows `OPTIONS` as a schema.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strategies.aggregators import WeightedMean
from strategies.client_rules import ControlVariates, PlainSGD, Proximal
from strategies.server_optimizers import SGD, Adaptive, AdaptiveKind
from strategies.strategy import ClipNorm, Strategy


class OptionError(ValueError):
    """A strategy's name or option is wrong. `option` is the key, or None when the name itself is unknown."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True)
class Option:
    """One option: its default, what it means and what it may be."""

    default: float | str | bool
    meaning: str
    low: float = float("-inf")
    high: float = float("inf")
    low_open: bool = False
    high_open: bool = False
    choices: tuple[str, ...] = ()

    def allowed(self) -> str:
        """The permitted values in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if isinstance(self.default, bool):
            return "true or false"
        left = f"{'>' if self.low_open else '>='} {self.low:g}"
        return (
            left
            if self.high == float("inf")
            else f"{left} and {'<' if self.high_open else '<='} {self.high:g}"
        )

    def accepts(self, value: object) -> bool:
        if self.choices:
            return value in self.choices
        if isinstance(self.default, bool) or isinstance(value, bool):
            return isinstance(value, bool) and isinstance(self.default, bool)
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            return False
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def taken(self, value: Any) -> float | str | bool:
        """An accepted value in the option's own type: `1` for a number is 1.0."""
        return float(value) if isinstance(self.default, float) else value


_MEAN = {
    "weighting": Option("examples", "weight of an update in the mean", choices=("examples", "uniform")),
    "clip_norm": Option(0.0, "scale updates with a larger L2 norm down to it; 0 is off", low=0.0),
}
_SERVER_LR = Option(1.0, "server learning rate", low=0.0, low_open=True)
_ADAPTIVE = {
    "server_lr": Option(0.03, "server learning rate", low=0.0, low_open=True),
    "beta1": Option(0.9, "decay of the first moment", low=0.0, high=1.0, high_open=True),
    "beta2": Option(0.99, "decay of the second moment", low=0.0, high=1.0, high_open=True),
    "tau": Option(
        1e-3, "degree of adaptivity, added to the root of the second moment", low=0.0, low_open=True
    ),
    "flower_form": Option(False, "compute as flwr 1.41 does, for parity with runs made there"),
}

OPTIONS: dict[str, dict[str, Option]] = {
    "fedavg": {"server_lr": _SERVER_LR} | _MEAN,
    "fedavgm": {
        "server_lr": _SERVER_LR,
        "momentum": Option(0.9, "server momentum", low=0.0, high=1.0, high_open=True),
    }
    | _MEAN,
    "fedprox": {"mu": Option(0.01, "weight of the proximal term", low=0.0), "server_lr": _SERVER_LR} | _MEAN,
    "fedadagrad": {k: v for k, v in _ADAPTIVE.items() if k != "beta2"}
    | {"beta1": Option(0.0, "decay of the first moment", low=0.0, high=1.0, high_open=True)}
    | _MEAN,
    "fedadam": _ADAPTIVE | _MEAN,
    "fedyogi": _ADAPTIVE | _MEAN,
    "scaffold": {"server_lr": _SERVER_LR}
    | _MEAN
    | {"weighting": Option("uniform", "weight of an update in the mean", choices=("examples", "uniform"))},
}


def get(name: str, **options: Any) -> Strategy:
    """The named strategy with its options.

    Raises:
        OptionError: unknown name or option (naming the nearest known one), or a value out of range.
    """
    given = checked(name, options)
    transforms = (ClipNorm(given["clip_norm"]),) if given["clip_norm"] > 0 else ()
    mean = WeightedMean(given["weighting"])
    match name:
        case "fedavg":
            return Strategy(name, PlainSGD(), transforms, mean, SGD(given["server_lr"]))
        case "fedavgm":
            return Strategy(name, PlainSGD(), transforms, mean, SGD(given["server_lr"], given["momentum"]))
        case "fedprox":
            return Strategy(name, Proximal(given["mu"]), transforms, mean, SGD(given["server_lr"]))
        case "scaffold":
            return Strategy(name, ControlVariates(), transforms, mean, SGD(given["server_lr"]))
    kinds: dict[str, AdaptiveKind] = {"fedadagrad": "adagrad", "fedadam": "adam", "fedyogi": "yogi"}
    optimizer = Adaptive(
        kinds[name],
        server_lr=given["server_lr"],
        beta1=given["beta1"],
        beta2=given.get("beta2", 0.0),
        tau=given["tau"],
        flower_form=given["flower_form"],
    )
    return Strategy(name, PlainSGD(), transforms, mean, optimizer)


def checked(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of strategy `name`: the given ones, checked, and defaults for the rest.

    Raises:
        OptionError: as `get`.
    """
    if name not in OPTIONS:
        raise OptionError(
            f"strategy {name!r} is unknown{_nearest(name, OPTIONS)}; known: {', '.join(OPTIONS)}"
        )
    known = OPTIONS[name]
    for key, value in options.items():
        if key not in known:
            raise OptionError(
                f"{name} has no option {key!r}{_nearest(key, known)}; known: {', '.join(known)}", key
            )
        if not known[key].accepts(value):
            raise OptionError(
                f"{key} = {value!r} is not allowed for {name}: expected {known[key].allowed()}", key
            )
    return {
        key: option.taken(options[key]) if key in options else option.default for key, option in known.items()
    }


def _nearest(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""
