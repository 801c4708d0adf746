"""Every family of models is trained by several processes as by one."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from models.pretrain.plan import parse
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow

CURVE = "tests.models.pretrain.families:curve"


@functools.cache
def alone(family: str) -> list[float]:
    found: list[float] = ranks.run(1, CURVE, family, "dp=1")[0]
    return found


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("bert", "tp=2"),
        ("bert masked", "pp=2,schedule=gpipe"),
        ("lstm", "dp=2,zero=3"),
        ("resnet", "pp=2"),
        ("resnet varied", "dp=4"),
        ("gpt tied", "dp=2,tp=2,sequence=true"),
        ("gpt llama", "tp=2,cp=2,sequence=true"),
        ("gpt biased", "tp=2,sequence=true"),
        ("gpt packed", "dp=2,tp=2,sequence=true,zero=3"),
        *extended(
            ("bert", "dp=2"),
            ("bert", "pp=2"),
            ("bert", "tp=2,pp=2"),
            ("bert masked", "dp=2"),
            ("bert masked", "tp=2,loss_parallel=true"),
            ("gpt packed", "dp=2,microbatches=2,activation_checkpoint=full"),
            ("gpt packed", "tp=2,compile=true"),
            ("lstm", "dp=2"),
            ("lstm", "pp=2"),
            ("resnet", "dp=2"),
            ("gpt llama", "cp=4"),
            ("gpt llama", "tp=2,pp=2,loss_parallel=true"),
            ("gpt llama", "dp=2,zero=3"),
            ("gpt biased", "tp=2"),
            ("gpt biased", "pp=2"),
            ("gpt tied", "dp=2"),
            ("gpt tied", "tp=2"),
            ("gpt tied", "dp=2,tp=2,zero=3"),
            ("bert masked tied", "tp=2"),
            ("bert masked tied", "dp=2,zero=3"),
            ("gpt tied", "dp=2,zero=3,activation_checkpoint=full"),
        ),
    ],
)
def test_several_processes_train_what_one_does(family: str, plan: str) -> None:
    for found in ranks.run(parse(plan).processes, CURVE, family, plan):
        np.testing.assert_allclose(found, alone(family), atol=1e-5)
    assert np.ptp(alone(family)) > 1e-3  # a training that does nothing would agree as well
