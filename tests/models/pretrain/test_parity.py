"""Every way to spread a training trains what one process trains, and would not if its processes did not talk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from tests.models.pretrain.curves import Case
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
LARGEST_LOSS = 4.0
CURVES = "tests.models.pretrain.curves:curves"
STEPS = 4
"""Three of an epoch, whose last batch is short, and one of the next."""

PLANS = [
    # two processes
    "dp=2",
    "dp=2,microbatches=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=2,microbatches=2",
    "dp=2,zero=3",
    "dp=2,activation_checkpoint=full",
    "dp=2,activation_checkpoint=selective",
    "dp=2,zero=3,activation_checkpoint=full",
    "tp=2",
    "tp=2,loss_parallel=true",
    "tp=2,sequence=true",
    "tp=2,sequence=true,loss_parallel=true,microbatches=2",
    "tp=2,sequence=true,activation_checkpoint=selective",
    "cp=2",
    "cp=2,zero=3",
    "pp=2,schedule=naive,microbatches=1",
    "pp=2,schedule=gpipe",
    "pp=2,schedule=1f1b",
    "pp=2,schedule=1f1b,split=1+3,activation_checkpoint=full",
    "pp=2,schedule=interleaved",
    "pp=2,schedule=zero-bubble",
    "pp=2,schedule=zbv",
    # four
    "dp=4,zero=3,shards=2",
    "dp=4,zero=2,shards=2",
    "dp=2,tp=2",
    "dp=2,tp=2,zero=3,sequence=true,loss_parallel=true",
    "dp=2,cp=2",
    "dp=2,cp=2,zero=3",
    "cp=2,tp=2,sequence=true",
    "cp=2,pp=2",
    "dp=2,pp=2",
    "dp=2,pp=2,zero=2",
    "dp=2,pp=2,schedule=zbv,zero=2",
    "tp=2,pp=2",
    "tp=2,pp=2,schedule=interleaved,sequence=true,loss_parallel=true",
    # eight
    "dp=2,tp=2,pp=2",
    "dp=2,tp=2,pp=2,zero=3,sequence=true,loss_parallel=true",
    "dp=2,cp=2,tp=2,zero=3",
]

UNEVEN = {"vocab": 49}
UNEVENLY = [
    "tp=2",
    "tp=2,sequence=true",
    "tp=2,loss_parallel=true",
    "tp=2,sequence=true,loss_parallel=true",
    "dp=2,tp=2,zero=3,sequence=true",
    "tp=4,loss_parallel=true",
    "tp=2,pp=2,loss_parallel=true",
]

EXPERTS = {"name": "moe", "experts": 4, "chosen": 2, "balance": 0.3, "router_z": 0.1}
WITH_EXPERTS = [
    "dp=2",
    "dp=2,microbatches=2",
    "dp=2,ep=2",
    "dp=2,ep=2,microbatches=2,activation_checkpoint=full",
    "dp=2,ep=2,zero=1",
    "dp=2,ep=2,zero=2,microbatches=2",
    "dp=2,ep=2,zero=3,activation_checkpoint=full",
    "dp=2,ep=2,zero=3,offload=disk",
    "tp=2,sequence=true",
    "cp=2",
    "pp=2",
    "pp=2,schedule=zbv",
    # four
    "dp=4,ep=2",
    "dp=4,ep=2,zero=1",
    "dp=4,ep=2,zero=2",
    "dp=4,ep=2,zero=3",
    "dp=4,ep=4,zero=3",
    "dp=2,ep=2,cp=2",
    "dp=2,ep=2,cp=2,zero=3",
    "dp=2,ep=2,pp=2",
    "dp=2,ep=2,pp=2,zero=3",
    "dp=2,ep=2,tp=2,sequence=true,loss_parallel=true",
    "dp=2,ep=2,tp=2,zero=3",
    "cp=4",
    # eight
    "dp=4,ep=2,tp=2,zero=3,sequence=true",
    "dp=4,ep=2,cp=2,zero=3",
    "dp=2,ep=2,tp=2,pp=2,zero=3,sequence=true",
]

ANNOTATED = {"name": "tests.models.pretrain.annotated:build"}
WITH_ANNOTATIONS = ["tp=2", "dp=2,tp=2", "dp=2,tp=2,zero=3"]

TIED = {"tie": True}
WITH_TIED = ["cp=2", "dp=2,cp=2", "cp=4", "cp=2,zero=3"]

DROPPING = {"dropout": 0.3}
WITH_DROPOUT = [
    "tp=2",
    "tp=2,sequence=true",
    "tp=2,sequence=true,activation_checkpoint=full,loss_parallel=true",
    "tp=4,sequence=true",
]

FROZEN = {"freeze": "layers.1,layers.3.norm1,norm", "clip_norm": 0.5}
WITH_FROZEN = ["tp=2,sequence=true", "tp=2,sequence=true,zero=3,dp=2", "tp=2,loss_parallel=true"]
WITH_FROZEN_EXPERTS = ["dp=2,ep=2", "dp=4,ep=2", "tp=2,sequence=true"]

HALF = ["dp=2", "tp=2,sequence=true,loss_parallel=true", "pp=2", "cp=2"]
HALF_SHARED_OUT = ["dp=2,zero=2", "dp=2,zero=3", "tp=2,zero=3"]

# 0.5 is below the norm of every gradient here, so that clipping takes part in every step
CASES = [
    *(Case(plan, options={"clip_norm": 0.5}) for plan in PLANS),
    *(Case(plan, UNEVEN) for plan in UNEVENLY),
    *(Case(plan, EXPERTS, {"clip_norm": 0.5}) for plan in WITH_EXPERTS),
    *(Case(plan, ANNOTATED, {"clip_norm": 0.5}) for plan in WITH_ANNOTATIONS),
    *(Case(plan, TIED, {"clip_norm": 0.5}) for plan in WITH_TIED),
    *(Case(plan, DROPPING) for plan in WITH_DROPOUT),
    *(Case(plan, {}, FROZEN) for plan in WITH_FROZEN),
    *(Case(plan, EXPERTS, FROZEN) for plan in WITH_FROZEN_EXPERTS),
    Case("dp=2", options={"batch_size": 7}),
    Case("dp=2", options={"optimizer": "sgd", "lr": 0.1}),
]
REPRESENTATIVES = [
    Case(plan, model, options)
    for plan, model, options in [
        ("dp=2", {}, {"clip_norm": 0.5}),
        ("dp=2,zero=2,microbatches=2", {}, {"clip_norm": 0.5}),
        ("dp=2,zero=3,activation_checkpoint=full", {}, {"clip_norm": 0.5}),
        ("tp=2,sequence=true,loss_parallel=true", UNEVEN, {}),
        ("tp=2,sequence=true,activation_checkpoint=full,loss_parallel=true", DROPPING, {}),
        ("tp=2,sequence=true", {}, FROZEN),
        ("cp=2", TIED, {"clip_norm": 0.5}),
        ("pp=2,schedule=1f1b", {}, {"clip_norm": 0.5}),
        ("dp=2,ep=2", EXPERTS, {"clip_norm": 0.5}),
        ("dp=4,ep=2,zero=3", EXPERTS, {"clip_norm": 0.5}),
        ("dp=2,ep=2,tp=2,zero=3,sequence=true", EXPERTS, {"clip_norm": 0.5}),
        ("dp=2,ep=2,cp=2", EXPERTS, {"clip_norm": 0.5}),
        ("tp=2", ANNOTATED, {"clip_norm": 0.5}),
        ("dp=4,zero=3,shards=2", {}, {"clip_norm": 0.5}),
        ("dp=2,tp=2,zero=3,sequence=true,loss_parallel=true", {}, {"clip_norm": 0.5}),
        ("cp=2,pp=2", {}, {"clip_norm": 0.5}),
        ("dp=2,tp=2,pp=2", {}, {"clip_norm": 0.5}),
    ]
]
"""One of every kind of parallelism, of every kind of model, and some of several kinds at once."""

BROKEN = [
    Case(plan, model, {"clip_norm": 0.5}, f"tests.models.pretrain.broken:{axis}")
    for axis, plan, model in [
        ("dp", "dp=2", {}),
        ("tp", "tp=2", {}),
        ("pp", "pp=2", {}),
        ("cp", "cp=2", {}),
        ("ep", "dp=2,ep=2", EXPERTS),
    ]
]


@pytest.mark.parametrize(
    ("processes", "among"),
    [
        (4, REPRESENTATIVES),
        *extended((2, REPRESENTATIVES), (8, REPRESENTATIVES), (2, CASES), (4, CASES), (8, CASES)),
    ],
    ids=[
        f"{processes}-{kind}"
        for kind, several in (("representatives", (4, 2, 8)), ("all", (2, 4, 8)))
        for processes in several
    ],
)
def test_plan_trains_what_one_process_trains(processes: int, among: list[Case]) -> None:
    cases = [case for case in among if processes_of(case) == processes]

    differences = differences_from_one(cases, "dp=1")

    assert all(np.abs(found).max() <= TOLERANCE for found in differences), report(cases, differences)


@pytest.mark.extended
def test_without_talking_every_plan_trains_something_else() -> None:
    differences = differences_from_one(BROKEN, "dp=1")

    assert all(np.abs(found).max() > 100 * TOLERANCE for found in differences), report(BROKEN, differences)


@pytest.mark.parametrize(("plans", "alone"), [(HALF_SHARED_OUT, "zero=3"), *extended((HALF, "dp=1"))])
def test_bfloat16_differs_by_rounding_only(plans: list[str], alone: str) -> None:
    """Against one process that rounds as well: each loss by one unit in its last place at most, 2^-8 of it.

    Sums in another order are rounded elsewhere, in logits as in gradients. Sharding itself casts params, norms and
    all, autocast the matrix products only, so that each has its own twin.
    """
    cases = [Case(f"{plan},precision=bf16") for plan in plans]

    differences = differences_from_one(cases, f"{alone},precision=bf16")

    assert all(np.abs(found).max() <= LARGEST_LOSS * 2**-8 for found in differences), report(
        cases, differences
    )


def processes_of(case: Case) -> int:
    from models.pretrain.plan import parse

    return parse(case.plan).processes


def differences_from_one(cases: Sequence[Case], alone: str) -> list[npt.NDArray[np.float64]]:
    """Of each case, by process and step: its losses minus those of one process under the plan `alone`."""
    cases = [replace(case, options={"steps": STEPS, **case.options}) for case in cases]
    full = [replace(case, plan=alone, broken="") for case in cases]
    distinct = [case for place, case in enumerate(full) if case not in full[:place]]
    expected = ranks.run(1, CURVES, distinct)[0]
    found = ranks.run(processes_of(cases[0]), CURVES, list(cases))
    return [
        np.array([curves[place] for curves in found]) - expected[distinct.index(case)]
        for place, case in enumerate(full)
    ]


def report(cases: Sequence[Case], differences: Sequence[npt.NDArray[np.float64]]) -> str:
    lines = [
        f"{np.abs(found).max():9.1e}  plan {case.plan}, model {case.model}, options {case.options} {case.broken}"
        for case, found in zip(cases, differences, strict=True)
    ]
    return "largest difference of a loss from one process's\n" + "\n".join(lines)
