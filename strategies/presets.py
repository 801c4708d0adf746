"""Strategies by the names the field uses: `get("fedadam", server_lr=0.03)` checks names and ranges.

Each algorithm is a dataclass of its options that composes a `Strategy`; a field carries its default, meaning and range.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

from strategies.client_rules import ClientRule, ControlVariates, PlainSGD, Proximal
from strategies.strategy import (
    SGD,
    Adaptive,
    AdaptiveKind,
    ClipNorm,
    ServerOptimizer,
    Strategy,
    WeightedMean,
    Weighting,
)


@dataclass(frozen=True)
class Option:
    """One option: its default, its meaning and its permitted values."""

    default: float | str | bool
    meaning: str
    low: float = float("-inf")
    high: float = float("inf")
    low_open: bool = False
    high_open: bool = False
    choices: tuple[str, ...] = ()

    def describe_range(self) -> str:
        """The permitted values as text."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if isinstance(self.default, bool):
            return "true or false"
        low = f"{'>' if self.low_open else '>='} {self.low:g}"
        if self.high == float("inf"):
            return low
        return f"{low} and {'<' if self.high_open else '<='} {self.high:g}"

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

    def convert(self, value: Any) -> float | str | bool:
        """An accepted value in the option's own type: `1` for a number is 1.0."""
        return float(value) if isinstance(self.default, float) else value


def _option(default: float | str | bool, meaning: str, **limits: Any) -> Any:
    """A dataclass field that carries its `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(default, meaning, **limits)})


def _server_lr(default: float = 1.0) -> Any:
    return _option(default, "server learning rate", low=0.0, low_open=True)


def _decay(default: float, meaning: str) -> Any:
    """A factor in [0, 1)."""
    return _option(default, meaning, low=0.0, high=1.0, high_open=True)


def _tau() -> Any:
    return _option(
        1e-3, "degree of adaptivity, added to the root of the second moment", low=0.0, low_open=True
    )


def _flower_form() -> Any:
    return _option(False, "compute as flwr 1.41 does, for parity with runs made there")


def _weighting(default: str = "examples") -> Any:
    return _option(default, "weight of an update in the mean", choices=("examples", "uniform"))


def _clip_norm() -> Any:
    return _option(0.0, "scale updates with a larger L2 norm down to it; 0 is off", low=0.0)


class Algorithm(Protocol):
    """A dataclass of options, each with its `Option`."""

    weighting: Weighting
    clip_norm: float

    def __init__(self, **options: Any) -> None: ...

    def build(self) -> Strategy: ...

    def _compose(self, name: str, optimizer: ServerOptimizer, rule: ClientRule) -> Strategy:
        transforms = (ClipNorm(self.clip_norm),) if self.clip_norm > 0 else ()
        return Strategy(name, rule, transforms, WeightedMean(self.weighting), optimizer)


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Local SGD on the clients, then the mean of their updates. McMahan 2017, Algorithm 1."""

    server_lr: float = _server_lr()
    weighting: Weighting = _weighting()
    clip_norm: float = _clip_norm()

    def build(self) -> Strategy:
        return self._compose("fedavg", SGD(self.server_lr), PlainSGD())


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """FedAvg with momentum on the server. Hsu 2019, section 4.3."""

    server_lr: float = _server_lr()
    momentum: float = _decay(0.9, "server momentum")
    weighting: Weighting = _weighting()
    clip_norm: float = _clip_norm()

    def build(self) -> Strategy:
        return self._compose("fedavgm", SGD(self.server_lr, self.momentum), PlainSGD())


@dataclass(frozen=True)
class FedProx(Algorithm):
    """FedAvg with a proximal term in the local loss. Li 2020, Algorithm 2."""

    mu: float = _option(0.01, "weight of the proximal term", low=0.0)
    server_lr: float = _server_lr()
    weighting: Weighting = _weighting()
    clip_norm: float = _clip_norm()

    def build(self) -> Strategy:
        return self._compose("fedprox", SGD(self.server_lr), Proximal(self.mu))


@dataclass(frozen=True)
class FedAdagrad(Algorithm):
    """Adagrad on the server. Reddi 2021, Algorithm 2."""

    server_lr: float = _server_lr(0.03)
    beta1: float = _decay(0.0, "decay of the first moment")
    tau: float = _tau()
    flower_form: bool = _flower_form()
    weighting: Weighting = _weighting()
    clip_norm: float = _clip_norm()

    def build(self) -> Strategy:
        optimizer = Adaptive("adagrad", self.server_lr, self.beta1, 0.0, self.tau, self.flower_form)
        return self._compose("fedadagrad", optimizer, PlainSGD())


@dataclass(frozen=True)
class FedAdam(Algorithm):
    """Adam on the server. Reddi 2021, Algorithm 2."""

    kind: ClassVar[AdaptiveKind] = "adam"
    server_lr: float = _server_lr(0.03)
    beta1: float = _decay(0.9, "decay of the first moment")
    beta2: float = _decay(0.99, "decay of the second moment")
    tau: float = _tau()
    flower_form: bool = _flower_form()
    weighting: Weighting = _weighting()
    clip_norm: float = _clip_norm()

    def build(self) -> Strategy:
        optimizer = Adaptive(self.kind, self.server_lr, self.beta1, self.beta2, self.tau, self.flower_form)
        return self._compose(f"fed{self.kind}", optimizer, PlainSGD())


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi on the server. Reddi 2021, Algorithm 2."""

    kind: ClassVar[AdaptiveKind] = "yogi"


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Control variates correct client drift. Karimireddy 2020, Algorithm 1, option II."""

    server_lr: float = _server_lr()
    weighting: Weighting = _weighting("uniform")
    clip_norm: float = _clip_norm()

    def build(self) -> Strategy:
        return self._compose("scaffold", SGD(self.server_lr), ControlVariates())


ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedprox": FedProx,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "scaffold": Scaffold,
}

OPTIONS: dict[str, dict[str, Option]] = {
    name: {each.name: each.metadata["option"] for each in dataclasses.fields(algorithm)}
    for name, algorithm in cast(dict[str, Any], ALGORITHMS).items()
}


class OptionError(ValueError):
    """A strategy's name or option is wrong. `option` is the key, or None when the name itself is unknown."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


def get(name: str, **options: Any) -> Strategy:
    """The named strategy with its options.

    Raises:
        OptionError: unknown name or option (suggesting the nearest known one), or a value out of range.
    """
    values = resolve_options(name, options)
    return ALGORITHMS[name](**values).build()


def resolve_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of strategy `name`: those in `options`, checked, and defaults for the rest.

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
                f"{key} = {value!r} is not allowed for {name}: expected {known[key].describe_range()}", key
            )
    return {
        key: option.convert(options[key]) if key in options else option.default
        for key, option in known.items()
    }


def _nearest(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""
