"""Why a device gets no task of a run: one reason for each situation, in words."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from coordinator.scheduling import matching
from coordinator.scheduling.deployments import Deployment, ModelClass, Selection
from coordinator.scheduling.matching import Candidate
from edge_client.wire.device import BlobRef, TaskKind
from tests.support.device_world import MODEL, REPORT, START

REF = BlobRef("0" * 64, 10)
RUN = Deployment(
    "r",
    "run r",
    "digits",
    MODEL,
    ("litert", "torch"),
    REF,
    REF,
    selection=Selection(
        groups=("lab",), labels={"site": "north"}, device_classes=("gateway",), memory_bytes=2**20
    ),
)
GOOD = Candidate(
    id="a",
    name="a",
    state="active",
    group="lab",
    certificate_until=START + timedelta(days=30),
    last_seen_at=START,
    expected_at=START + timedelta(seconds=50),
    report=replace(REPORT, device_class="gateway", labels={"site": "north", "floor": "2"}),
)


def reported(**changed: Any) -> Candidate:
    assert GOOD.report is not None
    return replace(GOOD, report=replace(GOOD.report, **changed))


def test_a_device_that_has_all_that_a_run_wants_matches() -> None:
    assert matching.blocking_reasons(GOOD, RUN, START) == ()


@pytest.mark.parametrize(
    ("device", "code", "message"),
    [
        (replace(GOOD, state="pending"), "pending", "waits for approval"),
        (replace(GOOD, state="revoked"), "revoked", "revoked"),
        (replace(GOOD, state="left"), "left", "left"),
        (replace(GOOD, certificate_until=START), "certificate_expired", "expired on 2026-01-05 12:00 UTC"),
        (replace(GOOD, last_seen_at=None, report=None), "never_seen", "never checked in"),
        (replace(GOOD, expected_at=START - timedelta(hours=2)), "not_seen", "overdue"),
        (
            replace(GOOD, missed_at=START),
            "missed_task",
            "given up at 2026-01-05 12:00:00 UTC and it has not checked in",
        ),
        (reported(ineligible=("on battery", "too hot")), "ineligible", "on battery; too hot"),
        (reported(opted_out=("r",)), "opted_out", "opted out"),
        (reported(opted_out=("run r",)), "opted_out", "opted out"),
        (reported(wire="2.0"), "wire_version", "speaks wire 2.0"),
        (replace(GOOD, group="field"), "group", "in group 'field', the run wants lab"),
        (reported(device_class="server"), "device_class", "wants gateway"),
        (reported(labels={"site": "south"}), "labels", "site is 'south', the run wants 'north'"),
        (reported(labels={}), "labels", "site is missing"),
        (reported(memory_bytes=2**19), "memory", "wants 1 MiB"),
        (reported(datasets={}), "no_dataset", "'digits' is not configured"),
        (reported(datasets={"digits": 0}), "no_dataset", "has no rows"),
        (reported(runtimes={"tensorflow": "2.19"}), "wrong_runtime", "wants litert or torch"),
        (reported(runtimes={"torch": "2.6"}, models=()), "no_model", "'cnn' is not installed"),
    ],
)
def test_reasons_that_exclude_a_device_are_reported_in_plain_text(
    device: Candidate, code: str, message: str
) -> None:
    (reason,) = matching.blocking_reasons(device, RUN, START)
    assert reason.code == code
    assert message in reason.message


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_device_with_a_wire_no_more_served_does_nothing(kind: TaskKind) -> None:
    assert matching.blocking_reasons(reported(wire="1.2"), RUN, START, kind) == ()
    (reason,) = matching.blocking_reasons(reported(wire="1.1"), RUN, START, kind)
    assert reason.code == "wire_version"
    assert f"{kind} tasks need 1.2 up to" in reason.message


def test_momentum_needs_a_device_that_knows_it() -> None:
    changed = replace(RUN, changes_steps=True)
    assert matching.blocking_reasons(reported(wire="1.4"), changed, START) == ()
    assert matching.blocking_reasons(reported(wire="1.3"), changed, START, "evaluate") == ()
    (reason,) = matching.blocking_reasons(reported(wire="1.3"), changed, START)
    assert reason.code == "wire_version" and "momentum" in reason.message


def test_clipping_an_update_before_it_is_sent_needs_a_device_that_knows_it() -> None:
    clipped = replace(RUN, changes_updates=True)
    assert matching.blocking_reasons(reported(wire="1.4"), clipped, START) == ()
    assert matching.blocking_reasons(reported(wire="1.3"), clipped, START, "evaluate") == ()
    (reason,) = matching.blocking_reasons(reported(wire="1.3"), clipped, START)
    assert reason.code == "wire_version" and "updates are clipped or noised" in reason.message


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_model_of_its_own_needs_a_device_that_knows_it(kind: TaskKind) -> None:
    personal = replace(RUN, personal_rule={"name": "personal_model", "mu": 0.1})
    assert matching.blocking_reasons(reported(wire="1.4"), personal, START, kind) == ()
    (reason,) = matching.blocking_reasons(reported(wire="1.3"), personal, START, kind)
    assert reason.code == "wire_version" and "model of the device's own" in reason.message


def test_a_model_class_needs_its_memory_and_a_device_that_knows_it() -> None:
    narrower = ModelClass("half", 0.5, 2**29, MODEL, {})
    classes = replace(RUN, classes=(ModelClass("full", 1.0, 2**30, MODEL, {}), narrower))
    assert matching.blocking_reasons(reported(wire="1.4", memory_bytes=2**29), classes, START) == ()
    (reason,) = matching.blocking_reasons(reported(wire="1.4", memory_bytes=2**29 - 2**20), classes, START)
    assert reason.code == "memory"
    assert "offers 511 MiB of memory, and every model class of the run needs more, 512 MiB" in reason.message
    (reason,) = matching.blocking_reasons(reported(wire="1.3"), classes, START)
    assert "tasks of a model class need 1.4" in reason.message


def test_a_device_that_does_not_say_what_memory_it_has_is_in_a_class_that_needs_none() -> None:
    classes = (ModelClass("full", 1.0, 2**30, MODEL, {}), ModelClass("half", 0.5, 0, MODEL, {}))
    unknown = reported(wire="1.4", memory_bytes=0)
    run = replace(RUN, classes=classes, selection=Selection())
    assert matching.blocking_reasons(unknown, run, START) == ()
    assert matching.class_for(classes, 0) == classes[1]


def test_statistics_need_a_newer_wire_but_no_model() -> None:
    requested = replace(RUN, kind="statistics", runtimes=())
    assert matching.blocking_reasons(reported(wire="1.4", runtimes={}, models=()), requested, START) == ()
    (reason,) = matching.blocking_reasons(reported(wire="1.3"), requested, START)
    assert "statistics tasks need 1.4" in reason.message


def test_codes_for_updates_need_a_newer_wire() -> None:
    coded = replace(RUN, has_code=True)
    assert matching.blocking_reasons(reported(wire="1.4"), coded, START) == ()
    assert matching.blocking_reasons(reported(wire="1.3"), coded, START, "evaluate") == ()
    (reason,) = matching.blocking_reasons(reported(wire="1.3"), coded, START)
    assert "tasks with a code for updates need 1.4" in reason.message


def test_all_reasons_are_reported_at_once() -> None:
    codes = [
        reason.code
        for reason in matching.blocking_reasons(reported(ineligible=("busy",), datasets={}), RUN, START)
    ]
    assert codes == ["ineligible", "no_dataset"]


def test_the_runtime_is_the_first_allowed_one_that_the_device_can_use() -> None:
    both = replace(REPORT, runtimes={"torch": "2.6", "litert": "2.1"})
    assert matching.runtime_for(both, RUN) == "litert"
    assert matching.runtime_for(both, replace(RUN, runtimes=("torch", "litert"))) == "torch"
    assert matching.runtime_for(both, replace(RUN, artifact=None)) == "torch"
    assert matching.runtime_for(replace(both, models=()), replace(RUN, runtimes=("torch",))) is None


@pytest.mark.parametrize(
    ("seen", "expected", "presence"),
    [(-50, 10, "online"), (-50, 0, "online"), (-50, -1, "late"), (-90, -60, "late"), (-90, -61, "offline"),
     (-60, None, "late"), (-61, None, "offline"), (None, None, "offline")],
)  # fmt: skip
def test_a_device_is_online_late_or_offline_by_its_next_check_in(
    seen: int | None, expected: int | None, presence: str
) -> None:
    moments = (None if each is None else START + timedelta(seconds=each) for each in (seen, expected))
    assert matching.presence(*moments, START) == presence
