"""Operator API: rollouts. Start one, follow its progress and failures, pause, resume or abort it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from coordinator.api.deps import ServicesDep
from coordinator.api.releases import visible_releases
from coordinator.db import devices
from coordinator.rollouts import controller, engine, plan, queries, service
from coordinator.rollouts.gates import Gates, Measured, Tally
from coordinator.rollouts.plan import Filter, FilterText
from coordinator.rollouts.tables import Action, FailureRow, MemberRow, PhaseRow, RolloutRow, Standing, State

router = APIRouter(prefix="/rollouts", tags=["rollouts"])

_SHOWN_DEVICES = 100


class RolloutRequest(BaseModel):
    """A published release for devices. `phases`: increasing percentages of them."""

    model_config = {"extra": "forbid", "allow_inf_nan": False}

    model: FilterText
    version: int = Field(ge=1, lt=10**9)
    phases: list[float] = Field(list(plan.DEFAULT_PHASES), min_length=1, max_length=50)
    filter: Filter = Filter()
    gates: Gates = Field(
        Gates(), description="What every phase must achieve; `fedloop rollout start --help` explains each."
    )


class Rollout(BaseModel):
    """A rollout. `phase` counts from 0; -1 before the first. `keep`: aborted, and its devices keep the release."""

    id: str
    model: str
    version: int
    state: State
    phase: int
    keep: bool
    reason: str | None
    filter: dict[str, Any]
    gates: dict[str, Any]
    created_at: datetime
    since: datetime = Field(description="When the state or the phase last changed.")


class Comparison(BaseModel):
    """Candidate and champion on the devices' own held-out rows, pooled.

    Accuracies are None of models that predict a quantity; their loss is the squared error.
    """

    labels: float
    accuracy: float | None
    champion_accuracy: float | None
    mean_loss: float
    champion_mean_loss: float


class Phase(BaseModel):
    """`devices` counts active ones; `barred` failed with the release before the rollout."""

    number: int
    percent: float
    opened_at: datetime | None
    passed_at: datetime | None
    devices: int
    waiting: int
    installing: int
    active: int
    failed: int
    rolled_back: int
    barred: int
    golden_accuracy: float | None
    comparison: Comparison | None


class RolloutMember(BaseModel):
    """A device in a rollout. `told`: its last instruction; `previous`: the version it ran at that moment, null for none."""

    device: str
    name: str
    phase: int
    standing: Standing
    told: Action | None
    previous: int | None
    code: str | None
    words: str | None
    golden_accuracy: float | None
    changed_at: datetime


class RolloutDetails(Rollout):
    """With progress by phase. `waits`: what the open phase waits for. `outstanding`: devices yet to roll back."""

    phases: list[Phase]
    measured: list[Measured] = Field(description="Each gate with what was measured of it.")
    failures: list[FailureRow]
    stays: list[FailureRow] = Field(
        description="Devices that were told to roll back and still run the release, with the reason they report: "
        "`not_withdrawn` if they had no previous version and the release is not withdrawn."
    )
    waits: list[str]
    undecided: str | None = Field(description="Why candidate and champion cannot be told apart yet.")
    outstanding: int
    is_signed: bool = Field(description="Whether the repository has signed the newest directions.")


class AbortRequest(BaseModel):
    """`keep`: devices that have the release keep it; otherwise they roll back."""

    keep: bool = False


class ForceRequest(BaseModel):
    device: FilterText


@router.post("", status_code=201)
def start_rollout(request: RolloutRequest, services: ServicesDep) -> Rollout:
    """Starts a rollout of a published release."""
    releases = visible_releases(services)
    is_known = any(
        (each.name.model, each.name.version) == (request.model, request.version) for each in releases
    )
    started = service.start(
        services,
        releases,
        request.model,
        request.version,
        percents=request.phases,
        device_filter=request.filter,
        gates=request.gates,
        task=services.releases.task_of(request.model, request.version) if is_known else None,
    )
    return Rollout(**vars(started))


@router.get("")
def list_rollouts(
    services: ServicesDep,
    model: Annotated[str | None, Query(pattern="^[^\\x00]*$")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[Rollout]:
    """Rollouts, newest first."""
    return [
        Rollout(**vars(row)) for row in services.database.read(lambda at: queries.newest(at, limit, model))
    ]


@router.get("/{rollout}")
def get_rollout(rollout: str, services: ServicesDep) -> RolloutDetails:
    """One rollout: its progress, and why devices failed."""
    return services.database.read(lambda at: _details(at, queries.require(at, rollout), services.clock()))


@router.get("/{rollout}/devices")
def list_rollout_devices(
    rollout: str,
    services: ServicesDep,
    standing: Annotated[list[Standing] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = _SHOWN_DEVICES,
) -> list[RolloutMember]:
    """The devices of a rollout by phase; only those in one of these standings, if given."""

    def read(at: Connection) -> list[RolloutMember]:
        rows = queries.members_of(at, queries.require(at, rollout).id, standing, limit)
        return _render_members(at, rows)

    return services.database.read(read)


@router.post("/{rollout}/pause")
def pause_rollout(rollout: str, services: ServicesDep) -> Rollout:
    """Stops offering the release to further devices; those already offered it continue."""
    return Rollout(**vars(service.change_state(services, rollout, "paused")))


@router.post("/{rollout}/resume")
def resume_rollout(rollout: str, services: ServicesDep) -> Rollout:
    """Continues a paused rollout."""
    return Rollout(**vars(service.change_state(services, rollout, "running")))


@router.post("/{rollout}/abort")
def abort_rollout(rollout: str, request: AbortRequest, services: ServicesDep) -> Rollout:
    """Ends a rollout for good; its devices roll back, unless `keep`."""
    return Rollout(**vars(service.change_state(services, rollout, "aborted", keep=request.keep)))


@router.post("/{rollout}/force")
def force_rollout_device(rollout: str, request: ForceRequest, services: ServicesDep) -> RolloutMember:
    """Lets a device that failed with the release try it once more."""
    forced = service.force(services, rollout, request.device)
    return services.database.read(lambda at: _render_members(at, [forced]))[0]


def _render_members(at: Connection, rows: Sequence[MemberRow]) -> list[RolloutMember]:
    names = devices.names(at, [row.device for row in rows])
    return [RolloutMember(name=names[row.device], **vars(row)) for row in rows]


def _details(at: Connection, row: RolloutRow, now: datetime) -> RolloutDetails:
    tallies, standings = queries.tallies(at, row.id), queries.standings(at, row.id)
    of_accuracy = row.gates.get("max_accuracy_drop") is not None
    phases = [
        _render_phase(
            each, tallies.get(each.number, Tally()), standings.get((each.number, "barred"), 0), of_accuracy
        )
        for each in queries.phases_of(at, row.id)
    ]
    rolls_back = row.state in engine.ROLLING_BACK_STATES and not row.keep
    failed_rollbacks = queries.rollback_failures(at, row.id) if rolls_back else []
    return RolloutDetails(
        **vars(row),
        phases=phases,
        measured=controller.measured_gates(at, row, now),
        failures=queries.failures(at, row.id),
        stays=failed_rollbacks,
        waits=list(controller.waiting_reasons(at, row, now)),
        undecided=controller.undecided_reason(at, row),
        outstanding=queries.outstanding(at, row.id) if rolls_back and row.state != "rolled_back" else 0,
        is_signed=row.model not in queries.unsigned_revisions(at),
    )


def _render_phase(row: PhaseRow, tally: Tally, barred: int, of_accuracy: bool) -> Phase:
    return Phase(
        **vars(row),
        **vars(tally),
        waiting=tally.devices - tally.answers - tally.installing,
        barred=barred,
        golden_accuracy=tally.golden_sum / tally.golden if tally.golden else None,
        comparison=_render_comparison(tally, of_accuracy),
    )


def _render_comparison(tally: Tally, of_accuracy: bool) -> Comparison | None:
    """`of_accuracy`: whether a gate compares accuracies, which no release that predicts a quantity may have."""
    if not tally.labels:
        return None
    has_accuracy = of_accuracy or tally.correct or tally.champion_correct
    return Comparison(
        labels=tally.labels,
        accuracy=tally.correct / tally.labels if has_accuracy else None,
        champion_accuracy=tally.champion_correct / tally.labels if has_accuracy else None,
        mean_loss=tally.loss_sum / tally.labels,
        champion_mean_loss=tally.champion_loss_sum / tally.labels,
    )
