"""Experts kept by several processes answer as they do in one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from models.pretrain import evaluation, params, plan_rules, trainer, world
from models.pretrain import plan as plans
from models.pretrain.data.batches import Batch
from models.pretrain.parallel.model import experts
from models.pretrain.recovery.checkpoint import Checkpointer, Policy
from models.pretrain.training import TrainingOptions
from models.zoo import moe
from tests.models.pretrain.curves import settings, spec_of, tokens
from tests.support import ranks

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


HERE = "tests.models.pretrain.test_experts"
WIDTH, EXPERTS = 8, 4
MODEL: dict[str, Any] = {"name": "moe", "experts": EXPERTS}


@pytest.mark.parametrize("counts", [[[3, 0, 2, 1], [1, 4, 0, 2]], [[5, 0, 0, 0], [0, 0, 0, 3]]])
def test_tokens_meet_their_experts_and_come_back(counts: list[list[int]]) -> None:
    alone = _experts()

    for place, (answers, input_gradient, up_gradient) in enumerate(
        ranks.run(2, f"{HERE}:spread_answers", counts)
    ):
        x = _rows(counts[place])
        expected = alone(x, torch.tensor(counts[place]))
        expected.square().sum().backward()
        assert x.grad is not None
        np.testing.assert_allclose(answers, expected.detach(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(input_gradient, x.grad, rtol=1e-5, atol=1e-5)
        everyones = _gradient_of_all(counts)[place * 2 : place * 2 + 2]
        np.testing.assert_allclose(up_gradient, everyones, rtol=1e-5, atol=1e-5)


def test_a_process_keeps_its_share_of_experts_and_gradients_are_those_of_one() -> None:
    shapes, gradients = ranks.run(4, f"{HERE}:gradients", "dp=4,ep=2")[0]
    _, expected = ranks.run(1, f"{HERE}:gradients", "dp=1")[0]

    assert set(shapes) == {(EXPERTS // 2, 32, 128), (EXPERTS // 2, 128, 32)}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("chosen", [1, 2])
def test_routers_learn_by_the_balancing_loss_of_every_sequence(chosen: int) -> None:
    """Against the losses written out: the mean over sequences of equation 4 of Fedus 2021, and of squared logsumexps."""
    coefficients: dict[str, Any] = {"chosen": chosen, "balance": 0.3, "router_z": 0.1}
    spec = spec_of(**MODEL, **coefficients)
    x, y = (torch.from_numpy(each[:3]).long() for each in (tokens().x, tokens().y))
    y[2] = -1  # no label counts, so the sequence does not
    with world.join(plans.parse("dp=1")) as here:
        training = trainer.build(spec, tokens(), settings(), here, seed=5)
        training.run(Batch(x, y, int((y >= 0).sum()), global_rows=3))
        found = {name: p.grad for name, p in training.parallel.parts[0].named_parameters()}
    module = spec_of(**MODEL, chosen=chosen, balance=0.0).build(5)
    scores: list[torch.Tensor] = []
    for part in module.modules():
        if isinstance(part, moe.Mixture):
            part.router.register_forward_hook(lambda _, __, output: scores.append(output))
    logits = module(x)

    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
    for each in scores:
        for row in each.view(3, -1, EXPERTS)[:2]:
            odds = row.softmax(-1)
            sent = F.one_hot(odds.topk(chosen).indices, EXPERTS).sum(1).float().mean(0) / chosen
            loss = loss + 0.3 * EXPERTS * (sent * odds.mean(0)).sum() / 3
            loss = loss + 0.1 * row.logsumexp(-1).square().mean() / 3
    loss.backward()  # type: ignore[no-untyped-call]

    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_losses_that_are_reported_do_not_contain_the_balancing_loss() -> None:
    reported, evaluated = set(), set()
    for balance in (0.0, 100.0):
        spec = spec_of(**MODEL, balance=balance)
        with world.join(plans.parse("dp=1")) as here:
            training = trainer.build(spec, tokens(), settings(), here, seed=5)
            reported.add(float(training.run(training.batches[0])))
            scores = evaluation.evaluate(training.parallel.parts[0], spec, tokens(), here.device)
            evaluated.add(scores.loss)

    assert len(reported) == len(evaluated) == 1


def test_a_router_that_prefers_one_expert_learns_to_use_all() -> None:
    free, balanced = (_largest_share(balance) for balance in (0.0, 0.1))

    assert free > 0.8 and balanced < 1.5 / EXPERTS, (free, balanced)


def _largest_share(balance: float) -> float:
    """Of the tokens, of the busiest expert, after some steps from a router that sends nearly all to the first."""
    torch.manual_seed(0)
    mixture = moe.Mixture(WIDTH, EXPERTS, chosen=1, balance=balance)
    x = torch.randn(16, 32, WIDTH) + 300 * mixture.router.weight[0].detach()
    optimizer = torch.optim.SGD(mixture.router.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        (1e-9 * mixture(x).square().mean()).backward()
        optimizer.step()
    share = mixture.router(x).argmax(-1).flatten().bincount(minlength=EXPERTS) / (16 * 32)
    return float(share.max())


@pytest.mark.parametrize("width", [6, 8])
def test_a_grouped_product_is_the_loop_over_experts(width: int) -> None:
    torch.manual_seed(0)
    together, counts = moe.Experts(width, EXPERTS), [3, 0, 2, 5]
    x = torch.randn(10, width, requires_grad=True)
    parts = zip(torch.split(x, counts), together.up, together.down, strict=True)
    expected = torch.cat([F.gelu(part @ up, approximate="tanh") @ down for part, up, down in parts])
    wanted = torch.autograd.grad(expected.square().sum(), [x, *together.parameters()])

    found = together(x, torch.tensor(counts))

    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found.square().sum(), [x, *together.parameters()])
    for each, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(each, other)
    nothing = together(x[:0], torch.zeros(EXPERTS, dtype=torch.int64))
    assert nothing.shape == (0, width)
    assert not any(each.any() for each in torch.autograd.grad(nothing.sum(), list(together.parameters())))


def test_gathered_model_is_complete() -> None:
    gathered = ranks.run(2, f"{HERE}:gathered", "dp=2,ep=2")[0]

    expected = params.params_of(spec_of(**MODEL).build(5))
    assert gathered.keys() == expected.keys()
    for name, array in gathered.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_experts_are_saved_once_and_go_on_among_other_processes(tmp_path: Path) -> None:
    expected = ranks.run(2, f"{HERE}:saved", "dp=2,ep=2", tmp_path)[0]

    for plan, processes in (("dp=1", 1), ("dp=4,ep=2,zero=3", 4)):
        for found in ranks.run(processes, f"{HERE}:resumed", plan, tmp_path):
            np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=plan)


def test_a_token_is_answered_by_its_likeliest_expert() -> None:
    torch.manual_seed(0)
    mixture = moe.Mixture(WIDTH, EXPERTS, chosen=1)
    x = torch.randn(2, 3, WIDTH)

    answers = mixture(x)

    odds = mixture.router(x).softmax(-1)
    for row, token in np.ndindex(2, 3):
        best = int(odds[row, token].argmax())
        counts = torch.zeros(EXPERTS, dtype=torch.int64)
        counts[best] = 1
        expected = odds[row, token, best] * mixture.experts(x[row, token][None], counts)[0]
        torch.testing.assert_close(answers[row, token], expected)


def test_all_experts_chosen_are_summed_by_their_odds() -> None:
    torch.manual_seed(0)
    mixture = moe.Mixture(WIDTH, EXPERTS, chosen=EXPERTS)
    x = torch.randn(1, 5, WIDTH)

    odds = mixture.router(x).softmax(-1)
    each = torch.stack(
        [
            mixture.experts(x[0], torch.tensor([5 * (index == expert) for index in range(EXPERTS)]))
            for expert in range(EXPERTS)
        ],
        -1,
    )
    torch.testing.assert_close(mixture(x)[0], (each * odds[0][:, None]).sum(-1))


def test_the_output_of_a_token_does_not_depend_on_its_batch() -> None:
    module = spec_of(**MODEL).build(1)
    x = torch.from_numpy(tokens().x[:4])

    torch.testing.assert_close(module(x)[2], module(x[2:3])[0])


def test_more_experts_chosen_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="chosen is 5, expected 1 to the 4 experts"):
        moe.spec((16,), 48, experts=4, chosen=5)


def test_experts_that_processes_cannot_share_are_refused() -> None:
    from models.pretrain.parallelize import sizes_of

    with pytest.raises(plans.PlanError, match="ep=3 must divide the 4 experts"):
        plan_rules.check(plans.parse("dp=3,ep=3"), sizes_of(spec_of(**MODEL)), TrainingOptions(batch_size=12))


def _experts() -> moe.Experts:
    torch.manual_seed(0)
    made = moe.Experts(WIDTH, EXPERTS)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(20)
    return made


def _rows(counts: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(n * 10**place for place, n in enumerate(counts)))
    return torch.randn(sum(counts), WIDTH, generator=generator).requires_grad_()


def _gradient_of_all(counts: list[list[int]]) -> torch.Tensor:
    alone = _experts()
    for mine in counts:
        alone(_rows(mine), torch.tensor(mine)).square().sum().backward()
    assert alone.up.grad is not None
    return alone.up.grad


def spread_answers(counts: list[list[int]]) -> tuple[Any, ...]:
    """Runs in the ranks."""
    with world.join(plans.parse("dp=2,ep=2")) as here:
        spread = experts.ShardedExperts(_experts(), here.axis("shard"))
        mine = counts[here.rank]
        x = _rows(mine)
        answers = spread(x, torch.tensor(mine))
        answers.square().sum().backward()
        gradient = dict(spread.named_parameters())["up"].grad
        assert isinstance(gradient, DTensor) and x.grad is not None
        return answers.detach().numpy(), x.grad.numpy(), gradient.to_local().numpy()


def gradients(plan: str) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Runs in the ranks. Shapes of this process's experts, and all gradients, whole."""
    with world.join(plans.parse(plan)) as here:
        training = trainer.build(spec_of(**MODEL), tokens(), settings(), here, seed=5)
        training.run(training.batches[0])
        training.sums.finish()
        named = dict(training.parallel.parts[0].named_parameters())
        shapes = [tuple(p.to_local().shape) for p in named.values() if isinstance(p, DTensor)]
        full = {
            name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad)
            for name, p in named.items()
        }
        return shapes, {name: gradient.numpy() for name, gradient in full.items() if gradient is not None}


