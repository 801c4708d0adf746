"""A compiled step is the ordinary one, to float32 rounding, and is left aside where it is not.

The tolerance 1e-5 is for sums in another order over a round's steps.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import nn

from coordinator.workers.kernels.compiled import CompiledRuntime
from coordinator.workers.kernels.native import CannotCompile
from edge_client.train.trainer import Trainer, TrainTask
from models.zoo import cnn
from models.zoo.spec import ModelSpec
from strategies.client_rules import Proximal
from tests.support.local_data import examples, first_params, torch_runtime
from tests.support.require import compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended,  # a compiler takes a minute for it
]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    compiler()


def test_a_compiled_step_ends_where_the_loop_ends(tmp_path: Path) -> None:
    spec = cnn.spec((2, 6, 6), 3, channels=(4, 4))
    data, params = examples(spec.input_shape, 3, 20, seed=1, padded=2), first_params(spec)
    # The last batch of an epoch is short, and takes the ordinary step.
    options = {"momentum": 0.5, "clip_grad_norm": 1.0}
    task = TrainTask(seed=4, batch_size=8, lr=0.1, epochs=2, rule=Proximal(mu=0.5), **options)
    expected = Trainer(torch_runtime(spec)).train(params, task, data).update

    found = Trainer(CompiledRuntime(spec, 8, tmp_path / "compiled")).train(params, task, data).update

    assert found.train_loss == pytest.approx(expected.train_loss, abs=1e-5)
    for name, delta in expected.delta.items():
        np.testing.assert_allclose(found.delta[name], delta, rtol=0, atol=1e-5, err_msg=name)
        assert found.delta[name].flags.c_contiguous
    assert list((tmp_path / "compiled").rglob("*.so"))
    assert not [path for path in tmp_path.rglob("*") if "fxgraph" in path.name or "aotautograd" in path.name]


@pytest.mark.extended
def test_a_model_with_dropout_is_not_compiled(tmp_path: Path) -> None:
    spec = ModelSpec("own", lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), (6,), 3)
    with pytest.raises(CannotCompile, match="dropout"):
        CompiledRuntime(spec, 8, tmp_path / "compiled")
