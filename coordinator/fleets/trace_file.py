"""The CSV of a recorded run: a line for each task, round by round in the order in which the answers came.

`record` writes it, `simulation.replay` reads it. `docs/traces.md` describes the columns.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from coordinator.errors import UserError
from coordinator.fleets.csv_rows import read_rows
from coordinator.rounds import intake
from coordinator.rounds.plan import Cohort, RunPlan, cohort_size
from coordinator.rounds.trace import EVENT, TraceLine
from strategies.suggestions import suggest

COLUMNS = (
    "round",
    "order",
    "client",
    "position",
    "started",
    "outcome",
    "reason",
    "seconds",
    "bytes",
    "population",
)
_OUTCOMES = ("accepted", "rejected", "silent")


@dataclass(frozen=True)
class TracedRound:
    """The lines of one round in the order of the answers, and the number of clients that could have been chosen."""

    lines: tuple[TraceLine, ...]
    population: int

    @property
    def cohort(self) -> Cohort:
        """Of a synchronous round: its clients in the canonical order."""
        by_position = {line.position: line.client for line in self.lines}
        return Cohort(tuple(by_position[position] for position in sorted(by_position)), self.population)


Trace = Mapping[int, TracedRound]


def format_trace(events: Iterable[Mapping[str, Any]]) -> str:
    """The CSV of a run's events. A round that was answered twice, because the process died before the commit, counts as the last time."""
    rounds = {event["round"]: event for event in events if event["event"] == EVENT}
    buffer = io.StringIO()
    lines = csv.writer(buffer, lineterminator="\n")
    lines.writerow(COLUMNS)
    for number, event in sorted(rounds.items()):
        for order, answer in enumerate(event["answers"], start=1):
            values = {**answer, "round": number, "order": order, "population": event["population"]}
            values["seconds"] = json.dumps(values["seconds"])
            lines.writerow([values[name] for name in COLUMNS])
    return buffer.getvalue()


def read_trace(path: Path, names: Sequence[str], run_plan: RunPlan) -> Trace:
    """The trace in a file, which fits the run: its clients, and as many updates a round as close it.

    `names`: of the run's clients.

    Raises:
        UserError: naming file, line, value, and what was expected.
    """
    read = _Reader(path, names, run_plan)
    rounds: dict[int, list[TraceLine]] = {}
    populations: dict[int, int] = {}
    for number, cells in read_rows(path, "simulation.replay", _expected_columns):
        read.line_number = number
        at = read.whole(cells, "round", 1)
        last = max(rounds, default=0)
        if at not in (last, last + 1):
            read.fail("round", at, f"round {last + 1}" if not last else f"round {last} or {last + 1}")
        lines = rounds.setdefault(at, [])
        population = read.whole(cells, "population", 1)
        if populations.setdefault(at, population) != population:
            read.fail("population", population, f"{populations[at]}, as on the round's first line")
        lines.append(read.line(cells, at, lines, population))
    if len(rounds) < run_plan.rounds and not run_plan.early_stop:
        raise UserError(
            f"{path}: has {len(rounds)} rounds, but federation.rounds = {run_plan.rounds}; expected a trace of at least so many"
        )
    for at, lines in rounds.items():
        positions = sorted({line.position for line in lines})
        if run_plan.asynchrony is None and positions != list(range(len(positions))):
            raise UserError(
                f"{path}: the positions of round {at} are {positions}; expected each from 0 to {len(positions) - 1}"
            )
    return {at: TracedRound(tuple(lines), populations[at]) for at, lines in rounds.items()}


class _Reader:
    """Reads the cells of lines and says what is wrong with them."""

    def __init__(self, path: Path, names: Sequence[str], run_plan: RunPlan) -> None:
        self.line_number = 0
        self._path = path
        self._names = frozenset(names)
        self._plan = run_plan

    def line(
        self, cells: Mapping[str, str], at: int, before: Sequence[TraceLine], population: int
    ) -> TraceLine:
        """The line of round `at` after those `before` it."""
        order = self.whole(cells, "order", 1)
        if order != len(before) + 1:
            self.fail("order", order, f"{len(before) + 1}: lines are in the order of the answers")
        client, outcome, reason = cells["client"], cells["outcome"], cells["reason"]
        if client not in self._names:
            some = ", ".join(sorted(self._names)[:3])
            self.fail(
                "client",
                client,
                f"one of the {len(self._names)} clients of this run, such as {some}{suggest(client, self._names)}; "
                "simulation.names gives clients the names of a recorded run",
            )
        if outcome not in _OUTCOMES:
            self.fail("outcome", outcome, ", ".join(_OUTCOMES))
        if outcome == "rejected":
            try:
                intake.parse_reason(reason)
            except ValueError:
                self.fail("reason", reason, "the code of a rejection, such as non_finite")
        found = TraceLine(
            client,
            self.whole(cells, "position", 0),
            self.whole(cells, "started", 1),
            outcome,  # type: ignore[arg-type]
            reason,
            self._seconds(cells),
            self.whole(cells, "bytes", 0),
        )
        self._require_fit(found, at, before, population)
        return found

    def _require_fit(self, line: TraceLine, at: int, before: Sequence[TraceLine], population: int) -> None:
        is_synchronous = self._plan.asynchrony is None
        if (is_synchronous and line.started != at) or line.started > at:
            why = (
                "a client of a synchronous run answers in the round in which it started"
                if is_synchronous
                else ""
            )
            self.fail("started", line.started, f"{at}{' or less' * (not is_synchronous)}{why and '; ' + why}")
        if population > len(self._names):
            self.fail("population", population, f"at most the {len(self._names)} clients of this run")
        same = [each for each in before if (each.started, each.position) == (line.started, line.position)]
        others = [each for each in before if (each.started, each.client) == (line.started, line.client)]
        if any(each.client != line.client for each in same) or any(
            each.position != line.position for each in others
        ):
            self.fail(
                "position", line.position, "one position for each client of a round, and one client for each"
            )
        accepted = [each for each in before if each.outcome == "accepted"]
        if line.outcome == "accepted" and any(each in accepted for each in same):
            self.fail("outcome", line.outcome, f"no second update of {line.client}: one was accepted already")
        wanted = self._plan.closing.wanted
        if line.outcome == "accepted" and len(accepted) == wanted:
            key = "clients_per_round" if is_synchronous else "buffer"
            self.fail(
                "outcome", line.outcome, f"at most federation.{key} = {wanted} accepted updates in a round"
            )
        if is_synchronous and not same and len({each.position for each in before}) == cohort_size(self._plan):
            self.fail(
                "client",
                line.client,
                f"at most {cohort_size(self._plan)} clients in round {at} (federation.clients_per_round times over_select)",
            )

    def whole(self, cells: Mapping[str, str], name: str, least: int) -> int:
        """A whole number."""
        text = cells[name]
        if not (text.isascii() and text.isdecimal()) or len(text) > 18 or int(text) < least:
            self.fail(name, text, f"a whole number from {least}")
        return int(text)

    def _seconds(self, cells: Mapping[str, str]) -> float:
        try:
            value = float(cells["seconds"])
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            self.fail("seconds", cells["seconds"], "seconds of 0 or more")
        return value

    def fail(self, name: str, value: object, expected: str) -> NoReturn:
        """Refuses a cell."""
        raise UserError(f"{self._path}, line {self.line_number}: {name} = {value!r}, expected {expected}")


def _expected_columns(header: Sequence[str]) -> str | None:
    return None if tuple(header) == COLUMNS else f"{', '.join(COLUMNS)}, as `record` writes them"
