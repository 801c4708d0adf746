"""How fast the clients of a simulation are, how much memory they have, and when they are there: drawn by the seed, or read from a CSV of clients.

A column of `simulation.profiles` takes the place of the key of the same name. The file has a line for each client:

    client,speed,download,upload,dropout,available,memory_mib
    client-000,0.5,250000,60000,0.1,0-21600 64800-86400,512
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.errors import UserError
from coordinator.experiments import distributions
from coordinator.experiments.schema import Experiment
from coordinator.fleets.csv_rows import read_rows
from coordinator.fleets.simulated_clients import Floats, Presence, SimulatedClient, VirtualTime
from coordinator.fleets.stragglers import Stragglers
from coordinator.rounds.plan import generator
from strategies.suggestions import suggest

_COLUMNS = ("client", "speed", "download", "upload", "dropout", "available", "memory_mib")

Intervals = list[tuple[float, float]]


def make_virtual_time(experiment: Experiment, clients: Sequence[SimulatedClient]) -> VirtualTime:
    """How these clients behave in virtual time.

    Raises:
        UserError: the file of clients is wrong; names file, line, value and what was expected.
    """
    simulation, count = experiment.simulation, len(clients)
    read = read_profiles(Path(simulation.profiles), experiment, clients) if simulation.profiles else {}

    def draw(purpose: str, text: str) -> Floats:
        return distributions.parse(text).draw(generator(experiment.seed, purpose), count)

    def rates(key: str) -> Floats | None:
        text = getattr(simulation, key)
        return read.get(key) if key in read or text is None else draw(key, text)

    factors = np.exp(simulation.speed_spread * generator(experiment.seed, "speed").standard_normal(count))
    if "speed" in read:
        factors = 1 / read["speed"]
    elif simulation.speed is not None:
        factors = 1 / draw("speed", simulation.speed)
    presence: Presence | None = read.get("available")
    if presence is None and simulation.availability is not None:
        shares = np.minimum(1.0, draw("availability", simulation.availability))
        phases = generator(experiment.seed, "availability phase").random(count)
        presence = one_interval_each(_period(experiment), shares, phases)
    return VirtualTime(
        simulation.seconds_per_step,
        factors,
        read.get("dropout", np.full(count, simulation.dropout)),
        experiment.seed,
        rates("download"),
        rates("upload"),
        presence,
        _stragglers(experiment),
    )


def _stragglers(experiment: Experiment) -> Stragglers | None:
    chosen = experiment.simulation.stragglers
    return None if chosen is None else Stragglers(chosen.share, chosen.partial == "drop", experiment.seed)


def _period(experiment: Experiment) -> float:
    period = experiment.simulation.availability_period_seconds
    assert period is not None  # a default
    return period


def one_interval_each(period: float, shares: Floats, phases: Floats) -> Presence:
    """Each client is there once in a period, for its share of it; one that spans the end of the period becomes two intervals."""
    intervals: list[tuple[int, float, float]] = []
    for index, (share, phase) in enumerate(zip(shares.tolist(), phases.tolist(), strict=True)):
        begin, end = phase * period, (phase + share) * period
        if share >= 1:
            intervals.append((index, 0.0, period))
        elif end > period:
            intervals += [(index, 0.0, end - period), (index, begin, period)]
        else:
            intervals.append((index, begin, end))
    return Presence.of(period, intervals, len(shares))


def read_profiles(path: Path, experiment: Experiment, clients: Sequence[SimulatedClient]) -> dict[str, Any]:
    """The columns of the file by name, in the order of the clients: arrays, and a `Presence`.

    Raises:
        UserError: naming the line.
    """
    index = {client.name: client.index for client in clients}
    period = _period(experiment)
    parsers: Mapping[str, Callable[[str], Any]] = {
        "speed": _positive,
        "download": _positive,
        "upload": _positive,
        "dropout": _probability,
        "memory_mib": _positive,
        "available": lambda text: _intervals(text, period),
    }
    found: dict[int, dict[str, Any]] = {}
    for number, row in read_rows(path, "simulation.profiles", _expected_columns):
        where = f"{path}, line {number}"
        at = index.get(row["client"])
        if at is None:
            raise UserError(
                f"{where}: client = {row['client']!r} is none of the {len(index)} clients of this run"
                f"{suggest(row['client'], index)}; expected names such as {next(iter(index))!r}"
            )
        if at in found:
            raise UserError(
                f"{where}: client = {row['client']!r} has a line already; expected one for each client"
            )
        found[at] = {}
        for name, text in row.items():
            if name == "client":
                continue
            try:
                found[at][name] = parsers[name](text)
            except ValueError as error:
                raise UserError(f"{where}: {name} = {text!r}: {error}") from None
    for client in clients:
        if client.index not in found:
            raise UserError(
                f"{path}: has no line for client {client.name!r}; it has {len(found)} lines, expected one for each of the "
                f"{len(clients)} clients"
            )
    return _as_columns(path, [found[each] for each in range(len(clients))], period)


def _as_columns(path: Path, rows: Sequence[Mapping[str, Any]], period: float) -> dict[str, Any]:
    columns: dict[str, Any] = {
        name: np.array([row[name] for row in rows], np.float64) for name in rows[0] if name != "available"
    }
    if "available" in rows[0]:
        intervals = [(at, begin, end) for at, row in enumerate(rows) for begin, end in row["available"]]
        if not intervals:
            raise UserError(
                f"{path}: no client is ever available; expected an interval for some of them, such as 0-3600"
            )
        columns["available"] = Presence.of(period, intervals, len(rows))
    return columns


def _expected_columns(header: Sequence[str]) -> str | None:
    unknown = [name for name in header if name not in _COLUMNS]
    if unknown or "client" not in header or len(set(header)) < len(header) or len(header) < 2:
        return f"client, and one or more of {', '.join(_COLUMNS[1:])}"
    return None


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise ValueError("expected a number of more than 0")
    return value


def _probability(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise ValueError("expected a probability from 0 to 1")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


def _intervals(text: str, period: float) -> Intervals:
    """`0-3600 7200-9000`: seconds of a period; empty: never."""
    intervals = []
    for each in text.split():
        begin, dash, end = each.partition("-")
        if not dash:
            raise ValueError(f"{each!r} is not of the form begin-end, such as 0-3600")
        intervals.append((_number(begin), _number(end)))
    edges = [edge for interval in intervals for edge in interval]
    is_ordered = all(left <= right for left, right in itertools.pairwise(edges))
    if (
        not is_ordered
        or any(begin == end for begin, end in intervals)
        or not all(0 <= edge <= period for edge in edges)
    ):
        raise ValueError(
            f"expected intervals in order that do not overlap, from 0 to {period:g} seconds "
            "(simulation.availability_period_seconds)"
        )
    return intervals
