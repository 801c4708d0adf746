"""Pipelines: any order of micro-batches trains what one process trains, idles as long as the law of its schedule says,
keeps no more than it says, and is refused beforehand where torch would refuse it.
"""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from models.pretrain.parallel.model import pipeline_schedule
from models.pretrain.parallel.model.pipeline_schedule import Pass
from models.pretrain.plan import ParallelPlan, PlanError, Sizes, parse
from models.pretrain.plan_rules import check
from models.pretrain.training import TrainingOptions
from tests.models.pretrain.curves import Case
from tests.models.pretrain.logged_pipeline import bubble
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
SIZES = Sizes(layers=64, heads=4, width=32, hidden=128, vocab=48, length=16, attention=True, tensor=True)

OF_TWO = [
    "pp=2,schedule=naive,microbatches=4",
    "pp=2,schedule=gpipe,microbatches=8,split=2+6",
    "pp=2,schedule=1f1b,split=5+3",
    "pp=2,schedule=interleaved,stages=4",
    "pp=2,schedule=zero-bubble,stages=4,activation_checkpoint=full",
    "pp=2,schedule=zbv,microbatches=2,split=1+2+3+2",
    "pp=2,devices=cpu+cpu",
]
FURTHER_OF_TWO = [
    "pp=2,schedule=naive,microbatches=1",
    "pp=2,schedule=gpipe,microbatches=1",
    "pp=2,schedule=interleaved,microbatches=1",
    "pp=2,schedule=zero-bubble,microbatches=1",
    "pp=2,schedule=interleaved,activation_checkpoint=selective",
    "pp=2,devices=cpu+cpu,schedule=zbv",
]
OF_FOUR = [
    "pp=4,schedule=1f1b,microbatches=4,split=1+3+3+1",
    "dp=2,pp=2,zero=2,schedule=zero-bubble",
]
FURTHER_OF_FOUR = [
    "pp=4,schedule=gpipe,microbatches=2",
    "pp=4,schedule=interleaved,microbatches=2",
    "pp=4,schedule=zero-bubble,microbatches=4",
    "pp=4,schedule=zbv,microbatches=2",
    "dp=2,pp=2,zero=3,schedule=naive",
    "dp=2,pp=2,schedule=interleaved,devices=cpu+cpu",
    "tp=2,pp=2,loss_parallel=true,schedule=zbv",
]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """20 rows in batches of 8: the last batch of an epoch is short, and some labels never count."""
    return _curves(["dp=1"])[0][0]


@pytest.mark.parametrize(
    "plans",
    [OF_TWO, *extended(OF_FOUR, FURTHER_OF_TWO, FURTHER_OF_FOUR)],
    ids=["two", "four", "further of two", "further of four"],
)
def test_every_schedule_trains_what_one_process_trains(plans: list[str], alone: list[float]) -> None:
    for of_rank in _curves(plans):
        for plan, found in zip(plans, of_rank, strict=True):
            np.testing.assert_allclose(found, alone, atol=TOLERANCE, err_msg=plan)


def _curves(plans: list[str]) -> list[list[list[float]]]:
    cases = [Case(plan, {"layers": 8}) for plan in plans]
    return ranks.run(parse(plans[0]).processes, "tests.models.pretrain.curves:curves", cases)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("m", [4, 8, 16])
def test_bubble_is_as_the_law_says(p: int, m: int) -> None:
    v = 2
    laws = {
        "naive": Fraction(p - 1, p),
        "gpipe": Fraction(p - 1, m + p - 1),
        "1f1b": Fraction(p - 1, m + p - 1),
        "interleaved": Fraction(p - 1, v * m + p - 1),
        "zero-bubble": Fraction(p - 1, 3 * v * m + p - 1),
    }
    if m >= 2 * p - 1:
        laws["zbv"] = laws["zero-bubble"]
    for schedule, law in laws.items():
        plan = parse(f"pp={p},microbatches={m},schedule={schedule}")
        assert bubble(pipeline_schedule.simulate(plan, _seconds)) == pytest.approx(float(law), abs=1e-12), (
            schedule
        )


def test_a_transfer_that_takes_time_is_waited_for() -> None:
    plan = parse("pp=4,schedule=gpipe,microbatches=4")
    there_and_back = 2 * 3 * 0.25
    slower = pipeline_schedule.simulate(plan, _seconds, lambda stage: 0.25)
    assert slower.seconds == pytest.approx(
        pipeline_schedule.simulate(plan, _seconds).seconds + there_and_back
    )


