"""Clients trained as a stack, or by compiled code of our own, end where a plain loop over them ends.

The loop is `edge_client.train.trainer` with its PyTorch runtime, whose steps `test_torch_sgd` compares with
`torch.optim.SGD`. The tolerance 1e-5 is for sums in another order over a round's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coordinator.workers.kernels import layer_chain
from coordinator.workers.kernels.chain_steps import ChainRuntime, ChainTrainer
from coordinator.workers.kernels.dense_chain import find_chain
from coordinator.workers.kernels.layer_chain import NotStackable
from coordinator.workers.kernels.layout import Work, lay_out
from coordinator.workers.kernels.stacked import StackedTrainer
from coordinator.workers.training import ClientTask, ClientTasks, ClientTrainer, Stack
from coordinator.workers.workspace_arrays import Workspace
from edge_client.data.examples import QUANTITY_PADDING, Examples, NoExamples
from edge_client.train import schedule
from edge_client.train.torch_trainer import TorchRuntime
from edge_client.train.trainer import LocalResult, Trainer, TrainTask
from models.zoo import cnn, logreg, mlp
from models.zoo.spec import ModelSpec
from strategies.client_rules import ClientRule, ControlVariates, DynamicRegularizer, PlainSGD, Proximal
from strategies.codes import known
from strategies.params import Params, flatten
from strategies.update import Update
from tests.support.cli import CACHE
from tests.support.local_data import examples, first_params, noise_like
from tests.support.long import pairs_of
from tests.support.require import compiler

TOLERANCE = 1e-5
UNEQUAL = (7, 20, 1, 16, 33)


def own_module() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3)
    )


SPECS = [
    logreg.spec((12,), 3),
    mlp.spec((3, 4), 4, hidden=[32, 16]),
    ModelSpec("own", own_module, (2, 3), 3),
    mlp.spec((12,), 1, hidden=[8]).of_quantity(),
]


def cohort(spec: ModelSpec, lengths: Sequence[int], *, padded: int = 0) -> tuple[Examples, list[np.ndarray]]:
    """A data set whose rows are dealt out to clients of these sizes; the first labels count for nothing."""
    data = examples(spec.input_shape, spec.classes, sum(lengths), seed=1, padded=padded)
    if spec.task == "regression":
        y = np.random.default_rng(2).standard_normal(len(data)).astype(np.float32)
        y[:padded] = QUANTITY_PADDING
        data = Examples(data.x, y)
    rows = np.random.default_rng(3).permutation(len(data)) if not padded else np.arange(len(data))
    return data, np.split(rows, np.cumsum(lengths)[:-1])


def loop(spec: ModelSpec, data: Examples, clients: Sequence[ClientTask]) -> list[LocalResult]:
    trainer, params = Trainer(TorchRuntime(spec.build(seed=0), spec.loss)), first_params(spec)
    return [trainer.train(params, each.task, data.rows(each.rows), each.state) for each in clients]


def updates(found: Iterable[LocalResult] | Stack, parts: Sequence[np.ndarray]) -> list[Update]:
    if not isinstance(found, Stack):
        return [result.update for result in found]
    return [
        Update(
            {name: delta[at] for name, delta in found.deltas.items()},
            len(part),
            int(found.steps[at]),
            float(found.losses[at]),
        )
        for at, part in enumerate(parts)
    ]


Make = Callable[[ModelSpec], ClientTrainer]


def stacked(spec: ModelSpec) -> ClientTrainer:
    return StackedTrainer(find_chain(spec, spec.build(seed=0)))


@pytest.fixture(scope="module")
def compiled() -> Make:
    compiler()
    cache = CACHE / "compiled"
    return lambda spec: ChainTrainer(
        ChainRuntime(spec, layer_chain.find_chain(spec, spec.build(seed=0)), cache)
    )


@pytest.fixture(params=["stacked", "compiled"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes the trainer of a model."""
    found: Make = stacked if request.param == "stacked" else request.getfixturevalue("compiled")
    return found


def workspace(data: Examples) -> Workspace:
    nothing = np.zeros(0, np.int64)
    return Workspace(
        data.x, data.y, nothing, nothing.astype(np.int32), nothing, nothing, nothing.astype(np.int32)
    )


def make_clients(
    parts: Sequence[np.ndarray], kept: Sequence[dict[str, Params]] | None = None, **task: Any
) -> list[ClientTask]:
    return [
        ClientTask(
            str(at),
            TrainTask(**{"seed": at, "batch_size": 8, "lr": 0.1} | task),
            part,
            kept[at] if kept else {},
        )
        for at, part in enumerate(parts)
    ]


