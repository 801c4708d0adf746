"""What devices have spent, in one run and in all of their runs together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from sqlalchemy import Row

from coordinator.privacy.mechanism import Hidden, Mechanism, Releases, compose


@dataclass(frozen=True)
class RunSpending:
    """What a device has spent in a run.

    Attributes:
        rounds: in which its update was, or may have been; of them the first and the last.
        hides: what epsilon is about.
    """

    run: str
    run_name: str
    dataset: str
    rounds: int
    first_round: int
    last_round: int
    epsilon: float
    delta: float
    hides: Hidden


@dataclass(frozen=True)
class Together:
    """What runs that hide the same have spent together. `delta`: the smallest of the runs'."""

    epsilon: float
    delta: float
    runs: int


@dataclass(frozen=True)
class DeviceSpending:
    """What a device has spent in all of its runs, the newest first, which compose as `privacy.mechanism` says.

    Attributes:
        together: by what the runs hide.
    """

    device: str
    name: str
    together: Mapping[Hidden, Together]
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
    """What all runs on a data set that hide the same have spent of a device that took part wherever it could: no device has spent more."""

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
        mechanism.hides,
    )
    return spent, releases


def _together(device: str, name: str, found: Sequence[tuple[RunSpending, Releases | None]]) -> DeviceSpending:
    together: dict[Hidden, Together] = {}
    for hides in get_args(Hidden):
        same = [(run, releases) for run, releases in found if run.hides == hides]
        if same:
            delta = min(run.delta for run, _ in same)
            epsilon = compose([releases for _, releases in same], delta)
            together[hides] = Together(epsilon, delta, len(same))
    return DeviceSpending(device, name, together, [run for run, _ in found])


def across_runs(dataset: str, hides: Hidden, rows: Sequence[Row[Any]]) -> AcrossRuns | None:
    """What all runs on a data set that hide the same have spent together; None: nothing. `rows`: of `privacy.of_dataset`."""
    rows = [row for row in rows if Mechanism.of_json(row.mechanism).hides == hides]
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
