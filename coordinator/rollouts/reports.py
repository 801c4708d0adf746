"""What a check-in means to rollouts: the device's reports are kept, and it hears what it is to run.

All in the one transaction of the check-in, so that what a device was told is durable before it hears it. It is told
only what the signed repository says already; a model whose directions are yet to be signed says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import Connection

from coordinator.db import events, rollouts
from coordinator.db.rollouts import MemberRow, RolloutRow
from coordinator.rollouts import engine
from coordinator.rollouts.engine import Direction
from edge_client.wire.device import ReleaseOffer, ReleaseReport

TOPIC = "rollouts"
"""The signal that a rollout may have something to decide."""


@dataclass(frozen=True)
class Heard:
    """What comes of a check-in.

    Attributes:
        offers: what the device is to run, where it does not.
        is_new: it hears one of them for the first time.
        changed: how it stands, or what it was told, is other than before: rollouts may go on.
    """

    offers: tuple[ReleaseOffer, ...] = ()
    is_new: bool = False
    changed: bool = False


def check_in(connection: Connection, device: str, reports: Sequence[ReleaseReport], now: datetime) -> Heard:
    """Keeps what the device reports, and gives what it is to run."""
    before = rollouts.of_device(connection, device)
    if not before:
        return Heard()
    pairs = [
        (rollout, _kept(connection, rollout, member, engine.heard(rollout, member, reports, now)))
        for rollout, member in before
    ]
    signed, directed = engine.directions(before), engine.directions(pairs)
    for key, said in directed.items():
        if said.action == "roll_back" and key in signed and signed[key] != said:
            rollouts.redirect(connection, said.model)  # it is back, and has to go further
    unsigned = rollouts.unsigned(connection)
    offers: list[ReleaseOffer] = []
    is_new = False
    for (_, model), said in directed.items():
        if model in unsigned:
            continue
        rollout, member = next(pair for pair in pairs if pair[0].id == said.rollout)
        offer = engine.offer(said, member)
        if offer is not None:
            offers.append(offer)
            is_new |= _told(connection, rollout, member, said, pairs, reports, now)
    changed = is_new or any(a is not b for (_, a), (_, b) in zip(before, pairs, strict=True))
    return Heard(tuple(offers), is_new, changed)


def _kept(connection: Connection, rollout: RolloutRow, before: MemberRow, after: MemberRow) -> MemberRow:
    if after is before:
        return before
    rollouts.save_member(connection, after)
    if before.force and not after.force:
        rollouts.redirect(connection, rollout.model)  # it was let try once more, and did
    if (before.standing, before.told) != (after.standing, after.told):
        events.record(
            connection,
            after.changed_at,
            f"release_{after.standing}" if after.told or after.standing != "waiting" else "release_not_taken",
            device=after.device,
            rollout=rollout.id,
            release=f"{rollout.model}:{rollout.version}",
            **({"code": after.code, "words": after.words} if after.standing in ("failed", "barred") else {}),
        )
    return after


def _told(
    connection: Connection,
    rollout: RolloutRow,
    member: MemberRow,
    said: Direction,
    pairs: Sequence[tuple[RolloutRow, MemberRow]],
    reports: Sequence[ReleaseReport],
    now: datetime,
) -> bool:
    """Keeps that the device is told, and what it ran before; False where it was told so before."""
    if member.told == said.action:
        return False
    previous = member.previous
    if said.action == "install" and previous is None:
        others = [pair for pair in pairs if pair[0].id != rollout.id]
        previous = engine.runs_before(rollout, others, reports)
    rollouts.save_member(connection, replace(member, told=said.action, previous=previous, changed_at=now))
    events.record(
        connection,
        now,
        "release_offered",
        device=member.device,
        rollout=rollout.id,
        release=f"{said.model}:{said.version}",
        action=said.action,
    )
    return True
