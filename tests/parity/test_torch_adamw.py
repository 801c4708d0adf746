"""The written-out AdamW of the PyTorch client is `torch.optim.AdamW` on the loss the rule stands for, over the rounds of one client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edge_client.data.examples import PADDING, Examples
from edge_client.train import schedule
from edge_client.train.torch_trainer import load, read
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire.device import TaskMessage
from models.zoo import cnn, mlp
from models.zoo.spec import ModelSpec
from strategies.client_rules import Correction, PlainSGD, Proximal
from strategies.local_optimizers import AdamW, AdamWState, UnknownOptimizer, from_options
from strategies.params import Params
from tests.support.local_data import examples, first_params, torch_runtime

SPECS = [mlp.spec((12,), 4, hidden=[32, 16]), cnn.spec((3, 7, 5), 4, channels=(3, 6), hidden=8)]
ADAMW = AdamW(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1)


def optimizer_rounds(
    spec: ModelSpec, params: Params, tasks: list[TrainTask], data: Examples, mu: float, *, keep: bool
) -> Params:
    """Rounds of a single client, whose model is also the global one."""
    module = spec.build(seed=99)
    load(module, params)
    optimizer: torch.optim.Optimizer | None = None
    for task in tasks:
        assert task.optimizer is not None
        if optimizer is None or not keep:
            options = task.optimizer
            optimizer = torch.optim.AdamW(
                module.parameters(),
                lr=task.lr,
                betas=(options.beta1, options.beta2),
                eps=options.eps,
                weight_decay=options.weight_decay,
            )
        start = [weight.detach().clone() for weight in module.parameters()]
        rng = np.random.default_rng(task.seed)
        for indices in schedule.batches(len(data), task.batch_size, epochs=2, steps=None, rng=rng):
            batch = data.rows(indices)
            labels = torch.from_numpy(batch.y).long()
            loss = F.cross_entropy(module(torch.from_numpy(batch.x)), labels, ignore_index=PADDING)
            for weight, first in zip(module.parameters(), start, strict=True):
                loss = loss + mu / 2 * (weight - first).square().sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if task.clip_grad_norm:
                torch.nn.utils.clip_grad_norm_(module.parameters(), task.clip_grad_norm)
            optimizer.step()
    return read(module)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("keep", [False, True])
def test_the_rounds_of_a_client_are_adamw_with_fresh_or_kept_moments(
    spec: ModelSpec, clip: float, mu: float, keep: bool
) -> None:
    data, params = examples(spec.input_shape, spec.classes, 20, seed=1, padded=2), first_params(spec)
    task = TrainTask(
        seed=4,
        batch_size=8,
        lr=0.01,
        epochs=2,
        rule=Proximal(mu) if mu else PlainSGD(),
        clip_grad_norm=clip,
        optimizer=replace(ADAMW, keep=keep),
    )
    tasks = [replace(task, seed=seed) for seed in (4, 5, 6)]
    expected = optimizer_rounds(spec, params, tasks, data, mu, keep=keep)

    state: dict[str, Params] = {}
    for each in tasks:
        result = Trainer(torch_runtime(spec)).train(params, each, data, state)
        params = {name: value + result.update.delta[name] for name, value in params.items()}
        state = result.client_state

    assert bool(state) == keep
    for name, value in params.items():
        # AdamW divides by the root of the second moment, so the last bit of a small gradient counts for more.
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=5e-6, err_msg=name)


def test_tensors_that_a_pass_fixes_neither_move_nor_decay() -> None:
    spec = SPECS[0]
    params, runtime = first_params(spec), torch_runtime(spec)
    head = frozenset(name for name in params if name.startswith("fc."))
    correction = Correction(fixed=head, adamw=ADAMW.begin({}))
    batches = [examples(spec.input_shape, spec.classes, 8, seed=2)] * 3
    trained, _ = runtime.take_steps(params, batches, 0.01, correction, 0)
    assert {name for name in params if np.array_equal(trained[name], params[name])} == head
    assert correction.adamw is not None
    assert correction.adamw.first.keys() == params.keys() - head


def test_a_task_message_carries_the_optimizer() -> None:
    sent = TaskMessage(1, "a", "", 3, 8, 0.01, None, 5, {"name": "plain"}, optimizer=ADAMW.to_options())
    received = TaskMessage.from_json(sent.to_json())
    assert TrainTask.of(received, {}).optimizer == ADAMW
    assert "optimizer" not in replace(sent, optimizer=None).to_json()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "lion"}, "local optimizer 'lion' is unknown here; known: adamw"),
        ({"name": "adamw", "rho": 1}, "'rho', which is unknown here"),
        ({"name": "adamw", "beta1": 1.0}, "beta1 = 1.0, which is out of range"),
        ({"name": "adamw", "eps": 0}, "eps = 0, which"),
        ({"name": "adamw", "weight_decay": float("nan")}, "weight_decay = nan"),
        ({"name": "adamw", "keep": 1}, "keep = 1"),
    ],
)
def test_an_optimizer_that_a_client_does_not_know_is_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(UnknownOptimizer, match=message):
        from_options(options)


def test_a_runtime_without_adamw_refuses_its_steps() -> None:
    correction = Correction(adamw=AdamWState(ADAMW, 0, {}, {}))
    with pytest.raises(UnknownOptimizer, match="this client trains in litert"):
        correction.require_sgd("litert")
