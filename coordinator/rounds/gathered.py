"""The updates of a round, aggregated, and what a round's record says of the clients that sent them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.rounds.records import NOBODY, Held, InFlight
from strategies.params import Params
from strategies.update import Aggregate

_OF_AGGREGATED = ("rejections", "silent", "answers", "bytes_up")


@dataclass(frozen=True)
class Aggregated:
    """The aggregate of a cohort's answers.

    Attributes:
        answers: results that arrived, accepted or not.
        received_bytes: what clients that answered got besides the model.
        norms: of the accepted updates by client, the largest first.
    """

    aggregate: Aggregate | None
    accepted: tuple[str, ...]
    rejections: Mapping[str, int]
    silent: int
    answers: int
    bytes_up: int
    norms: Mapping[str, float]
    received_bytes: int = 0


@dataclass(frozen=True)
class Gathered:
    """The updates of a round, aggregated.

    Attributes:
        selected: clients that got the model in this round.
        bytes_down: what they received.
        client_states: returns the new states of accepted clients, as `Fleet.client_state`.
        staleness: of the accepted updates, in an asynchronous run.
        simulated_seconds: virtual time that the round took.
        in_flight: clients that go on in the next round.
        bytes_down_uncompressed: what they would have received without a code, if there is one.
        held: what clients hold, likewise.
    """

    selected: int
    bytes_down: int
    population: int
    aggregated: Aggregated
    client_states: Callable[[Sequence[str]], Mapping[str, Mapping[str, Params]]]
    staleness: Sequence[int] = ()
    simulated_seconds: float | None = None
    in_flight: InFlight = NOBODY
    bytes_down_uncompressed: int | None = None
    held: Held | None = None

    def figures(self) -> dict[str, Any]:
        """What the record of a synchronous round on devices needs, as JSON."""
        aggregated = self.aggregated
        return {
            "selected": self.selected,
            "bytes_down": self.bytes_down,
            "population": self.population,
            "accepted": list(aggregated.accepted),
            **{key: getattr(aggregated, key) for key in _OF_AGGREGATED},
        }

    @staticmethod
    def of_figures(figures: Mapping[str, Any], aggregate: Aggregate | None) -> Gathered:
        """The value of `figures`, with the aggregate, but without the norms of the updates."""
        aggregated = Aggregated(
            aggregate,
            accepted=tuple(figures["accepted"]),
            norms={},
            **{key: figures[key] for key in _OF_AGGREGATED},
        )
        return Gathered(
            figures["selected"],
            figures["bytes_down"],
            figures["population"],
            aggregated,
            lambda accepted: {},
        )
