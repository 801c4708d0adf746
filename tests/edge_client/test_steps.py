"""What the daemon does next, as a pure decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.outbox import PendingResult
from edge_client.steps import (
    HELD_SECONDS,
    Current,
    Deliver,
    Desired,
    Discard,
    Fetch,
    GiveBack,
    HeldTask,
    Install,
    PendingRelease,
    Renew,
    SendCheckIn,
    Sleep,
    Work,
    next_steps,
)
from edge_client.wire.device import BlobRef, Decline, ModelRef, ReleaseOffer, TaskOffer

BLOB = BlobRef("a" * 64, 1)
OFFER = TaskOffer(
    task="t",
    kind="train",
    run="r",
    run_name="demo",
    round=1,
    runtime="litert",
    dataset="digits",
    message={},
    model=ModelRef("cnn", {}, (1,), 2, "float32", "classification"),
    params=BLOB,
    streams=None,
    artifact=BLOB,
    manifest=BLOB,
    lease_seconds=60.0,
    deadline_seconds=600.0,
    result_limit_bytes=1,
)
RESULT = PendingResult("old", "r", "demo", 1, "train", 1, "", 1, "identity", 0.0, 1.0)
IDLE = Current(
    now=100.0,
    wall=1000.0,
    renew_at=5000.0,
    checkin_at=130.0,
    runtimes=("litert",),
    datasets={"digits": 12},
    models=("cnn",),
)
WELL = Desired()


def current(**changes: Any) -> Current:
    return replace(IDLE, **changes)


@pytest.mark.parametrize(
    ("now", "desired", "steps"),
    [
        (current(), WELL, [Sleep(130.0)]),
        (current(checkin_at=100.0), WELL, [SendCheckIn(0.0)]),
        (current(checkin_at=100.0, hold=True), WELL, [SendCheckIn(HELD_SECONDS)]),
        (current(checkin_at=100.0, hold=True), Desired(ineligible=("on battery",)), [SendCheckIn(0.0)]),
        (current(wall=5000.0), WELL, [Renew(False)]),
        (current(certificate_expired=True, outbox=(RESULT,)), WELL, [Renew(True), Deliver(RESULT)]),
        (current(outbox=(RESULT,)), WELL, [Deliver(RESULT)]),
        (current(outbox=(RESULT,)), Desired(paused=True), [Sleep(130.0)]),
        (current(outbox=(RESULT,)), Desired(opted_out=("demo",)), [Discard(RESULT)]),
        (current(held=HeldTask(OFFER)), WELL, [SendCheckIn(0.0)]),
        (current(held=HeldTask(OFFER, "confirmed")), WELL, [Fetch(OFFER), Work(OFFER)]),
        (current(held=HeldTask(OFFER, "fetched")), WELL, [Work(OFFER)]),
        (current(held=HeldTask(OFFER, "fetched"), retry_at=110.0), WELL, [Work(OFFER)]),
        (current(held=HeldTask(OFFER, "confirmed"), retry_at=110.0), WELL, [Sleep(110.0)]),
        (
            current(held=HeldTask(OFFER, "fetched", Decline("limits", "too large"))),
            WELL,
            [GiveBack(OFFER, Decline("limits", "too large"))],
        ),
        (
            current(held=HeldTask(OFFER)),
            Desired(ineligible=("hot",)),
            [GiveBack(OFFER, Decline("ineligible", "hot"))],
        ),
    ],
)
def test_the_next_steps(now: Current, desired: Desired, steps: list[object]) -> None:
    assert next_steps(now, desired) == steps


DECLINED = Decline("opted_out", "the owner of this device lets updates leave it only with noise of its own")


@pytest.mark.parametrize(
    ("kind", "message", "steps"),
    [
        ("train", {}, [GiveBack]),
        ("train", {"noise": None, "secure": {"group": 0}}, [GiveBack]),
        ("train", {"secure": {"group": 0, "noise": None}}, [GiveBack]),
        ("train", {"secure": "of the future"}, [GiveBack]),
        ("train", {"noise": {"mechanism": "local"}}, [Fetch, Work]),
        ("train", {"secure": {"group": 0, "noise": {"kind": "skellam"}}}, [Fetch, Work]),
        ("evaluate", {}, [Fetch, Work]),
    ],
)
def test_an_owner_who_requires_noise_lets_no_update_leave_without(
    kind: Any, message: dict[str, Any], steps: list[type]
) -> None:
    held = HeldTask(replace(OFFER, kind=kind, message=message), "confirmed")
    found = next_steps(current(held=held), Desired(requires_noise=True))
    assert [type(each) for each in found] == steps
    assert all(each.decline == DECLINED for each in found if isinstance(each, GiveBack))
    assert [type(each) for each in next_steps(current(held=held), WELL)] == [Fetch, Work]


RELEASE = ReleaseOffer("r", "digits", 2)
OTHER = ReleaseOffer("s", "other", 1)
TOLD = current(offers=(PendingRelease(RELEASE), PendingRelease(OTHER)))


@pytest.mark.parametrize(
    ("now", "desired", "steps"),
    [
        (TOLD, WELL, [Install(RELEASE)]),
        (replace(TOLD, checkin_at=0.0), WELL, [Install(RELEASE)]),
        (replace(TOLD, outbox=(RESULT,)), WELL, [Deliver(RESULT)]),
        (replace(TOLD, held=HeldTask(OFFER, "fetched")), WELL, [Work(OFFER)]),
        (replace(TOLD, held=HeldTask(OFFER)), WELL, [SendCheckIn(0.0)]),
        (TOLD, Desired(ineligible=("on battery",)), [Sleep(130.0)]),
        (TOLD, Desired(paused=True, ineligible=("paused by hand",)), [Sleep(130.0)]),
        (replace(TOLD, retry_at=110.0), WELL, [Sleep(110.0)]),
        (replace(TOLD, offers=(PendingRelease(RELEASE, 101.0),)), WELL, [Sleep(130.0)]),
        (
            replace(TOLD, offers=(PendingRelease(RELEASE, 101.0), PendingRelease(OTHER))),
            WELL,
            [Install(OTHER)],
        ),
    ],
)
def test_a_release_is_installed_when_nothing_else_is_to_be_done(
    now: Current, desired: Desired, steps: list[object]
) -> None:
    assert next_steps(now, desired) == steps


@given(
    now=st.floats(0, 1e6),
    retry_at=st.floats(0, 1e6),
    checkin_at=st.floats(0, 1e6),
    waiting=st.booleans(),
    paused=st.booleans(),
    state=st.sampled_from([None, "unconfirmed", "confirmed", "fetched"]),
)
def test_there_is_always_a_next_step_and_a_sleep_ends(
    now: float, retry_at: float, checkin_at: float, waiting: bool, paused: bool, state: Any
) -> None:
    it = current(
        now=now,
        retry_at=retry_at,
        checkin_at=checkin_at,
        outbox=(RESULT,) if waiting else (),
        held=HeldTask(OFFER, state) if state else None,
    )
    steps = next_steps(it, Desired(paused, ("paused by hand",) if paused else ()))
    assert steps
    for step in steps:
        if isinstance(step, Sleep):
            assert now < step.until <= now + 61.0
        else:
            assert now >= retry_at or isinstance(step, Work)
