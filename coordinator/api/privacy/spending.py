"""Operator API: epsilon spent and left, per run and per device, with what it assumes in words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Row

from coordinator.accounts import enrolment
from coordinator.api.deps import ServicesDep
from coordinator.db import devices, privacy
from coordinator.db import runs as rows
from coordinator.db.privacy import LedgerRow
from coordinator.errors import Refusal
from coordinator.privacy.accountant import AccountantName, Adjacency, Sampling
from coordinator.privacy.mechanism import Hidden, Mechanism, across_runs_in_words
from coordinator.reports.privacy import description, spending
from coordinator.reports.privacy.spending import AcrossRuns, DeviceSpending, RunSpending, Together

router = APIRouter(tags=["privacy"])

_NO_NUL = "^[^\\x00]*$"  # PostgreSQL rejects NUL in text


class RunPrivacy(BaseModel):
    """The differential privacy of a run by its ledger."""

    mechanism: str
    clipping: str
    noise_multiplier: float
    epsilon: float = Field(description="That the charged rounds have spent.")
    delta: float
    accountant: AccountantName
    adjacency: Adjacency
    sampling: Sampling
    budget: float | None = Field(description="Epsilon beyond which no round begins; null: there is no limit.")
    rounds: int = Field(description="Charged; one more than is committed while a round is being released.")
    rounds_planned: int
    rounds_left: int = Field(
        description="That may still begin: within the budget, each spending as those before, and as many as are planned."
    )
    ended_by_budget: bool
    in_words: str = Field(description="The guarantee so far, in a sentence.")
    assumptions: list[str] = Field(description="What epsilon supposes, in words.")
    outside: list[str] = Field(description="What the guarantee does not cover, in words.")
    charged_at: datetime | None
    devices: int = Field(description="That have spent something.")
    across_runs: AcrossRuns | None = Field(
        description="What all runs on the same data set that hide the same together have spent of a device that was in every round it could be "
        "in: no device has spent more. Null before the first charged round."
    )
    across_runs_in_words: str


class PrivateRun(BaseModel):
    """What a run has spent of its budget."""

    run: str
    name: str
    state: Literal["queued", "running", "finished", "failed", "cancelled"]
    dataset: str
    mechanism: str
    epsilon: float = Field(description="That the charged rounds have spent.")
    delta: float
    budget: float | None = Field(description="Epsilon beyond which no round begins; null: there is no limit.")
    rounds: int = Field(description="Charged; one more than is committed while a round is being released.")
    rounds_planned: int
    rounds_left: int = Field(
        description="That may still begin: within the budget, each spending as those before, and as many as are planned."
    )
    ended_by_budget: bool
    charged_at: datetime | None


class PrivateRuns(BaseModel):
    """A page of runs, newest first."""

    runs: list[PrivateRun]
    next: str | None = Field(description="`before` for the next page; null on the last one.")


class RunDevicePrivacy(BaseModel):
    """What a device has spent in this run, and in all of its runs together that hide the same."""

    device: str
    name: str
    rounds: int = Field(description="In which its update was, or may have been.")
    first_round: int
    last_round: int
    epsilon: float
    epsilon_across_runs: float
    delta_across_runs: float


class RunDevicesPrivacy(BaseModel):
    """A page of devices, by id."""

    devices: list[RunDevicePrivacy]
    next: str | None = Field(description="`after` for the next page; null on the last one.")


class DevicePrivacy(BaseModel):
    """What a device has spent in all of its runs together, and in each.

    `epsilon`, `delta`: of runs that hide whole devices, null if it has spent nothing in one. `of_rows`: the same of runs that hide single rows
    (DP-SGD), which does not add up with the others.
    """

    device: str
    name: str
    epsilon: float
    delta: float | None
    of_rows: Together | None
    in_words: str
    runs: list[RunSpending]


@router.get("/privacy/runs")
def list_private_runs(
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    before: Annotated[
        str | None, Query(pattern=_NO_NUL, description="Only runs older than this one, by its id.")
    ] = None,
) -> PrivateRuns:
    """Runs with differential privacy that have been prepared, newest first, each with what is left of its budget."""

    def read(connection: Connection) -> Sequence[Row[Any]]:
        newer = None if before is None else rows.require(connection, before)
        return privacy.newest_runs(connection, limit + 1, newer)

    found = services.database.read(read)
    page = [_show_run(row) for row in found[:limit]]
    return PrivateRuns(runs=page, next=page[-1].run if len(found) > limit else None)


def _show_run(row: Row[Any]) -> PrivateRun:
    mechanism, budget = Mechanism.of_json(row.mechanism), row.experiment["privacy"].get("budget")
    return PrivateRun(
        run=row.id,
        name=row.name,
        state=row.state,
        dataset=row.experiment["data"]["dataset"],
        mechanism=row.experiment["privacy"]["mechanism"],
        epsilon=row.epsilon,
        delta=mechanism.delta,
        budget=budget,
        rounds=row.rounds,
        rounds_planned=row.experiment["federation"]["rounds"],
        **description.what_is_left(mechanism, row.rounds, budget),
        charged_at=row.charged_at,
    )


@router.get("/runs/{run}/privacy")
def get_run_privacy(run: str, services: ServicesDep) -> RunPrivacy:
    """What a run has spent, and what is left.

    409 `not_private`: the run has no differential privacy; `not_prepared`: it has not spent anything yet.
    """

    def read(connection: Connection) -> tuple[Row[Any], LedgerRow, int, Sequence[Row[Any]]]:
        row = rows.require(connection, run)
        ledger = _require_ledger(connection, row)
        others = privacy.of_dataset(connection, row.project, row.experiment["data"]["dataset"])
        return row, ledger, privacy.count_devices(connection, run), others

    row, ledger, count, others = services.database.read(read)
    hides = Mechanism.of_json(ledger.mechanism).hides
    return RunPrivacy(
        **description.describe_ledger(row.experiment, ledger),
        rounds_planned=row.experiment["federation"]["rounds"],
        charged_at=ledger.charged_at,
        devices=count,
        across_runs=spending.across_runs(row.experiment["data"]["dataset"], hides, others),
        across_runs_in_words=across_runs_in_words(hides),
    )


@router.get("/runs/{run}/privacy/devices")
def list_run_spending(
    run: str,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: Annotated[str | None, Query(pattern=_NO_NUL, description="Only ids after this one.")] = None,
) -> RunDevicesPrivacy:
    """What devices have spent in a run, a page at a time. Refusals as of the run."""

    def read(connection: Connection) -> tuple[dict[str, str], Sequence[Row[Any]], bool]:
        _require_ledger(connection, rows.require(connection, run))
        found = privacy.of_devices(connection, run, limit + 1, after)
        names = devices.names(connection, found[:limit])
        page = {device: names[device] for device in found[:limit]}
        return page, privacy.spent_by(connection, found[:limit]), len(found) > limit

    names, spent, is_cut = services.database.read(read)
    page = spending.of_devices(names, spent)
    return RunDevicesPrivacy(
        devices=[_of_run(each, run) for each in page], next=page[-1].device if is_cut else None
    )


@router.get("/devices/{device}/privacy")
def get_device_privacy(device: str, services: ServicesDep) -> DevicePrivacy:
    """What a device has spent in all of its runs."""

    def read(connection: Connection) -> tuple[dict[str, str], Sequence[Row[Any]]]:
        found = enrolment.require_device(connection, device)
        return {found.id: found.name}, privacy.spent_by(connection, [found.id])

    (spent,) = spending.of_devices(*services.database.read(read))
    return DevicePrivacy(
        device=spent.device,
        name=spent.name,
        epsilon=0.0 if (whole := spent.together.get("device")) is None else whole.epsilon,
        delta=None if whole is None else whole.delta,
        of_rows=spent.together.get("row"),
        in_words=_in_words(spent),
        runs=list(spent.runs),
    )


def _in_words(spent: DeviceSpending) -> str:
    return "; ".join(_together_in_words(*each) for each in spent.together.items()) or "it has spent nothing"


def _together_in_words(hides: Hidden, spent: Together) -> str:
    runs = f"{spent.runs} run{'s' * (spent.runs != 1)}"
    return f"(epsilon {spent.epsilon:.4g}, delta {spent.delta:g}) in {runs}, {across_runs_in_words(hides)}"


def _of_run(spent: DeviceSpending, run: str) -> RunDevicePrivacy:
    here = next(each for each in spent.runs if each.run == run)
    together = spent.together[here.hides]
    return RunDevicePrivacy(
        device=spent.device,
        name=spent.name,
        rounds=here.rounds,
        first_round=here.first_round,
        last_round=here.last_round,
        epsilon=here.epsilon,
        epsilon_across_runs=together.epsilon,
        delta_across_runs=together.delta,
    )


def _require_ledger(connection: Connection, run: Row[Any]) -> LedgerRow:
    """The ledger of a run. Raises: Refusal: 409 `not_private`, `not_prepared`."""
    ledger = privacy.find(connection, run.id)
    if ledger is not None:
        return ledger
    if not run.experiment.get("privacy", {}).get("mechanism"):
        raise Refusal(409, "not_private", f"run {run.id} has no differential privacy (privacy.mechanism)")
    raise Refusal(409, "not_prepared", f"run {run.id} is not prepared yet, and has spent nothing")
