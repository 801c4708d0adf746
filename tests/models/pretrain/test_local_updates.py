"""Training that talks every few steps only: equal to plain data parallelism where algebra says so, cheaper otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.models.pretrain.curves import Case
from tests.support import ranks

pytestmark = pytest.mark.slow

HERE = "tests.models.pretrain.test_local_updates"
CURVES = "tests.models.pretrain.curves:curves"
SGD = {"optimizer": "sgd", "lr": 0.1}


def test_agreeing_in_every_step_with_sgd_inside_is_plain_data_parallelism() -> None:
    once = {**SGD, "outer_lr": 1.0, "outer_momentum": 0.0}
    plain, local, outer, rarely = ranks.run(
        2,
        CURVES,
        [
            Case("dp=2", options=SGD),
            Case("dp=2,sync_every=1", options=SGD),
            Case("dp=2,sync_every=1,outer=nesterov", options=once),
            Case("dp=2,sync_every=3", options=SGD),
        ],
    )[0]
    np.testing.assert_allclose(local, plain, atol=1e-5)
    np.testing.assert_allclose(outer, plain, atol=1e-5)
    assert np.abs(np.subtract(rarely, plain)).max() > 1e-4


@pytest.mark.extended
def test_agreeing_goes_with_split_matrices_and_stages() -> None:
    alone = ranks.run(1, CURVES, [Case("dp=1", options=SGD)])[0][0]
    cases = [Case(f"dp=2,{rest},sync_every=1", options=SGD) for rest in ("tp=2", "pp=2")]
    for found in ranks.run(4, CURVES, cases)[0]:
        np.testing.assert_allclose(found, alone, atol=1e-5)


def test_outer_step_is_torchs_nesterov() -> None:
    for found, expected in ranks.run(2, f"{HERE}:outer_steps"):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_params_agree_when_requested_early() -> None:
    apart, together = zip(*ranks.run(2, f"{HERE}:requested_early"), strict=True)
    assert apart[0] != apart[1]
    assert together[0] == together[1]


@pytest.mark.extended
def test_diloco_and_local_sgd_reach_about_the_loss_with_an_eighth_of_the_bytes() -> None:
    plans = ["dp=2", "dp=2,sync_every=8", "dp=2,sync_every=8,outer=nesterov"]
    plain, *rare = ranks.run(2, "tests.models.pretrain.markov:trained", plans)[0]
    for found in rare:
        assert found.sent_bytes == pytest.approx(plain.sent_bytes / 8, rel=0.02)
        assert found.loss <= 1.05 * plain.loss


# what the processes run


def outer_steps() -> tuple[list[float], list[float]]:
    """A param after four agreements, each after one step against a gradient of the process's own; and torch's."""
    from models.pretrain import plan as plans
    from models.pretrain import world
    from models.pretrain.parallel.data.local_updates import LocalUpdates

    with world.join(plans.parse("dp=2")) as here:
        mine = torch.nn.Parameter(torch.zeros(3))
        inner = torch.optim.SGD([mine], 0.1)
        local = LocalUpdates([inner], here.group("dp"), 1, lr=0.7, momentum=0.9)
        theirs = torch.nn.Parameter(torch.zeros(3))
        outer = torch.optim.SGD([theirs], 0.7, momentum=0.9, nesterov=True)
        for step in range(4):
            gradients = [torch.tensor([1.0, -2.0, step]) * (rank + 1) for rank in range(2)]
            mine.grad = gradients[here.rank]
            local.before_step()
            inner.step()
            local.after_step()
            theirs.grad = 0.1 * torch.stack(gradients).mean(0)
            outer.step()
        return mine.tolist(), theirs.tolist()


def requested_early() -> tuple[float, float]:
    """Sum of a process's params after two of three steps alone, and once they agree."""
    from models.pretrain import plan as plans
    from models.pretrain import trainer, world
    from tests.models.pretrain.curves import settings, small_gpt, tokens

    def total(training: Any) -> float:
        return float(sum(p.detach().double().sum() for p in training.parallel.parts[0].parameters()))

    with world.join(plans.parse("dp=2,sync_every=3")) as here:
        training = trainer.build(small_gpt(), tokens(), settings(), here, seed=5)
        training.train_step()
        training.train_step()
        apart = total(training)
        assert training.local is not None
        training.local.synchronize()
        return apart, total(training)
