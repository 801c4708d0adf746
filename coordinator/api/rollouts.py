"""Operator API: rollouts. Start one, look how it goes and why devices failed, steer it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from coordinator.api.deps import Serving
from coordinator.db import rollouts as rows
from coordinator.db.rollouts import RolloutRow, State
from coordinator.rollouts import plan, service
from coordinator.rollouts.gates import Gates, Tally
from coordinator.rollouts.plan import Filter

router = APIRouter(prefix="/rollouts", tags=["rollouts"])

_TEXT = Annotated[str, Field(max_length=200, pattern="^[^\\x00]*$")]  # PostgreSQL has no text with NUL
_SHOWN_DEVICES = 100


class RolloutFilter(BaseModel):
    """Which devices. What is left empty admits all; ids, groups and classes: one of these; labels: all of these."""

    model_config = {"extra": "forbid"}

    groups: tuple[_TEXT, ...] = ()
    labels: dict[_TEXT, _TEXT] = {}
    device_classes: tuple[_TEXT, ...] = ()
    runtimes: tuple[_TEXT, ...] = ()
    ids: tuple[_TEXT, ...] = ()


class RolloutGates(BaseModel):
    """What every phase has to show; `fedloop rollout start --help` tells what each is."""

    model_config = {"extra": "forbid", "allow_inf_nan": False}

    install: float = Gates.install
    answered: float = Gates.answered
    min_answers: int = Gates.min_answers
    deadline_seconds: float = Gates.deadline_seconds
    soak_seconds: float = Gates.soak_seconds
    golden_accuracy: float | None = Gates.golden_accuracy
    max_accuracy_drop: float | None = Gates.max_accuracy_drop
    max_loss_increase: float | None = Gates.max_loss_increase
    min_labels: int = Gates.min_labels
    confidence: float | None = Gates.confidence


class RolloutRequest(BaseModel):
    """A published release on its way to devices. `phases`: growing percentages of them."""

    model_config = {"extra": "forbid", "allow_inf_nan": False}

    model: _TEXT
    version: int = Field(ge=1, lt=10**9)
    phases: list[float] = Field(list(plan.DEFAULT_PHASES), min_length=1, max_length=50)
    filter: RolloutFilter = RolloutFilter()
    gates: RolloutGates = RolloutGates()


class Rollout(BaseModel):
    """A rollout. `phase` counts from 0; -1 before the first. `keep`: aborted, and devices that have it keep it."""

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
    """Candidate and champion on the devices' own held-out rows, pooled."""

    labels: float
    accuracy: float
    champion_accuracy: float
    mean_loss: float
    champion_mean_loss: float


class Phase(BaseModel):
    """`devices` counts those that still take part; `barred` failed with the release before the rollout."""

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


class RolloutFailure(BaseModel):
    """Devices that could not run it for one reason; `words` are those of `device`, one of them."""

    code: str
    devices: int
    device: str
    words: str


class RolloutMember(BaseModel):
    """A device in a rollout. `told`: what it was told last; `previous`: the version it ran then, null where it ran none."""

    device: str
    phase: int
    standing: rows.Standing
    told: rows.Action | None
    previous: int | None
    code: str | None
    words: str | None
    golden_accuracy: float | None
    changed_at: datetime


class RolloutDetails(Rollout):
    """With progress by phase. `waits`: what the open phase waits for. `outstanding`: devices yet to go back."""

    phases: list[Phase]
    failures: list[RolloutFailure]
    waits: list[str]
    outstanding: int
    is_signed: bool = Field(description="Whether the signed repository says who is to run what.")


class AbortRequest(BaseModel):
    """`keep`: devices that have the release keep it; else they go back."""

    keep: bool = False


class ForceRequest(BaseModel):
    device: _TEXT


@router.post("", status_code=201)
def start_rollout(asked: RolloutRequest, services: Serving) -> Rollout:
    """Starts a rollout of a published release."""
    made = service.start(
        services,
        services.releases,
        asked.model,
        asked.version,
        percents=asked.phases,
        wanted=Filter(**asked.filter.model_dump()),
        gates=Gates(**asked.gates.model_dump()),
    )
    return _shown(made)


