"""What devices have spent, in one run and in all of their runs together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from coordinator.privacy.mechanism import Mechanism, Releases, compose


@dataclass(frozen=True)
class RunSpending:
    """What a device has spent in a run.

    Attributes:
        rounds: in which its update was, or under Poisson sampling may have been; of them the first and the last.
    """

    run: str
    run_name: str
    dataset: str
    rounds: int
    first_round: int
    last_round: int
    epsilon: float
    delta: float


@dataclass(frozen=True)
class DeviceSpending:
    """What a device has spent in all of its runs, the newest first, which compose as `privacy.mechanism` says.

    Attributes:
        delta: the smallest of the runs'.
    """

    device: str
    name: str
    epsilon: float
    delta: float | None
    runs: Sequence[RunSpending]


@dataclass(frozen=True)
class RunTotal:
    """What one run has spent."""

    run: str
    run_name: str
    rounds: int
    epsilon: float
    delta: float


@dataclass(frozen=True)
class AcrossRuns:
    """What all runs on a data set have spent of a device that took part wherever it could: no device has spent more."""

    dataset: str
    epsilon: float
    delta: float
    runs: Sequence[RunTotal]


def of_devices(names: Mapping[str, str], rows: Iterable[Row[Any]]) -> list[DeviceSpending]:
    """What each of these devices, name by id, has spent in all of its runs. `rows`: of `privacy.spent_by`."""
    found: dict[str, list[tuple[RunSpending, Releases | None]]] = {device: [] for device in names}
    for row in rows:
        found[row.device].append(_of_run(row))
    return [_together(device, names[device], each) for device, each in found.items()]


def _of_run(row: Row[Any]) -> tuple[RunSpending, Releases | None]:
    mechanism = Mechanism.of_json(row.mechanism)
    # A device that may be drawn for the open round has not spent it before that is charged.
    releases = mechanism.releases(row.run_rounds, row.rounds)
    spent = RunSpending(
        row.run,
        row.run_name,
        row.dataset,
        row.rounds,
        row.first_round,
        row.last_round,
        min(compose([releases], mechanism.delta), row.run_epsilon),
        mechanism.delta,
    )
    return spent, releases


def _together(device: str, name: str, found: Sequence[tuple[RunSpending, Releases | None]]) -> DeviceSpending:
    runs = [run for run, _ in found]
    delta = min((run.delta for run in runs), default=None)
    epsilon = 0.0 if delta is None else compose([releases for _, releases in found], delta)
    return DeviceSpending(device, name, epsilon, delta, runs)


def across_runs(dataset: str, rows: Sequence[Row[Any]]) -> AcrossRuns | None:
    """What all runs on a data set have spent together; None: nothing. `rows`: of `privacy.of_dataset`."""
    if not rows:
        return None
    mechanisms = [Mechanism.of_json(row.mechanism) for row in rows]
    delta = min(each.delta for each in mechanisms)
    spent = [each.releases(row.rounds) for each, row in zip(mechanisms, rows, strict=True)]
    return AcrossRuns(
        dataset,
        compose(spent, delta),
        delta,
        [
            RunTotal(row.run, row.run_name, row.rounds, row.epsilon, each.delta)
            for each, row in zip(mechanisms, rows, strict=True)
        ],
    )
