"""Rollouts of this process: made and steered by people, carried on by one thread.

    a report or a person ─► signal "rollouts" ─► turn: decide ─► sign ─► wake the devices that are to hear of it

A turn decides in one transaction for each rollout, with its events, then has the repository say who is to run what,
then marks that as signed; devices are told only what is. Killed anywhere, the next process's first turn goes on: what
was not decided is decided, what was not signed is signed.
"""

from __future__ import annotations

import secrets
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from typing import Any, Protocol

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from coordinator.db import events, participants, rollouts
from coordinator.db.rollouts import GOES_ON, MemberRow, RolloutRow
from coordinator.errors import Refusal
from coordinator.releases.repository import Release
from coordinator.rollouts import engine, plan
from coordinator.rollouts.gates import Gates, Tally, judge, require_gates
from coordinator.rollouts.plan import Filter
from coordinator.rollouts.reports import TOPIC
from coordinator.services import Services

_log = structlog.get_logger("fedloop.rollouts")

_OPEN = ("created", "running")

_LOOK_AGAIN_SECONDS = 5.0
"""Deadlines pass without a signal."""


class Releases(Protocol):
    """What rollouts need of the signed repository (`coordinator.releases.repository.Repository`)."""

    def releases(self) -> Sequence[Release]: ...

    def set_rollouts(self, model: str, document: Mapping[str, Any]) -> None: ...


def start(
    services: Services,
    releases: Releases,
    model: str,
    version: int,
    *,
    percents: Sequence[float] = plan.DEFAULT_PHASES,
    wanted: Filter = Filter(),  # noqa: B008 - frozen
    gates: Gates = Gates(),  # noqa: B008 - frozen
) -> RolloutRow:
    """A new rollout of a published release. Who is in it, and in which phase, is fixed here.

    Devices that could not run this release before are members that are barred: `force` lets one try again.

    Raises:
        UserError: phases or gates are none.
        Refusal: 404 `unknown_release`; 409 `rollout_under_way`, `no_devices`, `too_many_devices`.
    """
    percents, gates = plan.require_phases(percents), require_gates(gates)
    if not any(each.name.model == model and each.name.version == version for each in releases.releases()):
        raise Refusal(
            404,
            "unknown_release",
            f"{model[:100]}:{version} is not published; see them: fedloop release list",
        )
    now = services.clock()
    made = RolloutRow(
        id=str(uuid.uuid4()),
        model=model,
        version=version,
        state="created",
        phase=-1,
        keep=False,
        reason=None,
        salt=secrets.token_hex(8),
        filter=asdict(wanted),
        gates=asdict(gates),
        created_at=now,
        since=now,
    )
    services.database.write(partial(_create, made=made, percents=percents, wanted=wanted)).result()
    services.signals.notify(TOPIC, "events")
    return made


def pause(services: Services, rollout: str) -> RolloutRow:
    """No more devices hear of it; those that did go on.

    Raises:
        Refusal: 404 `unknown_rollout`; 409 `rollout_state`.
    """
    return _steer(services, rollout, ("created", "running"), "paused")


def resume(services: Services, rollout: str) -> RolloutRow:
    """Goes on where it was paused, with the deadline of the phase begun anew.

    Raises:
        Refusal: 404 `unknown_rollout`; 409 `rollout_state`.
    """
    return _steer(services, rollout, ("paused",), "running")


def abort(services: Services, rollout: str, *, keep: bool = False) -> RolloutRow:
    """Ends it for good. Devices that have the release go back to what they had, unless they are to `keep` it.

    A finished rollout can be aborted too, once all newer ones of its model were taken back.

    Raises:
        Refusal: 404 `unknown_rollout`; 409 `rollout_state`, `not_the_newest`.
    """
    return _steer(services, rollout, (*GOES_ON, "finished"), "aborted", keep=keep)


def force(services: Services, rollout: str, device: str) -> MemberRow:
    """Lets a device that failed, or did before, take the release once more.

    Raises:
        Refusal: 404 `unknown_rollout`, `not_a_member`; 409 `rollout_state`, `did_not_fail`.
    """

    def again(connection: Connection) -> MemberRow:
        now = services.clock()
        row = known(connection, rollout)
        if row.state not in (*GOES_ON, "finished"):
            raise _wrong_state(row, "force a device of")
        member = rollouts.member(connection, rollout, device)
        if member is None:
            raise Refusal(404, "not_a_member", f"device {device[:100]} is not in rollout {row.id}")
        if member.standing not in ("failed", "barred"):
            raise Refusal(
                409, "did_not_fail", f"device {device} has not failed with it: it stands as {member.standing}"
            )
        changed = replace(
            member, standing="waiting", told=None, force=True, code=None, words=None, changed_at=now
        )
        rollouts.save_member(connection, changed)
        rollouts.redirect(connection, row.model)
        events.record(connection, now, "rollout_device_forced", device=device, **_about(row))
        return changed

    changed = services.database.write(again).result()
    services.signals.notify(TOPIC, "events")
    return changed


