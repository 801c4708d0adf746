"""Memory that the planner predicts is what real trainings need, counted tensor by tensor."""

from __future__ import annotations

import pytest

from models.pretrain import plan as plans
from models.pretrain.planner import memory
from tests.models.pretrain.planned_memory import BATCH, MEDIUM, profile
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow

WITHIN = 0.15
CODED = "dp=2,grad_compression=onebit,exchange_warmup=0"
PLANS = [
    "dp=2",
    "dp=2,microbatches=2",
    "dp=2,zero=2",
    "dp=2,zero=2,microbatches=2",
    "dp=2,zero=3",
    "dp=2,zero=3,microbatches=2",
    "dp=2,activation_checkpoint=full",
    "dp=2,activation_checkpoint=selective",
    "tp=2",
    "tp=2,loss_parallel=true",
    "tp=2,sequence=true",
    "cp=2",
    "pp=2,schedule=gpipe,microbatches=4",
    "pp=2,schedule=1f1b,microbatches=4",
    "pp=2,schedule=interleaved,microbatches=4",
    "pp=2,schedule=zero-bubble,microbatches=4",
    "pp=2,schedule=zbv,microbatches=4",
    "pp=2,schedule=1f1b,activation_checkpoint=full",
    "dp=2,sync_every=2",
    "dp=2,sync_every=2,outer=nesterov",
    "dp=2,grad_compression=powersgd,exchange_warmup=0",
    CODED,
    "dp=2,grad_compression=bf16",
]
RESIDENT = [
    "dp=2",
    "dp=2,zero=3",
    "pp=2,schedule=1f1b,microbatches=4",
    *extended("dp=2,sync_every=2,outer=nesterov", "dp=2,grad_compression=powersgd,exchange_warmup=0", CODED),
]
OF_FOUR = ["dp=2,pp=2,microbatches=2", "dp=2,tp=2,zero=2", "dp=2,pp=2,microbatches=2,sync_every=2"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model", "of_two"),
    [
        pytest.param({"vocab": 512, "width": 128, "length": 16}, PLANS[::3], id="mostly params"),
        pytest.param(
            {"vocab": 256, "width": 64, "length": 64},
            PLANS,
            id="mostly activations",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            {"vocab": 2048, "width": 64, "length": 32},
            PLANS[1::3],
            id="mostly logits",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_predicted_memory_is_measured_memory(model: dict[str, int], of_two: list[str]) -> None:
    found = profile(**model)
    off = {}
    for processes, texts in ((2, of_two), (4, OF_FOUR)):
        measured = ranks.run(processes, "tests.models.pretrain.planned_memory:peaks", texts, **model)
        for number, text in enumerate(texts):
            most = max(peaks[number][1] for peaks in measured)
            off[text] = memory.peak(plans.parse(text), found, BATCH).tensors / most - 1
    assert all(abs(error) <= WITHIN for error in off.values()), {k: round(v, 3) for k, v in off.items()}


@pytest.mark.parametrize("text", RESIDENT)
def test_predicted_memory_is_the_resident_memory_of_a_process(text: str) -> None:
    plan = plans.parse(text)
    ran = ranks.run(plan.processes, "tests.models.pretrain.planned_memory:resident", text, BATCH, **MEDIUM)
    before, most = (max(each) for each in zip(*ran, strict=True))
    predicted = memory.peak(plan, profile(before, **MEDIUM), BATCH)
    assert abs(predicted.bytes / most - 1) <= WITHIN, (predicted, before, most)
    assert most - before >= 0.9 * predicted.tensors  # it is not all in what a process has anyway
