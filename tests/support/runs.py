"""Runs of the round engine for tests: commits are kept in memory or in a folder, clocks stand still."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.rounds import engine
from coordinator.rounds.fleet import Fleet
from coordinator.rounds.plan import RunPlan
from coordinator.rounds.records import RoundRecord, RunState, Score
from coordinator.rounds.step import AsynchronousFleet
from strategies.params import Params, Tensors
from tests.support.federation import PARAMS


@dataclass
class Seen:
    """All that a run told."""

    events: list[dict[str, Any]] = field(default_factory=list)
    records: list[RoundRecord] = field(default_factory=list)
    states: list[RunState] = field(default_factory=list)
    client_states: list[Mapping[str, Mapping[str, Params]]] = field(default_factory=list)

    def emit(self, event: str, **values: Any) -> None:
        self.events.append({"event": event, **values})

    def commit(
        self, state: RunState, record: RoundRecord, clients: Mapping[str, Mapping[str, Params]]
    ) -> None:
        self.states.append(state)
        self.client_states.append(clients)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]


def distance(number: int, params: Tensors) -> Score:
    """A score that tells any two params apart: how far `w` is from zero."""
    return Score(loss=float(np.sum(np.square(params["w"], dtype=np.float64))), accuracy=0.5, clients={})


def first_state(run_plan: RunPlan, params: Params = PARAMS) -> RunState:
    return RunState(0, params, run_plan.strategy.init(params, run_plan.trainable))


@dataclass(frozen=True)
class Store:
    """A commit store made of functions."""

    commit: Callable[..., None]
    on_committed: Callable[[RoundRecord], None] = lambda record: None
    materialize: Callable[[RunState], RunState] = engine.materialize_in_memory


def run(
    run_plan: RunPlan,
    fleet: Fleet | AsynchronousFleet,
    start: RunState | None = None,
    *,
    commit: Callable[..., None] | None = None,
    evaluate: engine.Evaluate = distance,
    materialize: Callable[[RunState], RunState] = engine.materialize_in_memory,
    run_rounds: Callable[..., RunState] = engine.run,
) -> tuple[RunState, Seen]:
    """The run's last state, and what was seen on the way. `run_rounds`: that of `rounds.asynchronous`, or the engine's."""
    seen = Seen()
    last = run_rounds(
        run_plan,
        fleet,
        start or first_state(run_plan),
        Store(commit or seen.commit, seen.records.append, materialize),
        evaluate=evaluate,
        emit=seen.emit,
        monotonic=lambda: 0.0,
    )
    return last, seen


def bits(state: RunState) -> dict[str, bytes]:
    """Params and strategy state, to the bit."""
    arrays = {**state.params, **{f"state:{name}": value for name, value in state.strategy.arrays.items()}}
    return {name: value.tobytes() for name, value in arrays.items()} | {
        "values": repr(sorted(state.strategy.values.items())).encode()
    }
