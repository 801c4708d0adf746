"""A check-in's effect on rollouts: the device's reports are stored, and it receives what it must run.

All of this is in the transaction of the check-in, so each offer is durable before the device hears it. Devices get only
directions that the repository has signed; a model with unsigned directions offers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import Connection

from coordinator.db import events
from coordinator.rollouts import engine, queries
from coordinator.rollouts.engine import Direction
from coordinator.rollouts.tables import MemberRow, RolloutRow
from edge_client.wire.device import ReleaseOffer, ReleaseReport

TOPIC = "rollouts"
"""The signal that a rollout may have a decision to take."""


@dataclass(frozen=True)
class ReleaseOffers:
    """The result of a check-in.

    Attributes:
        offers: what the device must run and does not.
        is_new: the device gets one of them for the first time.
        changed: a member's standing or last instruction changed, so rollouts may advance.
    """

    offers: tuple[ReleaseOffer, ...] = ()
    is_new: bool = False
    changed: bool = False


def check_in(
    connection: Connection, device: str, reports: Sequence[ReleaseReport], now: datetime
) -> ReleaseOffers:
    """Stores the device's reports and returns what it must run."""
    before = queries.of_device(connection, device)
    if not before:
        return ReleaseOffers()
    pairs = [
        (rollout, _save(connection, rollout, member, _apply_reports(rollout, member, before, reports, now)))
        for rollout, member in before
    ]
    signed, current = engine.directions(before), engine.directions(pairs)
    for key, directed in current.items():
        if directed.action == "roll_back" and key in signed and signed[key] != directed:
            queries.bump_directions(connection, directed.model)  # it rolled back and must roll back further
    unsigned = queries.unsigned_revisions(connection)
    offers: list[ReleaseOffer] = []
    is_new = False
    for (_, model), directed in current.items():
        if model in unsigned:
            continue
        rollout, member = next(pair for pair in pairs if pair[0].id == directed.rollout)
        runs_any = any(each.model == directed.model and each.standing == "active" for each in reports)
        if directed.action == "install" and member.standing == "active" and not runs_any:
            after = _save(connection, rollout, member, engine.mark_lost(member, now))
            pairs[pairs.index((rollout, member))] = rollout, after
            member = after
        offer = engine.offer(directed, member, runs_any)
        if offer is not None:
            offers.append(offer)
            is_new |= _record_offer(connection, rollout, member, directed, pairs, reports, now)
    changed = is_new or any(a is not b for (_, a), (_, b) in zip(before, pairs, strict=True))
    return ReleaseOffers(tuple(offers), is_new, changed)


def _apply_reports(
    rollout: RolloutRow,
    member: MemberRow,
    pairs: Sequence[tuple[RolloutRow, MemberRow]],
    reports: Sequence[ReleaseReport],
    now: datetime,
) -> MemberRow:
    release = (rollout.model, rollout.version)
    others = [
        other.id for other, _ in pairs if (other.model, other.version) == release and other.id != rollout.id
    ]
    return engine.apply_reports(rollout, member, reports, now, others)


def _save(connection: Connection, rollout: RolloutRow, before: MemberRow, after: MemberRow) -> MemberRow:
    if after is before:
        return before
    queries.save_member(connection, after)
    if before.force and not after.force:
        queries.bump_directions(connection, rollout.model)  # its forced retry is over
    if (before.standing, before.told) != (after.standing, after.told):
        events.record(
            connection,
            after.changed_at,
            f"release_{after.standing}" if after.told or after.standing != "waiting" else "release_not_taken",
            device=after.device,
            rollout=rollout.id,
            release=rollout.release,
            **({"code": after.code, "words": after.words} if after.standing in ("failed", "barred") else {}),
        )
    return after


def _record_offer(
    connection: Connection,
    rollout: RolloutRow,
    member: MemberRow,
    directed: Direction,
    pairs: Sequence[tuple[RolloutRow, MemberRow]],
    reports: Sequence[ReleaseReport],
    now: datetime,
) -> bool:
    """Records the offer and the version that the device ran before; False if it had this offer already."""
    if member.told == directed.action:
        return False
    previous = member.previous
    if directed.action == "install" and previous is None:
        others = [pair for pair in pairs if pair[0].id != rollout.id]
        previous = engine.previous_version(rollout, others, reports)
    queries.save_member(connection, replace(member, told=directed.action, previous=previous, changed_at=now))
    events.record(
        connection,
        now,
        "release_offered",
        device=member.device,
        rollout=rollout.id,
        release=f"{directed.model}:{directed.version}",
        action=directed.action,
    )
    return True