RULES = {
    rule.name: rule
    for rule in (PlainSGD(), Proximal(mu=0.5), ControlVariates(), DynamicRegularizer(alpha=0.3))
}
LENGTHS: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 3},
    "steps": {"steps": 5},
    "momentum": {"epochs": 3, "momentum": 0.9},
    "momentum, clipped": {"steps": 5, "momentum": 0.5, "clip_grad_norm": 0.5},
}
NAMED = dict(zip(["logreg", "mlp", "own", "regression"], SPECS, strict=True))
CONVOLUTIONS = {
    "cnn": cnn.spec((2, 7, 5), 3, channels=(4, 3), hidden=6),
    "quantity": cnn.spec((6, 6), 1, channels=(2, 5)).of_quantity(),
}


@pytest.mark.parametrize(("spec", "rule", "length"), pairs_of(NAMED, RULES, LENGTHS))
def test_a_stack_ends_where_the_loop_ends(spec: ModelSpec, rule: ClientRule, length: dict[str, Any]) -> None:
    require_the_loops_results(stacked(spec), spec, rule, length)


@pytest.mark.parametrize(("spec", "rule", "length"), pairs_of(NAMED | CONVOLUTIONS, RULES, LENGTHS))
def test_compiled_code_ends_where_the_loop_ends(
    spec: ModelSpec, rule: ClientRule, length: dict[str, Any], compiled: Make
) -> None:
    require_the_loops_results(compiled(spec), spec, rule, length)


def require_the_loops_results(
    trainer: ClientTrainer, spec: ModelSpec, rule: ClientRule, length: dict[str, Any]
) -> None:
    data, parts = cohort(spec, UNEQUAL, padded=2)
    params = first_params(spec)
    scaffold = isinstance(rule, ControlVariates)
    broadcast = {"control": noise_like(params, seed=4)} if scaffold else {}
    stream = {"control_variates": "control", "dynamic": "gradient"}.get(rule.name)
    kept = [{stream: noise_like(params, seed=5 + at)} if stream else {} for at in range(len(parts))]
    clients = make_clients(parts, kept, rule=rule, broadcast=broadcast, **length)
    expected = loop(spec, data, clients)

    found = trainer.train(params, ClientTasks.of(clients), workspace(data))

    for at, (update, one_by_one) in enumerate(zip(updates(found, parts), expected, strict=True)):
        assert update.num_steps == one_by_one.update.num_steps
        assert update.train_loss == pytest.approx(one_by_one.update.train_loss, abs=TOLERANCE)
        sent, wanted = flatten({"delta": update.delta, **update.extras}), one_by_one.update
        for name, value in flatten({"delta": wanted.delta, **wanted.extras}).items():
            np.testing.assert_allclose(sent[name], value, rtol=0, atol=TOLERANCE, err_msg=f"{at} {name}")


@pytest.mark.parametrize(
    "task", [{"rule": DynamicRegularizer(alpha=0.3)}, {"code": known.get("sign")}], ids=["rule", "code"]
)
def test_results_outlast_the_next_call_of_the_trainer(task: dict[str, Any], make: Make) -> None:
    """Groups of a job that train differently do so one after the other, and are read after the last."""
    spec = SPECS[1]
    data, parts = cohort(spec, (8, 8))
    params, trainer = first_params(spec), make(spec)
    first, second = (make_clients(parts, [{}, {}], steps=steps, **task) for steps in (2, 5))
    expected = [
        each.delta for each in updates(trainer.train(params, ClientTasks.of(first), workspace(data)), parts)
    ]

    waiting = trainer.train(params, ClientTasks.of(first), workspace(data))
    trainer.train(params, ClientTasks.of(second), workspace(data))

    for each, wanted in zip(updates(waiting, parts), expected, strict=True):
        for name, value in wanted.items():
            assert np.array_equal(each.delta[name], value)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    batch_size=st.integers(1, 24),
    length=st.one_of(st.tuples(st.integers(1, 3), st.none()), st.tuples(st.none(), st.integers(1, 9))),
)
def test_a_stack_sees_the_batches_of_each_client(
    lengths: list[int], batch_size: int, length: tuple[int | None, int | None]
) -> None:
    parts = [np.arange(each) + 100 * at for at, each in enumerate(lengths)]
    epochs, steps = length

    laid = lay_out(parts, range(len(parts)), Work(batch_size, 0.1, epochs, steps))

    for slot, at in enumerate(laid.order):
        generator = np.random.default_rng(int(at))
        alone = schedule.batches(lengths[at], batch_size, epochs=epochs, steps=steps, rng=generator)
        seen = [
            rows[:size].tolist()
            for rows, size in zip(laid.rows[:, slot], laid.sizes[:, slot], strict=True)
            if size
        ]
        assert seen == [parts[at][indices].tolist() for indices in alone]
        assert laid.steps[slot] == len(seen)


