"""The trace of a round: what became of every client that got a task, in the order in which the answers came.

It is emitted as one event, `round_answers`, by runs that record a trace. A later simulation replays it
(`coordinator.fleets.replayed`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from coordinator.rounds.events import Emit
from coordinator.rounds.fleet import Answer, BlockSum, Result, Silence, singly
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import Task
from strategies.update import GroupMean, RelayPart

EVENT = "round_answers"

OVER = "the round was over"
"""Why a client of a cohort has no line of its own making: nobody waited for it any more."""

Outcome = Literal["accepted", "rejected", "silent"]


@dataclass(frozen=True)
class TraceLine:
    """What became of one task; a client that uploads twice has two.

    Attributes:
        position: of the task in the canonical order of the round in which it started.
        started: that round.
        reason: of a rejection its code, of a silence its text.
        seconds: since the round began, on the fleet's clock.
        bytes: that were uploaded.
    """

    client: str
    position: int
    started: int
    outcome: Outcome
    reason: str
    seconds: float
    bytes: int


class RoundTrace:
    """Collects the trace of one round."""

    def __init__(self) -> None:
        self._lines: list[TraceLine] = []

    def watch(
        self, results: Callable[[Collection[int]], Iterator[Result]]
    ) -> Callable[[Collection[int]], Iterator[Result]]:
        """The same results; of several passes the last one counts."""

        def watched(excluded: Collection[int]) -> Iterator[Result]:
            self._lines.clear()
            for result in results(excluded):
                self.add(result)
                yield result

        return watched

    def add(self, result: Result) -> None:
        """Notes one result."""
        self._lines += [
            _line(each) for each in singly([result]) if not isinstance(each, BlockSum | RelayPart | GroupMean)
        ]

    def emit(self, emit: Emit, number: int, population: int, cohort: Sequence[Task] = ()) -> None:
        """Emits the trace. `cohort`: of a synchronous round, whose other members are silent."""
        seen = {line.position for line in self._lines}
        end = max((line.seconds for line in self._lines), default=0.0)
        left = [
            TraceLine(task.message.client, task.position, number, "silent", OVER, end, 0)
            for task in cohort
            if task.position not in seen
        ]
        # A fleet of devices may hand over answers in another order, and some that came before the round began.
        ordered = sorted(self._lines, key=lambda line: line.seconds)
        lines = [replace(line, seconds=max(0.0, line.seconds)) for line in (*ordered, *left)]
        emit(EVENT, round=number, population=population, answers=[asdict(line) for line in lines])


def _line(result: Answer | Silence) -> TraceLine:
    task = result.task
    where = (task.message.client, task.position, task.message.round)
    if isinstance(result, Silence):
        return TraceLine(*where, "silent", result.reason, result.seconds, 0)
    if isinstance(result.verdict, Rejection):
        return TraceLine(*where, "rejected", result.verdict.reason, result.seconds, result.payload_bytes)
    return TraceLine(*where, "accepted", "", result.seconds, result.payload_bytes)
