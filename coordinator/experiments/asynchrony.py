"""Which keys of an asynchronous run go together, and with which strategies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strategies import staleness

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, Federation
    from strategies.strategy import Mode

ASYNC_KEYS = ("buffer", "concurrency", "staleness", "max_staleness")
"""Keys of [federation] that only an asynchronous run has."""

_WHY_NOT: dict[Mode, str] = {
    "async": "it needs rounds in which all clients start from the same model",
    "sync": "it does not wait for the clients of a round",
}
"""Why a strategy does not work in a mode; a strategy has one reason at most."""


def find_problems(experiment: Experiment, modes: tuple[Mode, ...]) -> Iterator[str]:
    """One sentence for each problem of an experiment with its defaults filled in. `modes`: those of its strategy."""
    federation = experiment.federation
    if federation.mode is None:
        return
    yield from mode_problems(experiment.strategy.name, modes, federation.mode)
    if federation.mode == "sync":
        for key in ASYNC_KEYS:
            if (value := getattr(federation, key)) is not None:
                yield (
                    f'federation.{key} = {value!r} is a key of asynchronous runs; set federation.mode = "async" too, or '
                    "leave it out"
                )
        return
    yield from _async_problems(federation)


def mode_problems(strategy: str, modes: tuple[Mode, ...], mode: Mode) -> Iterator[str]:
    """The problem of a strategy that does not work in a mode. `modes`: those in which it does."""
    if mode not in modes:
        yield (
            f"federation.mode = {mode!r} does not go with strategy.name = {strategy!r}: {_WHY_NOT[mode]}; leave it out, or "
            "take another strategy"
        )


def _async_problems(federation: Federation) -> Iterator[str]:
    if federation.staleness is not None:
        try:
            staleness.parse(federation.staleness)
        except ValueError as error:
            yield f"federation.staleness: {error}"
    if federation.over_select != 1:
        yield (
            f"federation.over_select = {federation.over_select:g} is for rounds that select a cohort; an asynchronous run has "
            "as many clients at work as federation.concurrency says"
        )
    for key in ("buffer", "concurrency"):
        value, clients = getattr(federation, key), federation.clients
        if clients is not None and value is not None and value > clients:
            yield (
                f"federation.{key} = {value} is more than federation.clients = {clients}: a client trains from each model "
                f"once at most; expected 1 to {clients}"
            )
    if federation.buffer is not None and federation.min_updates > federation.buffer:
        yield (
            f"federation.min_updates = {federation.min_updates} is more than federation.buffer = {federation.buffer}; no "
            "step could ever count"
        )