@router.get("")
def list_rollouts(
    services: Serving,
    model: Annotated[str | None, Query(pattern="^[^\\x00]*$")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[Rollout]:
    """Rollouts, the newest first."""
    return [_shown(row) for row in services.database.read(lambda at: rows.newest(at, limit, model))]


@router.get("/{rollout}")
def get_rollout(rollout: str, services: Serving) -> RolloutDetails:
    """One rollout: how far it is, and why devices failed."""
    return services.database.read(lambda at: _details(at, service.known(at, rollout), services.clock()))


@router.get("/{rollout}/devices")
def list_rollout_devices(
    rollout: str,
    services: Serving,
    standing: Annotated[list[rows.Standing] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = _SHOWN_DEVICES,
) -> list[RolloutMember]:
    """The devices of a rollout by phase; only those that stand so, if asked."""

    def read(at: Connection) -> list[RolloutMember]:
        found = rows.members_of(at, service.known(at, rollout).id, standing, limit)
        return [
            RolloutMember(**{key: getattr(each, key) for key in RolloutMember.model_fields}) for each in found
        ]

    return services.database.read(read)


@router.post("/{rollout}/pause")
def pause_rollout(rollout: str, services: Serving) -> Rollout:
    """No more devices hear of it; those that did go on."""
    return _shown(service.pause(services, rollout))


@router.post("/{rollout}/resume")
def resume_rollout(rollout: str, services: Serving) -> Rollout:
    """Goes on where it was paused."""
    return _shown(service.resume(services, rollout))


@router.post("/{rollout}/abort")
def abort_rollout(rollout: str, asked: AbortRequest, services: Serving) -> Rollout:
    """Ends it for good; devices that have the release go back, unless they are to keep it."""
    return _shown(service.abort(services, rollout, keep=asked.keep))


@router.post("/{rollout}/force")
def force_rollout_device(rollout: str, asked: ForceRequest, services: Serving) -> RolloutMember:
    """Lets a device that failed with the release try it once more."""
    member = service.force(services, rollout, asked.device)
    return RolloutMember(**{key: getattr(member, key) for key in RolloutMember.model_fields})


def _shown(row: RolloutRow) -> Rollout:
    return Rollout(**{key: getattr(row, key) for key in Rollout.model_fields})


def _details(at: Connection, row: RolloutRow, now: datetime) -> RolloutDetails:
    found, standings = rows.tallies(at, row.id), rows.standings(at, row.id)
    phases = [
        _phase(each, found.get(each.number, Tally()), standings.get((each.number, "barred"), 0))
        for each in rows.phases_of(at, row.id)
    ]
    return RolloutDetails(
        **_shown(row).model_dump(),
        phases=phases,
        failures=[RolloutFailure(**vars(each)) for each in rows.failures(at, row.id)],
        waits=list(service.waits(at, row, now)),
        outstanding=rows.outstanding(at, row.id)
        if row.state in ("halted", "aborted") and not row.keep
        else 0,
        is_signed=row.model not in rows.unsigned(at),
    )


def _phase(row: rows.PhaseRow, tally: Tally, barred: int) -> Phase:
    return Phase(
        **vars(row),
        devices=tally.devices,
        waiting=tally.devices - tally.answers - tally.installing,
        installing=tally.installing,
        active=tally.active,
        failed=tally.failed,
        rolled_back=tally.rolled_back,
        barred=barred,
        golden_accuracy=tally.golden_sum / tally.golden if tally.golden else None,
        comparison=_comparison(tally),
    )


def _comparison(tally: Tally) -> Comparison | None:
    if not tally.labels:
        return None
    return Comparison(
        labels=tally.labels,
        accuracy=tally.correct / tally.labels,
        champion_accuracy=tally.champion_correct / tally.labels,
        mean_loss=tally.loss_sum / tally.labels,
        champion_mean_loss=tally.champion_loss_sum / tally.labels,
    )
