"""What operators do to rollouts: start, pause, resume, abort, and let a failed device retry.

Each change is one transaction with its event. The controller (`coordinator.rollouts.controller`) does the rest.
"""

from __future__ import annotations

import secrets
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from sqlalchemy import Connection

from coordinator.context.services import Services
from coordinator.db import events, participants
from coordinator.errors import Refusal
from coordinator.project_names import DEFAULT_PROJECT
from coordinator.releases.repository import Release
from coordinator.rollouts import engine, plan, queries
from coordinator.rollouts.gates import Gates, require_gates
from coordinator.rollouts.plan import Filter
from coordinator.rollouts.reports import TOPIC
from coordinator.rollouts.tables import UNFINISHED_STATES, MemberRow, RolloutRow, State

_FORCIBLE_STATES = (*UNFINISHED_STATES, "finished")
_TRANSITIONS: Mapping[State, tuple[str, Sequence[str]]] = {
    "paused": ("pause", ("created", "running")),
    "running": ("resume", ("paused",)),
    "aborted": ("abort", _FORCIBLE_STATES),
}
"""New state -> the operator's verb, and the states that it is possible from."""


def start(
    services: Services,
    releases: Collection[Release],
    model: str,
    version: int,
    *,
    percents: Sequence[float] = plan.DEFAULT_PHASES,
    device_filter: Filter = Filter(),  # noqa: B008 - frozen
    gates: Gates = Gates(),  # noqa: B008 - frozen
    task: str | None = None,
) -> RolloutRow:
    """Creates a rollout of a published release, and fixes its members and their phases.

    `releases`: those published now. `task`: what the release predicts; None: classes. Devices that could not run this release before become barred members; `force`
    lets one of them retry.

    Raises:
        UserError: invalid phases or gates.
        Refusal: 404 `unknown_release`; 409 `rollout_under_way`, `no_devices`, `too_many_devices`.
    """
    percents, gates = plan.require_phases(percents), require_gates(gates, task)
    if not any(each.name.model == model and each.name.version == version for each in releases):
        raise Refusal(
            404,
            "unknown_release",
            f"{model[:100]}:{version} is not published; list the releases: fedloop release list",
        )
    now = services.clock()
    rollout = RolloutRow(
        id=str(uuid.uuid4()),
        model=model,
        version=version,
        state="created",
        phase=-1,
        keep=False,
        reason=None,
        salt=secrets.token_hex(8),
        filter=asdict(device_filter),
        gates=asdict(gates),
        created_at=now,
        since=now,
        project=services.project or DEFAULT_PROJECT,
    )
    services.commit(partial(_create, rollout=rollout, percents=percents, device_filter=device_filter), TOPIC)
    return rollout


def change_state(services: Services, rollout: str, state: State, *, keep: bool = False) -> RolloutRow:
    """Brings a rollout into one of these states.

    paused: the release is offered to no further devices; those already offered it continue.
    running: continues a paused rollout; the deadline of its phase starts again.
    aborted: for good. Its devices return to their previous version, unless `keep`. A finished rollout can be aborted too,
    once all newer rollouts of its model are rolled back.

    Raises:
        Refusal: 404 `unknown_rollout`; 409 `rollout_state`, `not_the_newest`.
    """
    verb, allowed = _TRANSITIONS[state]

    def work(connection: Connection) -> RolloutRow:
        now = services.clock()
        row = queries.require(connection, rollout)
        if row.state not in allowed:
            raise _wrong_state(row, verb)
        if row.state == "finished":
            _require_newest(connection, row)
        if keep:
            row = queries.change(connection, row, now, keep=True)
        after: State = "created" if state == "running" and row.phase < 0 else state
        event = "rollout_resumed" if state == "running" else f"rollout_{state}"
        changed = queries.change(connection, row, now, state=after)
        queries.bump_directions(connection, row.model)
        events.record(connection, now, event, rollout=row.id, release=row.release, phase=row.phase, keep=keep)
        return changed

    return services.commit(work, TOPIC)


