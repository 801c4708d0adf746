"""Distributions in the notation of the experiment file: a number, `uniform(low, high)` or `lognormal(median, sigma)`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import DataProblem
from models.datasets import notation
from strategies.suggestions import suggest

FORMS = "a number, constant(5), uniform(1, 10) or lognormal(5, 0.5)"
LARGEST_SIGMA = 5.0

Kind = Literal["constant", "uniform", "lognormal"]
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "constant": ("value",),
    "uniform": ("low", "high"),
    "lognormal": ("median", "sigma"),
}


@dataclass(frozen=True)
class Distribution:
    """Of positive numbers. `first`: the value, the low end or the median; `second`: the high end, or the sigma of the logarithm."""

    kind: Kind
    first: float
    second: float = 0.0

    @property
    def largest(self) -> float:
        """No draw is above it."""
        return {"constant": self.first, "uniform": self.second, "lognormal": math.inf}[self.kind]

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        """So many independent draws."""
        if self.kind == "constant":
            return np.full(count, self.first)
        if self.kind == "uniform":
            return rng.uniform(self.first, self.second, count)
        return self.first * np.exp(self.second * rng.standard_normal(count))


def parse(text: str) -> Distribution:
    """The distribution that `text` names.

    Raises:
        DataProblem: unknown, or with values out of range.
    """
    try:
        call = notation.Call("constant", (float(text),))
    except ValueError:
        call = notation.parse(text)
    if call.name not in _PARAMETERS:
        raise DataProblem(f"{text!r} is unknown{suggest(call.name, _PARAMETERS)}; expected {FORMS}")
    names = _PARAMETERS[call.name]
    given = dict(zip(names, call.positional, strict=False)) | call.named
    if len(call.positional) + len(call.named) != len(names) or given.keys() != set(names):
        raise DataProblem(f"{text!r}: {call.name} takes {' and '.join(names)}; expected {FORMS}")
    values = [given[name] for name in names]
    if not all(_is_number(value) for value in values) or values[0] <= 0:
        raise DataProblem(f"{text!r}: expected finite numbers, the first one more than 0; expected {FORMS}")
    if call.name == "uniform" and values[0] > values[1]:
        raise DataProblem(f"{text!r}: the low end is above the high one; expected {FORMS}")
    if call.name == "lognormal" and not 0 <= values[1] <= LARGEST_SIGMA:
        raise DataProblem(f"{text!r}: expected a sigma from 0 to {LARGEST_SIGMA:g}")
    return Distribution(call.name, *map(float, values))  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
