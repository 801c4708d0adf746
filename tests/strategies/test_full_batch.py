"""A round of FedSGD is a step of gradient descent over the rows of all clients, however they are dealt out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edge_client.data.examples import PADDING, Examples
from edge_client.train.torch_trainer import load, read
from edge_client.train.trainer import Trainer, TrainTask
from models.zoo import mlp
from strategies import presets
from strategies.codes import known
from strategies.params import Params
from tests.support.local_data import examples, first_params, torch_runtime

SPEC = mlp.spec((12,), 4, hidden=[16])
ROWS = 61


def one_round(data: Examples, parts: list[np.ndarray], batch_size: int) -> Params:
    strategy, trainer, params = presets.get("fedsgd"), Trainer(torch_runtime(SPEC)), first_params(SPEC)
    task = TrainTask(0, batch_size, 0.5, steps=1, rule=strategy.client_rule)
    fold = strategy.start(len(parts))
    for position, rows in enumerate(parts):
        update = trainer.train(params, task, data.rows(rows)).update
        assert (update.num_steps, update.num_examples) == (1, len(rows))
        fold.add(position, update)
    moved, _ = strategy.apply(params, strategy.init(params, params), fold.finish(), len(parts))
    return {name: moved[name] for name in moved}


def descent(data: Examples) -> Params:
    """One step of `torch.optim.SGD` over all rows at once."""
    module: nn.Module = SPEC.build(0)
    load(module, first_params(SPEC))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    labels = torch.from_numpy(data.y).long()
    F.cross_entropy(module(torch.from_numpy(data.x)), labels, ignore_index=PADDING).backward()
    optimizer.step()
    return read(module)


@pytest.mark.parametrize("batch_size", [7, 16, 64])
@pytest.mark.parametrize("cuts", [[], [1, 20], [5, 10, 15, 60]], ids=str)
def test_a_round_is_one_step_over_all_rows(cuts: list[int], batch_size: int) -> None:
    data = examples(SPEC.input_shape, SPEC.classes, ROWS, seed=1)
    parts = np.split(np.random.default_rng(2).permutation(ROWS), cuts)

    found, expected = one_round(data, parts, batch_size), descent(data)

    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)


def test_labels_that_do_not_count_weigh_nothing() -> None:
    # The first batch of 8 has no label that counts, the second has three.
    data = examples(SPEC.input_shape, SPEC.classes, 20, seed=3, padded=13)

    found, expected = one_round(data, [np.arange(20)], batch_size=8), descent(data)

    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)


def test_a_code_writes_the_step_and_keeps_the_rest() -> None:
    data, params = examples(SPEC.input_shape, SPEC.classes, ROWS, seed=1), first_params(SPEC)
    trainer, rule = Trainer(torch_runtime(SPEC)), presets.get("fedsgd").client_rule
    plain = trainer.train(params, TrainTask(0, 16, 0.5, steps=1, rule=rule), data).update

    task = TrainTask(0, 16, 0.5, steps=1, rule=rule, code=known.get("topk", share=0.1))
    written = trainer.train(params, task, data)

    assert written.update.encoded is not None
    for name, value in plain.delta.items():
        kept = written.update.delta[name] + written.client_state["residual"][name]
        np.testing.assert_array_equal(kept, value)
