"""A process never holds the whole model: trained, saved, resumed, scored, written and exported where the kernel refuses it.

Plain SGD has 8 bytes a param, half of which are the params: of 4 processes each has a share of half the bytes of the
params. It may take that and four layers, which is less than the params alone; with 16 processes that is a quarter of the params.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.pretrain.plan import parse
from tests.models.pretrain.limited import LIMITED, STEPS, Found, model
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 256, 32
LAYER_BYTES = 4 * 12 * WIDTH**2
LAYERS_IN_FLIGHT = 4
"""Params of a layer and the buffer they are gathered through, or its gradients and the buffer they are summed in; two for
activations, the shard of a sum, and free memory between tensors."""
QUARTER = ("dp=16,zero=3", "tp=4,pp=4,microbatches=4", "pp=4,dp=4,zero=3,microbatches=4")
"""Of 16 processes: the params are 4 times what each may hold in all."""
SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.05}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Found]:
    """What one process without a limit finds, by the batch's rows."""

    @cache
    def train(batch_size: int) -> Found:
        folder = tmp_path_factory.mktemp("alone")
        options = {**SGD, "batch_size": batch_size}
        found: Found = ranks.run(1, LIMITED, "dp=1", WIDTH, LAYERS, folder, **options)[0]
        return found

    return train


@pytest.mark.parametrize(
    "plan",
    [
        "dp=4,zero=3",
        *extended(
            "tp=4",
            "pp=4,microbatches=4",
            "dp=8,zero=3",
            "tp=2,dp=2,zero=3",
            "dp=4,zero=3,microbatches=2",
            "pp=2,dp=2,zero=3,microbatches=2",
            *QUARTER,
        ),
    ],
)
def test_a_process_needs_no_more_than_its_share_and_some_layers(
    plan: str, alone: Callable[[int], Found], tmp_path: Path
) -> None:
    processes = parse(plan).processes
    # a later micro-batch has its activations beside all gradients
    layers = LAYERS_IN_FLIGHT + (parse(plan).pp == 1 and parse(plan).num_microbatches > 1)
    allowed = 2 * params_bytes() // processes + layers * LAYER_BYTES
    assert allowed < params_bytes() / (4 if plan in QUARTER else 1)
    rows = max(4, parse(plan).dp * parse(plan).num_microbatches)
    options = {**SGD, "batch_size": rows}
    expected = alone(rows)
    for found in ranks.run(processes, LIMITED, plan, WIDTH, LAYERS, tmp_path, allowed, **options):
        np.testing.assert_allclose(found.losses, expected.losses, atol=1e-5)
        np.testing.assert_allclose(found.resumed, expected.resumed, atol=1e-5)
        np.testing.assert_allclose(found.test_loss, expected.test_loss, atol=1e-5)
    assert len(expected.losses) == STEPS


def test_the_limit_refuses_the_whole_model(tmp_path: Path) -> None:
    """The control: a process that builds all of it fails, before it has gradients."""
    allowed = params_bytes() // 2 + LAYERS_IN_FLIGHT * LAYER_BYTES
    with pytest.raises(ranks.RankFailed, match="can't allocate memory"):
        ranks.run(1, LIMITED, "dp=1", WIDTH, LAYERS, tmp_path, allowed, **SGD, batch_size=4)


def params_bytes() -> int:
    return 4 * sum(parameter.numel() for parameter in model(WIDTH, LAYERS).module().parameters())
