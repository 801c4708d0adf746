"""A user's own strategy in a worker: a class that aggregates the updates of a cohort.

    class Median:
        def aggregate(self, updates):
            return {name: np.median([each.delta[name] for each in updates], axis=0) for name in updates[0].delta}

It is built anew for each job, so it keeps nothing from round to round, and any worker may do the job.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.errors import UserError
from edge_client.wire.arrays import StoredArrays
from models import user_code
from strategies.own import GROUP
from strategies.params import Params, subtree
from strategies.update import Update

DEFAULT_BASE = "fedavg"


def describe(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The strategy's `base`, the names of the options that it `takes`, and the other `options`, which are the base's.

    Raises:
        UserError: there is no such class, it cannot be built with its options, or it lacks a method.
    """
    make = _find(name)
    takes = _parameters(make)
    base = getattr(_build(name, make, options), "base", DEFAULT_BASE)
    if not isinstance(base, str):
        raise UserError(f"strategy.name = {name!r}: base is {base!r}, expected the name of a strategy")
    rest = {key: value for key, value in options.items() if key not in takes}
    return {"base": base, "takes": takes, "options": rest}


@dataclass(frozen=True)
class OpenFile:
    """An `arrays.Payload` in a file that is open already; the sandbox may not open it by any name."""

    descriptor: int

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self.descriptor, length, offset)


def aggregate(
    name: str, options: Mapping[str, Any], deltas: int, updates: Sequence[Mapping[str, Any]]
) -> Params:
    """What the strategy makes of the updates, float32.

    `deltas`: descriptor of the file with their deltas, `0/…`, `1/…`; `updates`: their other values.

    Raises:
        UserError: the strategy failed, or returned something else than arrays by name.
    """
    make = _find(name)
    strategy = _build(name, make, options)
    stored = StoredArrays(OpenFile(deltas))
    cohort = [Update(subtree(stored, str(index)), **values) for index, values in enumerate(updates)]
    try:
        with user_code.user_modules_first(Path.cwd()):
            returned = strategy.aggregate(cohort)
        return {key: np.asarray(value, np.float32) for key, value in returned.items()}
    except Exception as error:  # shows the user any error of their code
        raise UserError(
            f"strategy.name = {name!r} failed{user_code.error_location(error, make)}: {type(error).__name__}: {error}"
        ) from error


def _find(name: str) -> Callable[..., Any]:
    if user_code.is_reference(name):
        try:
            return user_code.load(name)
        except user_code.UserCodeError as error:
            more = ""
            if name.startswith("flower:"):
                more = "; a class of Flower is given with its module, such as flower:flwr.serverapp.strategy.FedAdam"
            raise UserError(f"strategy.name = {name!r}: {error}{more}") from error
    for entry in entry_points(group=GROUP, name=name):
        found: Callable[..., Any] = entry.load()
        return found
    raise UserError(f"strategy.name = {name!r} is no entry point of the group {GROUP} here")


def _parameters(make: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return []


def _build(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    taken = {key: value for key, value in options.items() if key in _parameters(make)}
    try:
        strategy = make(**taken)
    except Exception as error:  # shows the user any error of their code
        raise UserError(
            f"strategy.name = {name!r} cannot be built with {taken!r}{user_code.error_location(error, make)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(strategy, "aggregate", None)):
        raise UserError(
            f"strategy.name = {name!r}{user_code.definition_location(make)}: expected a class with a method "
            "aggregate(self, updates), which returns the tensors of an update by name"
        )
    return strategy