def turn(services: Services, releases: Releases) -> bool:
    """Decides what can be decided and has it signed; whether anything changed."""
    database, changed = services.database, _halt_withdrawn(services, releases)
    for rollout in database.read(partial(rollouts.in_states, states=engine.DECIDES_BY_ITSELF)):
        # Figures of a large fleet are looked at beside the one writer, which looks again only where they decide something.
        while database.read(partial(_decision, rollout=rollout.id, now=services.clock())) is not None:
            changed |= database.write(partial(_decide, rollout=rollout.id, now=services.clock())).result()
    if changed:
        services.signals.notify("events")
    for model in database.read(rollouts.unsigned):
        changed |= _sign(services, releases, model)
    return changed


def waits(connection: Connection, rollout: RolloutRow, now: datetime) -> Sequence[str]:
    """What the open phase of a rollout waits for, in words."""
    if rollout.state != "running":
        return ()
    opened = _tallies(connection, rollout)[: rollout.phase + 1]
    return judge(rollout.gate_values, opened, (now - rollout.since).total_seconds()).reasons


class RolloutThread:
    """Takes turns until the signals are closed."""

    def __init__(self, services: Services, releases: Releases) -> None:
        self._services = services
        self._releases = releases
        self._thread = threading.Thread(target=self._live, name="rollouts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, patience_seconds: float = 5.0) -> None:
        """Waits for the thread, which ends because the signals are closed."""
        self._thread.join(patience_seconds)

    def _live(self) -> None:
        signals = self._services.signals
        while not signals.closed:
            seen = signals.seen(TOPIC)
            try:
                turn(self._services, self._releases)
            except (OSError, OperationalError) as error:  # a full disk, a database that is away: they pass
                _log.error("rollouts_wait", reason=str(error)[:300])
            except Exception:
                if self._services.signals.closed:
                    return
                _log.exception("rollouts_wait")
            signals.wait(TOPIC, seen, _LOOK_AGAIN_SECONDS)


def _create(connection: Connection, made: RolloutRow, percents: Sequence[float], wanted: Filter) -> None:
    under_way = rollouts.in_states(connection, GOES_ON, made.model)
    if under_way:
        other = under_way[0]
        raise Refusal(
            409,
            "rollout_under_way",
            f"rollout {other.id} of {other.model}:{other.version} is {other.state}; abort it first, or let it finish",
            rollout=other.id,
        )
    fit = [each.id for each in participants.everyone(connection) if plan.admits(wanted, each)]
    barred = rollouts.failed_before(connection, made.model, made.version) & set(fit)
    phases = plan.phases(set(fit) - barred, percents, made.salt)
    if not fit:
        raise Refusal(
            409,
            "no_devices",
            "no device fits: none that the filter admits has checked in with wire 1.3 or newer",
        )
    if len(fit) > plan.MOST_DEVICES:
        raise Refusal(
            409,
            "too_many_devices",
            f"{len(fit)} devices fit, and a rollout names {plan.MOST_DEVICES} at most; start one for each part of them, "
            "with --filter",
        )
    members = [
        MemberRow(made.id, device, number, "waiting", made.created_at)
        for number, devices_of in enumerate(phases)
        for device in devices_of
    ]
    members += [
        MemberRow(
            made.id, device, 0, "barred", made.created_at, code="failed_before", words="failed with it before"
        )
        for device in sorted(barred)
    ]
    rollouts.add(connection, made, percents, members)
    rollouts.redirect(connection, made.model)
    sizes = [len(each) for each in phases]
    events.record(
        connection, made.created_at, "rollout_created", **_about(made), phases=sizes, barred=len(barred)
    )


def _decision(connection: Connection, rollout: str, now: datetime) -> engine.Decision | None:
    row = known(connection, rollout)
    if row.state not in engine.DECIDES_BY_ITSELF:
        return None
    if row.state == "halted":
        return engine.decide(row, (), rollouts.outstanding(connection, row.id), now)
    return engine.decide(row, _tallies(connection, row), 0, now)


def _decide(connection: Connection, rollout: str, now: datetime) -> bool:
    """Takes the rollout's next decision, if there is one."""
    decision = _decision(connection, rollout, now)
    if decision is None:
        return False
    _enter(connection, known(connection, rollout), decision, now)
    return True


def _halt_withdrawn(services: Services, releases: Releases) -> bool:
    """Halts rollouts whose release was withdrawn: nobody can install it any more, and who did goes back."""

    def halt(connection: Connection, rollout: str, reason: str) -> bool:
        row = known(connection, rollout)
        if row.state in _OPEN:
            _enter(connection, row, engine.Decision("halted", row.phase, reason), services.clock())
        return row.state in _OPEN

    open_now = services.database.read(partial(rollouts.in_states, states=_OPEN))
    released = {(each.name.model, each.name.version) for each in releases.releases()} if open_now else set()
    changed = False
    for row in open_now:
        if (row.model, row.version) not in released:
            words = f"{row.model}:{row.version} was withdrawn"
            changed |= services.database.write(partial(halt, rollout=row.id, reason=words)).result()
    return changed


def _tallies(connection: Connection, row: RolloutRow) -> list[Tally]:
    found = rollouts.tallies(connection, row.id)
    return [found.get(each.number, Tally()) for each in rollouts.phases_of(connection, row.id)]


def _enter(connection: Connection, row: RolloutRow, decision: engine.Decision, now: datetime) -> RolloutRow:
    """Makes a decision true: the row, the phases, the event, and a new revision of who is to run what."""
    opens = decision.state == "running" and decision.phase > row.phase
    if opens:
        rollouts.open_phase(connection, row.id, decision.phase, now)
    elif decision.state == "finished":
        rollouts.pass_all(connection, row.id, now)
    event = "rollout_phase_opened" if opens else f"rollout_{decision.state}"
    changed = rollouts.change(
        connection, row, now, state=decision.state, phase=decision.phase, reason=decision.reason
    )
    rollouts.redirect(connection, row.model)
    told: dict[str, Any] = {"phase": decision.phase}
    events.record(
        connection,
        now,
        event,
        **_about(row),
        **told,
        **({"reason": decision.reason} if decision.reason else {}),
    )
    return changed


def _steer(
    services: Services, rollout: str, allowed: Sequence[str], state: rollouts.State, *, keep: bool = False
) -> RolloutRow:
    def work(connection: Connection) -> RolloutRow:
        now = services.clock()
        row = known(connection, rollout)
        if row.state not in allowed:
            raise _wrong_state(row, _VERBS[state])
        if row.state == "finished" and (newer := _in_force_after(connection, row)) is not None:
            raise Refusal(
                409,
                "not_the_newest",
                f"rollout {newer.id} of {newer.model}:{newer.version} is newer, and {newer.state}; only the newest that "
                "holds can be taken back, so abort that one first",
            )
        if keep:
            row = rollouts.change(connection, row, now, keep=True)
        after: rollouts.State = "created" if state == "running" and row.phase < 0 else state
        event = "rollout_resumed" if state == "running" else f"rollout_{state}"
        changed = rollouts.change(connection, row, now, state=after)
        rollouts.redirect(connection, row.model)
        events.record(connection, now, event, **_about(row), phase=row.phase, keep=keep)
        return changed

    changed = services.database.write(work).result()
    services.signals.notify(TOPIC, "events")
    return changed


def _in_force_after(connection: Connection, row: RolloutRow) -> RolloutRow | None:
    """The newest rollout of the model that was made after this one and was not taken back."""
    for each in rollouts.newest(connection, rollouts.REMEMBERED, row.model):
        if each.id == row.id:
            return None
        if each.state not in engine.GOES_BACK or each.keep:
            return each
    raise Refusal(
        409,
        "not_the_newest",
        f"{row.model} had {rollouts.REMEMBERED} rollouts since; none so old is taken back",
    )


def _sign(services: Services, releases: Releases, model: str) -> bool:
    """Has the repository say the newest directions of a model; False where it refuses."""

    def read(connection: Connection) -> tuple[int | None, dict[tuple[str, str], engine.Direction]]:
        revision = rollouts.unsigned(connection).get(model)
        return revision, engine.directions(rollouts.of_model(connection, model))

    revision, told = services.database.read(read)
    if revision is None:
        return False
    released = {each.name.version for each in releases.releases() if each.name.model == model}
    try:
        releases.set_rollouts(model, engine.document(model, told, released))
    except Refusal as refusal:
        _log.error("rollouts_not_signed", model=model, reason=str(refusal))
        return False
    services.database.write(partial(rollouts.signed, model=model, revision=revision)).result()
    waiting = services.database.read(partial(rollouts.to_wake, model=model))
    services.signals.notify(*(f"device:{device}" for device in waiting))
    return True


def known(connection: Connection, rollout: str) -> RolloutRow:
    """The rollout of this id. Raises: Refusal: 404 `unknown_rollout`."""
    row = rollouts.find(connection, rollout) if rollout.isprintable() else None
    if row is None:
        raise Refusal(
            404, "unknown_rollout", f"there is no rollout {rollout[:100]}; see them: fedloop rollout list"
        )
    return row


def _wrong_state(row: RolloutRow, verb: str) -> Refusal:
    return Refusal(
        409, "rollout_state", f"cannot {verb} rollout {row.id}: it is {row.state}", state=row.state
    )


def _about(row: RolloutRow) -> dict[str, Any]:
    return {"rollout": row.id, "release": f"{row.model}:{row.version}"}


_VERBS = {"paused": "pause", "running": "resume", "aborted": "abort"}
