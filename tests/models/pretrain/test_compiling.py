"""Compiled blocks train as uncompiled ones, and where there is no compiler they stay uncompiled, which is said."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.pretrain import curves
from tests.support import ranks
from tests.support.require import compiler

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


SMALL = {"width": 32, "layers": 2, "heads": 2}


def compiled_curve(plan: str) -> tuple[list[float], int]:
    """Losses, and how many graphs were compiled for them."""
    import torch._dynamo.utils

    losses = curves.curve(plan, SMALL, steps=3)
    return losses, int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def curve_without_compiler(plan: str) -> list[float]:
    import os

    os.environ["PATH"] = "/nowhere"
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler"):
        return curves.curve(plan, SMALL, steps=3)


@pytest.mark.extended
def test_compiled_blocks_train_as_others() -> None:
    compiler()
    (plain,) = ranks.run(1, "tests.models.pretrain.curves:curve", "dp=1", SMALL, steps=3)
    ((losses, graphs),) = ranks.run(1, "tests.models.pretrain.test_compiling:compiled_curve", "compile=true")
    np.testing.assert_allclose(losses, plain, atol=1e-5)
    assert graphs > 0


def test_without_a_compiler_blocks_stay_uncompiled_and_a_notice_says_so() -> None:
    (plain,) = ranks.run(1, "tests.models.pretrain.curves:curve", "dp=1", SMALL, steps=3)
    (losses,) = ranks.run(1, "tests.models.pretrain.test_compiling:curve_without_compiler", "compile=true")
    assert losses == plain
