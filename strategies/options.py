"""Options of an algorithm: a dataclass field each, with its default, its meaning and its range."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Value = float | str | bool | tuple[str, ...] | Mapping[str, Any]

_KEY = re.compile(r"[A-Za-z][\w-]{0,39}")
"""A name in a table."""


@dataclass(frozen=True)
class Option:
    """One option: its default, its meaning and its permitted values; those of a table of numbers are those of each number.

    `of_models`: its values are tables of models by name, each a name, or a table with `name` and the model's options.
    """

    default: Value
    meaning: str
    low: float = float("-inf")
    high: float = float("inf")
    low_open: bool = False
    high_open: bool = False
    choices: tuple[str | int, ...] = ()
    of_models: bool = False

    def describe_range(self) -> str:
        """The permitted values as text."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        if self.of_models:
            return "a table of models, each a name or a table with name and options"
        if isinstance(self.default, tuple):
            return "a list of patterns"
        if isinstance(self.default, bool):
            return "true or false"
        kind = "a whole number " if self.is_integer else "a table of numbers, each " if self.is_table else ""
        low = f"{kind}{'>' if self.low_open else '>='} {self.low:g}"
        if self.high == float("inf"):
            return low
        return f"{low} and {'<' if self.high_open else '<='} {self.high:g}"

    @property
    def is_table(self) -> bool:
        """Whether its values are tables by name."""
        return isinstance(self.default, Mapping)

    @property
    def is_integer(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.default, int) and not isinstance(self.default, bool)

    @property
    def plain_default(self) -> str:
        """The default as a person reads it: as in an experiment file, but text without quotes."""
        if isinstance(self.default, str):
            return self.default
        return str(self.default) if isinstance(self.default, float) else self.default_text

    def accepts(self, value: object) -> bool:
        if self.is_table:
            return isinstance(value, Mapping) and all(
                isinstance(key, str) and _KEY.fullmatch(key) is not None and self._accepts_one(each)
                for key, each in value.items()
            )
        return self._accepts_one(value)

    def _accepts_one(self, value: object) -> bool:
        if self.of_models:
            return isinstance(value.get("name") if isinstance(value, Mapping) else value, str)
        if self.choices:
            return value in self.choices
        if isinstance(self.default, tuple):
            if not isinstance(value, list | tuple) or not value:
                return False
            return all(isinstance(each, str) and each for each in value)
        if isinstance(self.default, bool) or isinstance(value, bool):
            return isinstance(value, bool) and isinstance(self.default, bool)
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            return False
        if self.is_integer and value != int(value):
            return False
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def convert(self, value: Any) -> Value:
        """An accepted value in the option's own type: `1` for a number is 1.0."""
        if isinstance(self.default, Mapping):
            return dict(value) if self.of_models else {key: float(each) for key, each in value.items()}
        return type(self.default)(value)

    @property
    def default_text(self) -> str:
        """The default as in an experiment file."""
        return _toml(self.default)


def _toml(value: Value) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {_toml(each)}" for key, each in value.items())
        return f"{{{inner}}}"
    if isinstance(value, tuple):
        return json.dumps(list(value))
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def field(default: float | str | bool | tuple[str, ...], meaning: str, **limits: Any) -> Any:
    """A dataclass field that carries its `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(default, meaning, **limits)})


def table(default: Mapping[str, float], meaning: str, **limits: Any) -> Any:
    """As `field`, of numbers by name; the limits are those of each number."""
    option = Option(default, meaning, **limits)
    return dataclasses.field(default_factory=lambda: default, metadata={"option": option})


def models(meaning: str) -> Any:
    """A field of models by name; by default there are none."""
    return dataclasses.field(default_factory=dict, metadata={"option": Option({}, meaning, of_models=True)})


def of(algorithm: type) -> dict[str, Option]:
    """The options of an algorithm by name, in the order of its fields."""
    return {each.name: each.metadata["option"] for each in dataclasses.fields(algorithm)}


# -- options that several algorithms have --


def server_lr(default: float = 1.0) -> Any:
    return field(default, "server learning rate", low=0.0, low_open=True)


def decay(default: float, meaning: str) -> Any:
    """A factor in [0, 1)."""
    return field(default, meaning, low=0.0, high=1.0, high_open=True)


def nesterov(default: bool = False) -> Any:
    return field(default, "whether the server's step looks ahead along its momentum (Nesterov)")


def tau() -> Any:
    return field(1e-3, "degree of adaptivity, added to the root of the second moment", low=0.0, low_open=True)


def flower_form() -> Any:
    return field(False, "compute as flwr 1.41 does, for parity with runs made there")


def weighting(default: str = "examples") -> Any:
    return field(default, "weight of an update in the mean", choices=("examples", "uniform"))


def clip_norm() -> Any:
    return field(0.0, "scale updates with a larger L2 norm down to it; 0 is off", low=0.0)


def local(*patterns: str) -> Any:
    return field(patterns, "patterns of the names of tensors that stay on each client, such as head.*")
