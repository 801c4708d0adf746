"""8-bit products are products up to their rounding; without a processor that has them they are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from models.pretrain import forward_backward, plan_rules, world
from models.pretrain import plan as plans
from models.pretrain.data.batches import Batches, Share
from models.pretrain.objective import objective_of
from models.pretrain.parallel.model import fp8
from models.pretrain.parallelize import Parallel, sizes_of
from models.pretrain.plan import PlanError
from models.pretrain.training import TrainingOptions
from tests.models.pretrain.curves import Case, small_gpt, tokens
from tests.support import ranks

E4M3, E5M2 = 2**-4, 2**-3
"""Largest relative rounding errors: half a unit in the last of 3 or 2 bits of mantissa."""


@pytest.mark.parametrize("rows", [16, 21])
def test_product_and_gradients_are_within_their_rounding(rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(32, 48)
    x = torch.randn(2, rows, 32, requires_grad=True)
    g = torch.randn(2, rows, 48) * 1e-4
    expected = _outputs(linear, x, g)

    found = _outputs(fp8.Linear(linear), x, g)

    # |error of a product| <= sum |a| |b| ((1 + e_a)(1 + e_b) - 1), and bfloat16 at the end
    absolute = nn.Linear(32, 48)
    with torch.no_grad():
        absolute.weight.copy_(linear.weight.abs())
        absolute.bias.copy_(linear.bias.abs())
    bounds = _outputs(absolute, x.detach().abs().requires_grad_(), g.abs())
    for name, value in expected.items():
        error = (1 + E4M3) * (1 + (E4M3 if name == "y" else E5M2)) - 1 + 2**-7
        assert (found[name] - value).abs().le(error * bounds[name] + 1e-9).all(), name
        assert not torch.equal(found[name], value) or name == "bias"


def _outputs(module: nn.Module, x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    y = module(x)
    x.grad = None
    module.zero_grad()
    y.backward(g.to(y.dtype))
    gradients = {name: p.grad.float() for name, p in module.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach().float(), "x": x.grad.float(), **gradients}


def test_matrices_of_blocks_take_part_and_keep_their_names() -> None:
    spec = small_gpt()
    module = spec.build(0)
    names = set(module.state_dict())
    assert spec.layout is not None

    count = fp8.convert(module, spec.layout)

    assert count == 4 * 6  # query, key, value, out, up, down
    assert set(module.state_dict()) == names
    assert type(module.get_submodule("head")) is nn.Linear


@pytest.mark.slow
def test_a_training_in_8_bits_learns_as_one_in_32() -> None:
    losses = {}
    with world.join(plans.parse("dp=1")) as here:
        spec = small_gpt(width=32)
        for eight in (False, True):
            module = spec.build(3)
            assert spec.layout is not None
            if eight:
                fp8.convert(module, spec.layout)
            run = forward_backward.build(Parallel([module]), objective_of(spec), here)
            stepper = torch.optim.AdamW(module.parameters(), 1e-2)
            batches = Batches(tokens(), 8, 5, Share())
            losses[eight] = []
            for step in range(12):
                stepper.zero_grad()
                losses[eight].append(float(run(batches[step])))
                stepper.step()

    assert losses[False][-1] < losses[False][0] - 0.3
    np.testing.assert_allclose(losses[True], losses[False], rtol=0.03)


def test_a_processor_without_8_bit_products_is_refused() -> None:
    with pytest.raises(PlanError, match=r"compute capability 8\.9 .* on the CPU: use bf16"):
        fp8.require_support(torch.device("cpu"))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("tp=2", "fp8 goes with tp=1"),
        ("pp=2,schedule=zbv", "zbv needs the gradients of inputs and weights apart"),
        ("pp=2,devices=cpu+cuda", "devices names cpu"),
    ],
)
def test_plans_that_do_not_go_with_8_bits_are_refused(plan: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        plan_rules.check(plans.parse(f"{plan},precision=fp8"), sizes_of(small_gpt()), TrainingOptions())


@pytest.mark.slow
def test_plans_train_in_8_bits_up_to_rounding() -> None:
    """The world of a test does not ask for a GPU, so that products are computed on the CPU."""
    texts = ["dp=2", *(f"{plan},precision=fp8" for plan in ("dp=2", "dp=2,zero=3", "pp=2", "cp=2"))]

    exact, *found = ranks.run(2, "tests.models.pretrain.curves:curves", [Case(text) for text in texts])[0]

    for text, losses in zip(texts[1:], found, strict=True):
        np.testing.assert_allclose(losses, exact, rtol=0.03, err_msg=text)
        assert losses != exact
