"""Weight decay leaves out biases and norms, and embeddings on request, however the model is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.pretrain import optimizers, trainer, world
from models.pretrain import plan as plans
from models.pretrain.params import unwrapped_name
from models.pretrain.training import NoDecay, TrainingOptions
from tests.models.pretrain.curves import Case, settings, spec_of, tokens
from tests.support import ranks

RATE, DECAY = 0.1, 0.5
CURVES = "tests.models.pretrain.curves:curves"
DECAYED = "tests.models.pretrain.test_weight_decay:decayed"
PLANS = ["dp=2,zero=1,cp=2", "dp=2,tp=2,zero=3,sequence=true", "pp=2,tp=2", "dp=4,zero=3", "dp=2,pp=2"]
HEAVY = {"weight_decay": DECAY, "lr": RATE}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 3)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("no_decay", "kept"),
    [
        ("none", set()),
        ("vectors", {"norm.weight", "norm.bias", "up.bias"}),
        ("embeddings", {"norm.weight", "norm.bias", "up.bias", "table.weight"}),
    ],
)
def test_params_without_decay_stay_where_the_gradient_is_zero(
    optimizer: Any, no_decay: NoDecay, kept: set[str]
) -> None:
    net, options = Net(), TrainingOptions(optimizer=optimizer, no_decay=no_decay, momentum=0.0, **HEAVY)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)

    stepper = optimizers.over(list(net.parameters()), options, optimizers.without_decay(net, options))
    stepper.step()

    values = {name: float(parameter.detach().mean()) for name, parameter in net.named_parameters()}
    assert values == pytest.approx({name: 1.0 if name in kept else 1 - RATE * DECAY for name in values})


def test_every_param_of_a_training_is_stepped_once() -> None:
    net, options = Net(), TrainingOptions()
    stepper = optimizers.over(list(net.parameters()), options, optimizers.without_decay(net, options))

    stepped = [id(parameter) for group in stepper.param_groups for parameter in group["params"]]

    assert sorted(stepped) == sorted(id(parameter) for parameter in net.parameters())


@pytest.mark.slow
def test_plans_decay_the_params_that_one_process_decays() -> None:
    ((alone,),) = ranks.run(1, DECAYED, ["dp=1"])
    found = ranks.run(4, DECAYED, PLANS)

    assert any(alone.values()) and not all(alone.values())
    for number, plan in enumerate(PLANS):
        together: dict[str, bool] = {}
        for rank in found:
            for name, decays in rank[number].items():
                assert together.setdefault(name, decays) == decays, (plan, name)
        assert together == alone, plan


@pytest.mark.slow
def test_plans_train_what_one_process_trains_with_heavy_decay() -> None:
    options = {**HEAVY, "lr": 1e-2, "no_decay": "embeddings", "clip_norm": 0.5}
    alone, plain = ranks.run(
        1, CURVES, [Case("dp=1", options=options), Case("dp=1", options={**options, "no_decay": "none"})]
    )[0]
    assert np.abs(np.subtract(alone, plain)).max() > 1e-4, "the option changes nothing"

    for plan, losses in zip(
        PLANS, ranks.run(4, CURVES, [Case(p, options=options) for p in PLANS])[0], strict=True
    ):
        np.testing.assert_allclose(losses, alone, atol=1e-5, rtol=0, err_msg=plan)


def decayed(texts: list[str]) -> list[dict[str, bool]]:
    """Runs in the ranks. By plan, whether each param that this process steps decays."""
    with world.join(plans.parse(texts[0])) as first:
        found = []
        for text in texts:
            here = world.build(plans.parse(text), first.device)
            training = trainer.build(
                spec_of(), tokens(), settings(**HEAVY, no_decay="embeddings"), here, seed=5
            )
            names = {
                id(p): unwrapped_name(name)
                for part in training.parallel.parts
                for name, p in part.named_parameters()
            }
            found.append(
                {
                    names[id(parameter)]: group["weight_decay"] > 0
                    for stepper in training.optimizers
                    for group in stepper.param_groups
                    for parameter in group["params"]
                }
            )
        return found
