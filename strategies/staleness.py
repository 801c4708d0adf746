"""Staleness weights: what an update counts for whose base is several versions old.

An asynchronous run names one in `federation.staleness`. The staleness of an update is the number of versions that the model
has moved on since the client received it. Xie 2019 (FedAsync), section 5.2; FedBuff takes `polynomial(0.5)`, Nguyen 2022,
section 5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from strategies.params import FloatArray, Tensors, elementwise
from strategies.update import Update

FORMS = "constant, polynomial(0.5) or hinge(10, 4)"


class StalenessWeight(Protocol):
    """A weight in (0, 1], 1 for an update of the newest version."""

    def weight(self, staleness: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """1, however old the base is."""

    def weight(self, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Polynomial:
    """(1 + staleness)^(-a), a > 0."""

    a: float

    def weight(self, staleness: int) -> float:
        return float((1.0 + staleness) ** -self.a)


@dataclass(frozen=True)
class Hinge:
    """1 up to a staleness of b, then 1 / (a · (staleness - b) + 1). a > 0, b >= 0."""

    a: float
    b: float

    def weight(self, staleness: int) -> float:
        return 1.0 / (self.a * max(0.0, staleness - self.b) + 1.0)


def parse(text: str) -> StalenessWeight:
    """The weight that a text such as `polynomial(0.5)` names.

    Raises:
        ValueError: it is none; says what was expected.
    """
    name, numbers = _split(text)
    known: dict[tuple[str, int], Callable[..., StalenessWeight]] = {
        ("constant", 0): Constant,
        ("polynomial", 1): Polynomial,
        ("hinge", 2): Hinge,
    }
    make = known.get((name, len(numbers)))
    if make is None or (numbers and numbers[0] <= 0) or any(number < 0 for number in numbers):
        raise ValueError(f"{text!r} is no staleness weight; expected {FORMS}, with a first number above 0")
    return make(*numbers)


def discount(update: Update, weight: float) -> Update:
    """The update with its tensors times `weight`, float32; itself if that is 1."""
    if weight == 1.0:
        return update
    factor = np.float32(weight)
    return replace(update, delta=elementwise(lambda value: value * factor, update.delta))


def rebase(update: Update, base: Tensors, newest: Tensors) -> Update:
    """The update by which the model `newest` would become the client's, float32. `base`: what the client received."""

    def difference(delta: FloatArray, base: FloatArray, newest: FloatArray) -> FloatArray:
        return (delta.astype(np.float64) + base - newest).astype(np.float32)

    return replace(update, delta=elementwise(difference, update.delta, base, newest))


def _split(text: str) -> tuple[str, tuple[float, ...]]:
    found = re.fullmatch(r"\s*([a-z]+)\s*(?:\(([^()]*)\))?\s*", text)
    if found is None:
        return "", ()
    try:
        numbers = tuple(float(part) for part in (found[2] or "").split(",") if part.strip())
    except ValueError:
        return "", ()
    return (found[1], numbers) if all(map(math.isfinite, numbers)) else ("", ())