@pytest.mark.parametrize("pieces", [4, 8, 32])
def test_1f1b_holds_no_more_micro_batches_than_stages_and_gpipe_all(pieces: int) -> None:
    p = 4
    assert _held(f"pp={p},microbatches={pieces}") == [p, p - 1, p - 2, p - 3]
    assert _held(f"pp={p},microbatches={pieces},schedule=gpipe") == [pieces] * p
    assert _held(f"pp={p},microbatches={pieces},schedule=naive") == [1] * p


def _held(text: str) -> list[float]:
    """Micro-batches at every place, with the one in a pass."""
    return [
        1 + max(pipeline_schedule.held_by_others(order)) for order in pipeline_schedule.orders(parse(text))
    ]


LOGGED = [
    "pp=2,microbatches=3,schedule=naive",
    "pp=2,microbatches=3,schedule=gpipe",
    "pp=2,microbatches=3,schedule=1f1b",
    "pp=2,microbatches=6,schedule=interleaved",
    "pp=2,microbatches=3,schedule=zero-bubble",
    "pp=2,microbatches=4,schedule=zbv",
]


def test_processes_keep_to_the_timetable() -> None:
    """The law is about the order in which processes really compute."""
    found = ranks.run(2, "tests.models.pretrain.logged_pipeline:logs", LOGGED)
    for number, text in enumerate(LOGGED):
        expected = pipeline_schedule.orders(parse(text))
        for place in range(2):
            assert found[place][number].passes == expected[place], f"{text}, place {place}"


def test_1f1b_keeps_activations_of_its_own_micro_batches_only() -> None:
    """Bytes alive at the worst moment grow with the micro-batches under GPipe; under 1F1B only the buffers do."""
    plans = [
        f"pp=2,microbatches={pieces},schedule={schedule}"
        for schedule in ("gpipe", "1f1b")
        for pieces in (4, 8)
    ]
    gpipe4, gpipe8, late4, late8 = (
        log.max_bytes for log in ranks.run(2, "tests.models.pretrain.logged_pipeline:logs", plans)[0]
    )
    assert gpipe8 - gpipe4 > 3 * (late8 - late4)
    assert late8 < 0.5 * gpipe8


def test_stages_hand_on_tuples_in_every_schedule() -> None:
    """(hidden states, mask): a mask has no gradient."""
    schedules = ["naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
    for found in ranks.run(2, "tests.models.pretrain.logged_pipeline:gradient_errors", schedules):
        assert max(found.values()) < TOLERANCE, found


def test_linear_layers_compute_gradients_of_inputs_and_weights_apart() -> None:
    """Of what a block multiplies, a third goes forward, a third to the inputs and a third to the weights, nothing twice:
    else the zero-bubble schedules would gain nothing.
    """
    from tests.models.pretrain.logged_pipeline import multiplications

    forward, of_inputs, of_weights = multiplications()
    assert forward == of_inputs == of_weights > 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble", "zbv"])
def test_a_plan_is_refused_exactly_when_torch_refuses_it(schedule: str) -> None:
    for pp in (2, 3, 4):
        for pieces in range(1, 15):
            plan = parse(f"pp={pp},schedule={schedule},microbatches={pieces}")
            assert _refused(plan) == _refused_by_torch(plan), plan


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("pp=4,microbatches=3", "at least pp=4"),
        ("pp=2,microbatches=5,schedule=interleaved", "4 would do"),
        ("pp=2,stages=3,schedule=zbv", "exactly two stages"),
        ("pp=2,stages=2", "one stage a rank"),
        ("dp=2,pp=2,zero=3,schedule=zero-bubble", "use zero=2"),
        ("pp=2,schedule=zbv,activation_checkpoint=selective", "use activation_checkpoint=full"),
        ("pp=2,schedule=zero-bubble,compile=true", "compile fuses"),
        ("pp=2,devices=cpu+cpu+cuda", "3 places along pp, there are 2"),
        ("pp=2,tp=2,devices=cpu+cuda", "devices goes with"),
    ],
)
def test_errors_in_a_pipeline_are_refused_with_their_reason(plan: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason.replace("+", r"\+")):
        check(parse(plan), SIZES, TrainingOptions(batch_size=120))


def _seconds(each: Pass) -> float:
    return 2.0 if each.kind == "B" else 1.0


def _refused(plan: ParallelPlan) -> bool:
    try:
        check(plan, SIZES, TrainingOptions(batch_size=plan.num_microbatches))
    except PlanError:
        return True
    return False


def _refused_by_torch(plan: ParallelPlan) -> bool:
    single: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
    try:
        if plan.schedule in single:
            stage = SimpleNamespace(stage_index=0, num_stages=plan.pp, group_size=plan.pp, group_rank=0)
            single[plan.schedule](stage, n_microbatches=plan.num_microbatches)
        else:
            pipeline_schedule.orders(plan)
    except ValueError:
        return True
    return False