@pytest.mark.parametrize("spec", [SPECS[1], CONVOLUTIONS["cnn"]], ids=["mlp", "cnn"])
def test_a_client_that_diverges_leaves_its_neighbours_alone(spec: ModelSpec, make: Make) -> None:
    if make is stacked and spec is not SPECS[1]:
        return  # no dense chain
    data, parts = cohort(spec, (8, 8, 8))
    honest = deltas(spec, data, parts, make(spec))
    data.x[parts[1][3]] = np.nan

    beside = deltas(spec, data, parts, make(spec))

    for name, delta in beside.items():
        assert np.isnan(delta[1]).any()
        np.testing.assert_array_equal(delta[[0, 2]], honest[name][[0, 2]])


def test_a_stack_leaves_nothing_behind_for_the_next(make: Make) -> None:
    spec, trainer = SPECS[1], make(SPECS[1])
    data, parts = cohort(spec, UNEQUAL)
    fresh = deltas(spec, data, parts[:2], make(spec))
    deltas(spec, data, parts, trainer)

    again = deltas(spec, data, parts[:2], trainer)

    for name, delta in again.items():
        np.testing.assert_array_equal(delta, fresh[name])


def test_a_large_model_trains_in_several_small_stacks() -> None:
    spec = mlp.spec((300,), 4, hidden=[800])
    data, parts = cohort(spec, (8, 20, 8, 4, 9, 30, 16))
    clients = make_clients(parts, epochs=1)

    found = updates(stacked(spec).train(first_params(spec), ClientTasks.of(clients), workspace(data)), parts)

    for update, expected in zip(found, loop(spec, data, clients), strict=True):
        for name, delta in expected.update.delta.items():
            np.testing.assert_allclose(update.delta[name], delta, rtol=0, atol=TOLERANCE)


def test_a_client_without_examples_is_refused(make: Make) -> None:
    spec = SPECS[1]
    data, parts = cohort(spec, (8, 8))
    with pytest.raises(NoExamples):
        deltas(spec, data, [parts[0], parts[1][:0]], make(spec))


def deltas(spec: ModelSpec, data: Examples, parts: Sequence[np.ndarray], trainer: ClientTrainer) -> Params:
    """What a stack learns in an epoch, copied."""
    stack = trainer.train(first_params(spec), ClientTasks.of(make_clients(parts, epochs=1)), workspace(data))
    assert isinstance(stack, Stack)
    return {name: delta.copy() for name, delta in stack.deltas.items()}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.fc(x))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(self.fc(x)))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 3))
    module[0].bias.requires_grad = False
    return module


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (cnn.spec((8, 8), 10), "Conv2d 'conv1'"),
        (ModelSpec("own", lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), (6,), 3), "Dropout '1'"),
        (
            ModelSpec("own", lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), (6,), 3),
            "BatchNorm1d '1'",
        ),
        (
            ModelSpec("own", lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, 3)), (6,), 3),
            "relu does not follow",
        ),
        (ModelSpec("own", lambda: nn.Sequential(nn.Linear(3, 3)), (2, 3), 3), "put nn.Flatten() before it"),
        (ModelSpec("own", Residual, (6,), 6), "no chain: the operation add"),
        (ModelSpec("own", Shared, (6,), 6), "share their weights"),
        (ModelSpec("own", frozen, (6,), 3), "0.bias is frozen"),
        (ModelSpec("own", own_module, (2, 3), 3, loss=nn.functional.cross_entropy), "a loss of its own"),
        (ModelSpec("own", own_module, (2, 3), 3, task="next_token"), "predicts tokens"),
        (ModelSpec("own", own_module, (2, 3), 3, "int32"), "int32 inputs"),
    ],
)
def test_another_model_is_refused_with_the_reason(spec: ModelSpec, reason: str) -> None:
    with pytest.raises(NotStackable) as refusal:
        find_chain(spec, spec.build(seed=0))
    assert reason in str(refusal.value)
