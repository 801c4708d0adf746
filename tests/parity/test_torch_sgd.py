"""The written-out step of the PyTorch client is that of `torch.optim.SGD` on the loss the rule stands for.

The proximal term and SCAFFOLD's correction are given here as terms of the loss, mu/2 · ‖w − w₀‖² and
⟨offset, w⟩, and left to autograd. The tolerance 1e-6 is for the sums done in another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edge_client.data.examples import PADDING, Examples
from edge_client.train import schedule
from edge_client.train.torch_trainer import load, read
from edge_client.train.trainer import Trainer, TrainTask
from models.zoo import cnn, logreg, mlp
from models.zoo.spec import ModelSpec
from strategies.client_rules import ClientRule, ControlVariates, DynamicRegularizer, PlainSGD, Proximal
from strategies.params import Params
from tests.support.local_data import examples, first_params, noise_like, torch_runtime
from tests.support.long import pairs_of

SPECS = [
    logreg.spec((12,), 3),
    mlp.spec((12,), 4, hidden=[32, 16]),
    cnn.spec((3, 7, 5), 4, channels=(3, 6), hidden=8),
]


def optimizer_run(
    spec: ModelSpec, params: Params, task: TrainTask, data: Examples, mu: float, offset: Params
) -> Params:
    module = spec.build(seed=99)
    load(module, params)
    start = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=task.lr, momentum=task.momentum)
    rng = np.random.default_rng(task.seed)
    for indices in schedule.batches(
        len(data), task.batch_size, epochs=task.epochs, steps=task.steps, rng=rng
    ):
        batch = data.rows(indices)
        labels = torch.from_numpy(batch.y).long()
        loss = F.cross_entropy(module(torch.from_numpy(batch.x)), labels, ignore_index=PADDING)
        for name, weight in module.named_parameters():
            loss = loss + mu / 2 * (weight - start[name]).square().sum()
            loss = loss + (torch.from_numpy(offset[name]) * weight).sum()
        optimizer.zero_grad()
        loss.backward()
        if task.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(module.parameters(), task.clip_grad_norm)
        optimizer.step()
    return read(module)


@pytest.mark.parametrize(
    ("spec", "rule", "length"),
    pairs_of(
        {str(at): spec for at, spec in enumerate(SPECS)},
        {
            rule.name: rule
            for rule in (PlainSGD(), Proximal(mu=0.5), ControlVariates(), DynamicRegularizer(alpha=0.3))
        },
        {
            "one step": {"steps": 1},
            "two epochs": {"epochs": 2},
            "momentum": {"epochs": 2, "momentum": 0.9},
            "clipped": {"epochs": 2, "clip_grad_norm": 0.5},
            "momentum, clipped": {"epochs": 2, "momentum": 0.5, "clip_grad_norm": 1.0},
        },
    ),
)
def test_a_local_run_is_sgd_on_the_rules_loss(
    spec: ModelSpec, rule: ClientRule, length: dict[str, Any]
) -> None:
    data = examples(spec.input_shape, spec.classes, 20, seed=1, padded=2)
    params = first_params(spec)
    control, kept = noise_like(params, seed=2), noise_like(params, seed=3)
    zeros = {name: np.zeros_like(value) for name, value in params.items()}
    offset, mu = zeros, 0.0
    if isinstance(rule, ControlVariates):
        offset = {name: control[name] - kept[name] for name in params}
    elif isinstance(rule, DynamicRegularizer):
        offset, mu = {name: -kept[name] for name in params}, rule.alpha
    elif isinstance(rule, Proximal):
        mu = rule.mu
    task = TrainTask(seed=4, batch_size=8, lr=0.1, rule=rule, broadcast={"control": control}, **length)

    state = {"control": kept, "gradient": kept}
    result = Trainer(torch_runtime(spec)).train(params, task, data, state)
    delta = result.update.delta

    expected = optimizer_run(spec, params, task, data, mu, offset)
    for name, value in params.items():
        np.testing.assert_allclose(value + delta[name], expected[name], rtol=0, atol=1e-6, err_msg=name)
    if isinstance(rule, DynamicRegularizer):
        for name, value in result.client_state["gradient"].items():
            np.testing.assert_allclose(value, kept[name] - rule.alpha * delta[name], rtol=0, atol=1e-6)


def test_a_proximal_run_stays_nearer_to_its_start() -> None:
    spec = SPECS[1]
    data, params = examples(spec.input_shape, spec.classes, 40, seed=5), first_params(spec)

    def travelled(rule: ClientRule) -> float:
        task = TrainTask(seed=0, batch_size=8, lr=0.1, epochs=10, rule=rule)
        delta = Trainer(torch_runtime(spec)).train(params, task, data).update.delta
        return float(sum(np.square(value).sum() for value in delta.values()))

    assert travelled(Proximal(mu=5.0)) < travelled(Proximal(mu=0.5)) < travelled(PlainSGD())