def force(services: Services, rollout: str, device: str) -> MemberRow:
    """Lets a failed or barred device try the release once more.

    Raises:
        Refusal: 404 `unknown_rollout`, `not_a_member`; 409 `rollout_state`, `did_not_fail`.
    """

    def work(connection: Connection) -> MemberRow:
        now = services.clock()
        row = queries.require(connection, rollout)
        if row.state not in _FORCIBLE_STATES:
            raise _wrong_state(row, "force a device of")
        member = queries.find_member(connection, rollout, device)
        if member is None:
            raise Refusal(404, "not_a_member", f"device {device[:100]} is not in rollout {row.id}")
        if member.standing not in ("failed", "barred"):
            raise Refusal(
                409,
                "did_not_fail",
                f"device {device} did not fail with this release: it is {member.standing}",
            )
        changed = replace(
            member, standing="waiting", told=None, force=True, code=None, words=None, changed_at=now
        )
        queries.save_member(connection, changed)
        queries.bump_directions(connection, row.model)
        events.record(
            connection, now, "rollout_device_forced", device=device, rollout=row.id, release=row.release
        )
        return changed

    return services.commit(work, TOPIC)


def _create(
    connection: Connection, rollout: RolloutRow, percents: Sequence[float], device_filter: Filter
) -> None:
    unfinished = queries.in_states(connection, UNFINISHED_STATES, rollout.model)
    if unfinished:
        other = unfinished[0]
        raise Refusal(
            409,
            "rollout_under_way",
            f"rollout {other.id} of {other.release} is {other.state}; abort it first, or let it finish",
            rollout=other.id,
        )
    rows = _members(connection, rollout, percents, device_filter)
    queries.add(connection, rollout, percents, rows)
    queries.bump_directions(connection, rollout.model)
    sizes = Counter(row.phase for row in rows if row.standing != "barred")
    events.record(
        connection,
        rollout.created_at,
        "rollout_created",
        rollout=rollout.id,
        release=rollout.release,
        phases=[sizes[phase] for phase in range(len(percents))],
        barred=len(rows) - sizes.total(),
    )


def _members(
    connection: Connection, rollout: RolloutRow, percents: Sequence[float], device_filter: Filter
) -> list[MemberRow]:
    """The devices that the filter admits, each in its phase; those that failed before are barred.

    Raises:
        Refusal: 409 `no_devices`, `too_many_devices`.
    """
    admitted = {each.id for each in participants.everyone(connection) if plan.admits(device_filter, each)}
    if not admitted:
        raise Refusal(
            409,
            "no_devices",
            "no device matches: none that the filter admits has checked in with wire 1.3 or newer",
        )
    if len(admitted) > plan.MAX_DEVICES:
        raise Refusal(
            409,
            "too_many_devices",
            f"{len(admitted)} devices match, and a rollout names at most {plan.MAX_DEVICES}; start one rollout per "
            "part of them, with --filter",
        )
    barred = queries.failed_before(connection, rollout.model, rollout.version) & admitted
    rows = [
        MemberRow(rollout.id, device, phase, "waiting", rollout.created_at)
        for phase, devices in enumerate(plan.phases(admitted - barred, percents, rollout.salt))
        for device in devices
    ]
    return rows + [
        MemberRow(
            rollout.id,
            device,
            0,
            "barred",
            rollout.created_at,
            code="failed_before",
            words="failed with this release before",
        )
        for device in sorted(barred)
    ]


def _require_newest(connection: Connection, row: RolloutRow) -> None:
    """Requires that every newer rollout of the model was rolled back.

    Raises:
        Refusal: 409 `not_the_newest`.
    """
    for each in queries.newest(connection, queries.RECENT_ROLLOUTS, row.model):
        if each.id == row.id:
            return
        if each.state not in engine.ROLLING_BACK_STATES or each.keep:
            raise Refusal(
                409,
                "not_the_newest",
                f"rollout {each.id} of {each.release} is newer, and {each.state}; only the newest rollout in force can be "
                "rolled back, so abort that one first",
            )
    raise Refusal(
        409,
        "not_the_newest",
        f"{row.model} had {queries.RECENT_ROLLOUTS} rollouts since; older ones cannot be rolled back",
    )


def _wrong_state(row: RolloutRow, verb: str) -> Refusal:
    return Refusal(
        409, "rollout_state", f"cannot {verb} rollout {row.id}: it is {row.state}", state=row.state
    )
