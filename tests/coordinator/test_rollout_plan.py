"""Laws of phases and gates."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import UserError
from coordinator.rollouts import plan
from coordinator.rollouts.gates import Gates, Tally, judge, measured, require_gates, undecided_comparison
from coordinator.rollouts.plan import Filter
from coordinator.scheduling.matching import Candidate
from edge_client.wire.device import CheckIn

DEVICES = st.sets(st.uuids().map(str), min_size=1, max_size=120)
PERCENTS = st.sets(st.floats(0.1, 100), min_size=1, max_size=6).map(sorted)
GATES = Gates(max_accuracy_drop=0.02, confidence=None)


@given(DEVICES, PERCENTS, st.text(max_size=8))
def test_every_member_is_in_one_phase_and_phases_grow_to_their_shares(
    devices: set[str], percents: list[float], salt: str
) -> None:
    phases = plan.phases(devices, percents, salt)
    members = [device for phase in phases for device in phase]
    assert len(members) == len(set(members)) and set(members) <= devices
    assert len(phases) == len(percents) and phases[0]
    for percent, so_far in zip(percents, accumulate(map(len, phases)), strict=True):
        assert so_far - 1 < len(devices) * percent / 100 <= so_far + 1e-9
    if percents[-1] == 100:
        assert set(members) == devices


@given(DEVICES, st.text(max_size=8), st.randoms())
def test_membership_depends_on_nothing_but_devices_and_salt(devices: set[str], salt: str, rng: Any) -> None:
    shuffled = list(devices)
    rng.shuffle(shuffled)
    assert plan.phases(shuffled, (1, 10, 50, 100), salt) == plan.phases(
        sorted(devices), (1, 10, 50, 100), salt
    )


def test_other_salts_have_other_devices_go_first() -> None:
    devices = [f"device-{number}" for number in range(50)]
    first = {plan.phases(devices, (1, 100), str(salt))[0][0] for salt in range(40)}
    assert len(first) > 20


@pytest.mark.parametrize("percents", [(), (0, 100), (10, 10), (50, 10), (10, 101), (float("nan"),)])
def test_phases_that_are_none_are_refused(percents: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="increasing percentages"):
        plan.require_phases(percents)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        (Filter(), True),
        (Filter(groups=("line-1", "clinic")), True),
        (Filter(groups=("line-1",)), False),
        (Filter(labels={"site": "north"}), True),
        (Filter(labels={"site": "north", "hall": "2"}), False),
        (Filter(device_classes=("gateway",)), True),
        (Filter(device_classes=("server",)), False),
        (Filter(runtimes=("torch", "litert")), True),
        (Filter(runtimes=("torch",)), False),
        (Filter(ids=("d",)), True),
        (Filter(ids=("e",)), False),
    ],
)
def test_a_filter_admits_by_what_the_device_is(wanted: Filter, fits: bool) -> None:
    report = CheckIn("1.3", "1.0", {"litert": "2.1"}, 2**30, "gateway", {"site": "north"})
    now = datetime(2026, 1, 5, tzinfo=UTC)
    assert plan.admits(wanted, Candidate("d", "d", "active", "clinic", None, now, now, report)) == fits
    assert not plan.admits(wanted, Candidate("d", "d", "revoked", "clinic", None, now, now, report))
    assert not plan.admits(wanted, Candidate("d", "d", "active", "clinic", None, None, None, None))


@pytest.mark.parametrize(
    ("has", "runs", "wanted", "fits"),
    [
        ({"litert": "2.1"}, "litert", "litert", True),
        ({"litert": "2.14"}, "tflite-runtime", "litert", False),
        ({"litert": "2.14"}, "tflite-runtime", "tflite-runtime", True),
        ({"litert": "2.1", "torch": "2.13"}, "litert", "torch", True),
        ({"torch": "2.13"}, "", "litert", False),
        ({"litert": "2.1"}, "", "litert", True),  # a daemon that does not say
        ({"litert": "2.1"}, "", "tflite-runtime", False),
    ],
)
def test_a_filter_tells_the_runtimes_of_released_models_apart(
    has: dict[str, str], runs: str, wanted: str, fits: bool
) -> None:
    report = CheckIn("1.3", "1.0", has, 2**30, release_runtime=runs)
    now = datetime(2026, 1, 5, tzinfo=UTC)
    device = Candidate("d", "d", "active", "", None, now, now, report)
    assert plan.admits(Filter(runtimes=(wanted,)), device) == fits


@pytest.mark.parametrize(("wire", "knows"), [("1.2", False), ("1.3", True), ("1.9", True), ("2.0", False)])
def test_only_devices_that_hear_of_releases_are_members(wire: str, knows: bool) -> None:
    assert plan.supports_releases(wire) == knows


def tallies(active: int, failed: int, silent: int, **more: float) -> list[Tally]:
    return [Tally(devices=active + failed + silent, active=active, failed=failed, **more)]  # type: ignore[arg-type]


COUNTS = st.integers(0, 40)


@given(COUNTS, COUNTS, COUNTS, st.floats(0, 1))
def test_a_phase_ends_early_only_where_no_answer_could_change_that(
    active: int, failed: int, silent: int, share: float
) -> None:
    verdict = judge(Gates(install=share), tallies(active, failed, silent), 0)
    best = judge(Gates(install=share), tallies(active + silent, failed, 0), 0)
    if silent and verdict.outcome == "fail":
        assert best.outcome == "fail"
    if silent:
        assert verdict.outcome != "pass"
    elif active + failed:
        assert verdict.outcome == ("fail" if failed and active / (active + failed) < share else "pass")


@given(COUNTS, COUNTS, st.integers(1, 40), st.floats(0, 1), st.integers(1, 50))
def test_silent_devices_are_left_behind_only_where_enough_answered(
    active: int, failed: int, silent: int, answered: float, least: int
) -> None:
    gates = Gates(install=0.0, answered=answered, min_answers=least, deadline_seconds=60)
    devices = active + failed + silent
    verdict = judge(gates, tallies(active, failed, silent), 60)
    enough = active + failed >= max(1, min(least, devices), answered * devices - 1e-6)
    assert verdict.outcome == ("pass" if enough else "wait")


def test_a_phase_whose_devices_are_all_gone_proves_nothing() -> None:
    assert judge(GATES, [Tally()], 10**9).outcome == "wait"
    assert judge(GATES, [Tally(devices=1, active=1), Tally()], 0).outcome == "pass"


def test_a_phase_lasts_as_long_as_it_is_to_soak() -> None:
    gates = Gates(soak_seconds=600)
    assert judge(gates, tallies(3, 0, 0), 599).outcome == "wait"
    assert judge(gates, tallies(3, 0, 0), 600).outcome == "pass"
    assert judge(gates, [*tallies(3, 0, 0), Tally()], 0).outcome == "pass"


def compared(correct: float, champion: float, labels: float = 1000) -> list[Tally]:
    return tallies(5, 0, 0, labels=labels, correct=correct * labels, champion_correct=champion * labels)


def test_a_candidate_may_be_a_little_worse_than_the_champion_and_no_more() -> None:
    assert judge(GATES, compared(0.88, 0.90), 0).outcome == "pass"
    assert judge(GATES, compared(0.99, 0.90), 0).outcome == "pass"
    failed = judge(GATES, compared(0.87, 0.90), 0)
    assert failed.outcome == "fail" and "0.8700" in failed.reasons[0] and "1000 labels" in failed.reasons[0]


def test_with_a_confidence_a_few_rows_decide_nothing() -> None:
    sure = Gates(max_accuracy_drop=0.02, confidence=0.95)
    assert judge(sure, compared(0.8, 0.9, labels=20), 0).outcome == "pass"
    assert judge(sure, compared(0.8, 0.9, labels=2000), 0).outcome == "fail"
    assert judge(sure, compared(0.2, 0.9, labels=20), 0).outcome == "fail"


def test_equally_good_models_are_not_halted_and_an_undecided_comparison_is_reported() -> None:
    """200 rollouts of three phases over 40, 120 and 400 labels; without a confidence a third of them are halted."""
    rng = np.random.default_rng(0)

    def halted(gates: Gates, accuracy: float) -> int:
        found = 0
        for _ in range(200):
            phases = [
                Tally(
                    devices=1,
                    active=1,
                    labels=labels,
                    correct=rng.binomial(labels, accuracy),
                    champion_correct=rng.binomial(labels, 0.9),
                )
                for labels in (40, 120, 400)
            ]
            found += any(judge(gates, phases[: count + 1], 0).outcome == "fail" for count in range(3))
        return found

    assert halted(Gates(confidence=None), 0.9) > 60
    assert halted(Gates(), 0.9) <= 10
    assert halted(Gates(), 0.8) > 150

    first = compared(0.85, 0.9, labels=40)
    assert judge(Gates(), first, 0).outcome == "pass"
    message = undecided_comparison(Gates(), first)
    assert message is not None and "40 labels" in message and "+0.0500" in message and "95%" in message
    assert undecided_comparison(Gates(), compared(0.9, 0.9, labels=10_000)) is None
    assert undecided_comparison(Gates(), compared(0.7, 0.9, labels=10_000)) is None
    assert undecided_comparison(Gates(min_labels=100), first) == "40 labels were compared, 100 are needed"
    assert undecided_comparison(Gates(), tallies(4, 0, 0)) is None


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 10**6), st.floats(0.5, 0.99), st.floats(0.5, 0.99))
def test_more_confidence_never_fails_what_less_lets_pass(
    correct: float, champion: float, labels: int, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    phases = compared(correct, champion, labels)
    if judge(Gates(confidence=less), phases, 0).outcome == "pass":
        assert judge(Gates(confidence=more), phases, 0).outcome == "pass"


def test_figures_are_pooled_over_phases() -> None:
    good, bad = compared(0.95, 0.9, 3000)[0], compared(0.7, 0.9, 1000)[0]
    assert judge(GATES, [good, bad], 0).outcome == "pass"
    assert judge(GATES, [bad, bad], 0).outcome == "fail"


def test_golden_accuracy_and_loss_are_required_where_wanted() -> None:
    golden = tallies(4, 0, 0, golden=4, golden_sum=3.2)
    assert judge(Gates(golden_accuracy=0.8), golden, 0).outcome == "pass"
    assert judge(Gates(golden_accuracy=0.81), golden, 0).outcome == "fail"
    unreported = judge(Gates(golden_accuracy=0.8), tallies(4, 0, 0), 0)
    assert unreported.outcome == "fail" and "no device reported" in unreported.reasons[0]
    losses = tallies(4, 0, 0, labels=10, correct=9, champion_correct=9, loss_sum=6.0, champion_loss_sum=4.0)
    assert judge(Gates(max_loss_increase=0.3), losses, 0).outcome == "pass"
    assert judge(Gates(max_loss_increase=0.1), losses, 0).outcome == "fail"


@pytest.mark.parametrize(
    "values", [{"install": 1.1}, {"min_answers": 0}, {"confidence": 0.2}, {"deadline_seconds": 0}]
)
def test_gates_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"gate {next(iter(values))}"):
        require_gates(Gates(**values))


def test_a_release_that_predicts_a_quantity_is_judged_by_no_accuracy() -> None:
    with pytest.raises(
        UserError, match=r"max_accuracy_drop = 0\.02: the release predicts a quantity.*max_loss"
    ):
        require_gates(Gates(), "regression")
    with pytest.raises(UserError, match=r"golden_accuracy = 0\.9: the release predicts a quantity"):
        require_gates(Gates(golden_accuracy=0.9, max_accuracy_drop=None), "regression")
    gates = Gates(max_accuracy_drop=None, max_loss_increase=0.1)
    assert require_gates(gates, "regression") == gates
    assert require_gates(Gates(), "next_token") == Gates()


@given(
    st.integers(0, 6), st.integers(0, 6), st.integers(0, 40), st.integers(0, 40), st.floats(0, 1),
    st.sampled_from([None, 0.8]), st.sampled_from([None, 0.02]), st.sampled_from([None, 0.1]),
)  # fmt: skip
def test_the_gates_that_are_shown_as_missed_are_those_that_the_verdict_fails_on(
    active: int,
    failed: int,
    correct: int,
    champion: int,
    golden: float,
    least: float | None,
    drop: float | None,
    increase: float | None,
) -> None:
    gates = Gates(golden_accuracy=least, max_accuracy_drop=drop, max_loss_increase=increase, confidence=0.9)
    answers = active + failed
    phase = Tally(
        devices=answers, active=active, failed=failed, golden=active, golden_sum=golden * active,
        labels=40.0 * bool(active), correct=correct, loss_sum=40.0 - correct, champion_correct=champion,
        champion_loss_sum=40.0 - champion,
    )  # fmt: skip
    found = {each.gate: each for each in measured(gates, [phase], 10**6)}
    assert set(found) == {each.name for each in fields(Gates)}
    deciding = ("install", "golden_accuracy", "max_accuracy_drop", "max_loss_increase")
    missed = [gate for gate in deciding if found[gate].is_met is False]
    if answers:
        lacks_golden = least is not None and not active
        assert (judge(gates, [phase], 10**6).outcome == "fail") == bool(missed or lacks_golden)
    assert all(each.is_met is None for each in found.values() if each.limit is None)


def test_before_the_first_phase_nothing_is_measured() -> None:
    found = {each.gate: each for each in measured(GATES, [], None)}
    assert found["install"].value is found["soak_seconds"].value is found["min_labels"].value is None
    assert found["install"].limit == GATES.install