def gathered(plan: str) -> dict[str, Any] | None:
    """Runs in the ranks."""
    spec = spec_of(**MODEL)
    with world.join(plans.parse(plan)) as here:
        training = trainer.build(spec, tokens(), dataclasses.replace(settings(), steps=1), here, seed=5)
        module = spec.build(0)
        tensors = list(params.gathered(training.parallel.parts, module, here))
        return {
            name: t.numpy() for name, t in zip(sorted(params.float_tensors(module)), tensors, strict=True)
        }


def saved(plan: str, folder: Path) -> list[float]:
    """Runs in the ranks. Trains three steps, saves, and gives the losses of those that follow."""
    with world.join(plans.parse(plan)) as here:
        training = trainer.build(spec_of(**MODEL), tokens(), settings(), here, seed=5)
        for _ in range(3):
            training.train_step()
        training.losses()
        checkpointer = Checkpointer(folder, Policy(), training.identity, here)
        checkpointer.save(training.state, training.step)
        checkpointer.wait()
        return _to_the_end(training)


def resumed(plan: str, folder: Path) -> list[float]:
    """Runs in the ranks."""
    with world.join(plans.parse(plan)) as here:
        training = trainer.build(spec_of(**MODEL), tokens(), settings(), here, seed=5)
        training.step = Checkpointer(folder, Policy(), training.identity, here).restore(training.state)
        return _to_the_end(training)


def _to_the_end(training: trainer.Trainer) -> list[float]:
    while training.step < training.steps:
        training.train_step()
    return training.losses()
