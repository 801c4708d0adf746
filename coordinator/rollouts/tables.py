"""Tables of rollouts, their phases, their members and their directions, and the rows read from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import JSON, Boolean, Column, Float, ForeignKey, Integer, String, Table, Text

from coordinator.db.project_filter import project_column
from coordinator.db.tables import UTCDateTime, columns_of, metadata
from coordinator.project_names import DEFAULT_PROJECT
from coordinator.rollouts.gates import Gates

State = Literal["created", "running", "paused", "halted", "rolled_back", "aborted", "finished"]
Standing = Literal["waiting", "installing", "active", "failed", "rolled_back", "barred"]
Action = Literal["install", "roll_back"]

UNFINISHED_STATES = ("created", "running", "paused")
"""A model's next rollout must wait while one is in these states."""

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("number", Integer, nullable=False, unique=True),  # in order of creation, whatever the clock
    Column("model", String(63), nullable=False, index=True),
    Column("version", Integer, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("phase", Integer, nullable=False),  # the last opened one; -1: none
    Column("keep", Boolean, nullable=False),  # aborted, and devices keep the release
    Column("reason", Text, nullable=True),
    Column("salt", String(32), nullable=False),
    Column("filter", JSON, nullable=False),  # rollouts.plan.Filter
    Column("gates", JSON, nullable=False),  # rollouts.gates.Gates
    Column("created_at", UTCDateTime, nullable=False),
    Column("since", UTCDateTime, nullable=False),  # when the state or the phase last changed
    project_column(),
)

rollout_phases = Table(
    "rollout_phases",
    metadata,
    Column("rollout", String(36), ForeignKey("rollouts.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("percent", Float, nullable=False),
    Column("opened_at", UTCDateTime, nullable=True),
    Column("passed_at", UTCDateTime, nullable=True),
)

rollout_members = Table(
    "rollout_members",
    metadata,
    Column("rollout", String(36), ForeignKey("rollouts.id"), primary_key=True),
    Column("device", String(36), ForeignKey("devices.id"), primary_key=True, index=True),
    Column("phase", Integer, nullable=False),
    Column("standing", String(16), nullable=False),
    Column("told", String(16), nullable=True),  # install | roll_back: the last instruction it received
    Column("previous", Integer, nullable=True),  # version it ran at that moment; null: none
    Column("force", Boolean, nullable=False),
    Column("code", String(40), nullable=True),
    Column("words", Text, nullable=True),
    Column("golden_accuracy", Float, nullable=True),
    Column("labels", Float, nullable=True),
    Column("correct", Float, nullable=True),
    Column("loss_sum", Float, nullable=True),
    Column("champion_correct", Float, nullable=True),
    Column("champion_loss_sum", Float, nullable=True),
    Column("changed_at", UTCDateTime, nullable=False),
)

rollout_directions = Table(
    "rollout_directions",
    metadata,
    Column("model", String(63), primary_key=True),
    Column("revision", Integer, nullable=False),
    Column("signed", Integer, nullable=False),  # the revision that the repository last signed
)


@dataclass(frozen=True)
class RolloutRow:
    """A row of `rollouts`."""

    id: str
    model: str
    version: int
    state: State
    phase: int
    keep: bool
    reason: str | None
    salt: str
    filter: Mapping[str, Any]
    gates: Mapping[str, Any]
    created_at: datetime
    since: datetime
    project: str = DEFAULT_PROJECT

    @property
    def gate_values(self) -> Gates:
        return Gates(**self.gates)

    @property
    def release(self) -> str:
        """The release, written `model:version`."""
        return f"{self.model}:{self.version}"


@dataclass(frozen=True)
class MemberRow:
    """A device in a rollout. The figures of the comparison are None where the device had no champion to compare with."""

    rollout: str
    device: str
    phase: int
    standing: Standing
    changed_at: datetime
    told: Action | None = None
    previous: int | None = None
    force: bool = False
    code: str | None = None
    words: str | None = None
    golden_accuracy: float | None = None
    labels: float | None = None
    correct: float | None = None
    loss_sum: float | None = None
    champion_correct: float | None = None
    champion_loss_sum: float | None = None


@dataclass(frozen=True)
class PhaseRow:
    """A phase of a rollout; `percent` of the devices have the release at its end."""

    number: int
    percent: float
    opened_at: datetime | None
    passed_at: datetime | None


@dataclass(frozen=True)
class FailureRow:
    """Devices that failed for one reason; `device` is one of them, `words` its message."""

    code: str
    devices: int
    device: str
    words: str


ROLLOUT_COLUMNS = columns_of(rollouts, RolloutRow)
MEMBER_COLUMNS = columns_of(rollout_members, MemberRow)
