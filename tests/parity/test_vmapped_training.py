"""Clients trained as one by `torch.func` end where a plain loop over them ends, whatever the model.

The kernels run on the processor here, and where there is a GPU on that too, as recorded graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coordinator.errors import UserError
from coordinator.workers.kernels.engine import require_engine
from coordinator.workers.kernels.layer_chain import NotStackable
from coordinator.workers.kernels.vmapped import DeviceEvaluation, VmapTrainer, open_device
from coordinator.workers.training import ClientTasks, Stack
from edge_client.data.examples import Examples, NoExamples
from edge_client.train.torch_trainer import TorchRuntime
from models.zoo import charlm, cnn, gpt, mlp, resnet8, textcls
from models.zoo.spec import ModelSpec
from strategies.client_rules import ClientRule, ControlVariates, DynamicRegularizer, PlainSGD, Proximal
from strategies.params import flatten
from tests.parity.test_stacked_training import TOLERANCE, cohort, loop, make_clients, updates, workspace
from tests.support.local_data import first_params, noise_like

UNEQUAL = (7, 20, 1, 16, 33)
GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU here")
)


def normalized() -> nn.Module:
    """Whose running statistics are not those of a fresh layer."""
    norm = nn.BatchNorm1d(5)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.fill_(0.3)
    norm.running_var.fill_(2.0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), norm, nn.ReLU(), nn.Linear(5, 3))


def partly_frozen() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module[1].weight.requires_grad = False
    return module


SPECS = {
    "mlp": mlp.spec((12,), 4, hidden=[8]),
    "regression": mlp.spec((12,), 1, hidden=[8]).of_quantity(),
    "cnn": cnn.spec((8, 8), 10),
    "resnet8": resnet8.spec((8, 8), 4),
    "running statistics": ModelSpec("own", normalized, (2, 3), 3),
    "partly frozen": ModelSpec("own", partly_frozen, (2, 3), 3),
    "tokens": charlm.spec((6,), 9, width=8, layers=1, heads=2),
    "causal": gpt.spec((6,), 9, width=8, layers=1, heads=2),
    "text": textcls.spec((6,), 3, vocab=20, width=8, layers=1, heads=2),
}


def local_data(spec: ModelSpec, lengths: Sequence[int]) -> tuple[Examples, list[np.ndarray]]:
    """The clients' rows; the first labels count for nothing."""
    if spec.input_dtype != "int32":
        return cohort(spec, lengths, padded=2)
    draw, rows = np.random.default_rng(0), sum(lengths)
    x = draw.integers(0, spec.tokens, (rows, *spec.input_shape)).astype(np.int32)
    labels = (rows, *spec.input_shape) if spec.task == "next_token" else (rows,)
    y = draw.integers(0, spec.classes, labels).astype(np.int32)
    y[:2] = -1
    return Examples(x, y), np.split(np.arange(rows), np.cumsum(lengths)[:-1])


def trainer_of(spec: ModelSpec, device: str = "cpu") -> VmapTrainer:
    return VmapTrainer(spec, open_device() if device == "cuda" else torch.device(device))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("rule", "work"),
    [
        (PlainSGD(), {"epochs": 2}),
        (Proximal(mu=0.5), {"steps": 5, "momentum": 0.5, "clip_grad_norm": 0.5}),
    ],
    ids=["plain", "proximal, momentum, clipped"],
)
def test_many_as_one_end_where_the_loop_ends(
    name: str, rule: ClientRule, work: dict[str, Any], device: str
) -> None:
    spec = SPECS[name]
    data, parts = local_data(spec, UNEQUAL)
    clients = make_clients(parts, rule=rule, **work)
    params = first_params(spec)

    found = trainer_of(spec, device).train(params, ClientTasks.of(clients), workspace(data))

    for update, alone in zip(updates(found, parts), loop(spec, data, clients), strict=True):
        assert update.num_steps == alone.update.num_steps
        assert update.train_loss == pytest.approx(alone.update.train_loss, abs=TOLERANCE)
        assert update.delta.keys() == alone.update.delta.keys()
        for tensor, value in alone.update.delta.items():
            np.testing.assert_allclose(update.delta[tensor], value, rtol=0, atol=TOLERANCE, err_msg=tensor)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    "rule", [ControlVariates(), DynamicRegularizer(alpha=0.3)], ids=lambda rule: rule.name
)
def test_rules_with_state_end_where_the_loop_ends(rule: ClientRule, device: str) -> None:
    spec = SPECS["cnn"]
    data, parts = local_data(spec, UNEQUAL)
    params = first_params(spec)
    broadcast = {"control": noise_like(params, seed=4)} if isinstance(rule, ControlVariates) else {}
    stream = {"control_variates": "control", "dynamic": "gradient"}[rule.name]
    kept = [{stream: noise_like(params, seed=5 + at)} for at in range(len(parts))]
    clients = make_clients(parts, kept, rule=rule, broadcast=broadcast, epochs=2)

    found = trainer_of(spec, device).train(params, ClientTasks.of(clients), workspace(data))
    assert not isinstance(found, Stack)

    for each, alone in zip(found, loop(spec, data, clients), strict=True):
        sent = flatten({"delta": each.update.delta, **each.update.extras})
        for name, value in flatten({"delta": alone.update.delta, **alone.update.extras}).items():
            np.testing.assert_allclose(sent[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
        assert each.client_state.keys() == alone.client_state.keys()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_trainer_gives_the_same_bits_again_whatever_it_trained_between(device: str) -> None:
    spec = SPECS["cnn"]
    data, parts = local_data(spec, UNEQUAL)
    trainer, params, rows = trainer_of(spec, device), first_params(spec), workspace(data)

    def train(count: int, **work: Any) -> list[Any]:
        clients = make_clients(parts[:count], **({"epochs": 1} | work))
        return updates(trainer.train(params, ClientTasks.of(clients), rows), parts[:count])

    first = train(5)
    train(5, momentum=0.9)
    train(3, lr=0.5)

    for before, after in zip(first, train(5), strict=True):
        for name, value in before.delta.items():
            np.testing.assert_array_equal(after.delta[name], value)


def test_a_client_that_diverges_leaves_its_neighbours_alone() -> None:
    spec = SPECS["cnn"]
    data, parts = local_data(spec, (8, 8, 8))
    clients, params = make_clients(parts, epochs=1), first_params(spec)
    honest = updates(trainer_of(spec).train(params, ClientTasks.of(clients), workspace(data)), parts)
    data.x[parts[1][3]] = np.nan

    beside = updates(trainer_of(spec).train(params, ClientTasks.of(clients), workspace(data)), parts)

    for name in honest[0].delta:
        assert np.isnan(beside[1].delta[name]).any()
        for at in (0, 2):
            np.testing.assert_array_equal(beside[at].delta[name], honest[at].delta[name])


def test_a_client_without_examples_is_refused() -> None:
    spec = SPECS["cnn"]
    data, parts = local_data(spec, (8, 8))
    clients = make_clients([parts[0], parts[1][:0]], epochs=1)
    with pytest.raises(NoExamples):
        trainer_of(spec).train(first_params(spec), ClientTasks.of(clients), workspace(data))


def test_scores_are_those_of_the_ordinary_runtime() -> None:
    spec = SPECS["running statistics"]
    data, _ = local_data(spec, (20,))
    params = first_params(spec)
    expected = TorchRuntime(spec.build(0), spec.loss).logits(params, data.x)
    found = DeviceEvaluation(spec, torch.device("cpu")).logits(params, data.x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


class Peeking(nn.Module):
    """Looks at its values to decide what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(x)
        return found * 2 if bool(found.sum() > 0) else found


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))


@pytest.mark.parametrize(
    ("build", "options", "reason"),
    [
        (with_dropout, {}, "random"),
        (Peeking, {}, "cannot vectorise its step"),
        (lambda: nn.Linear(6, 3), {"loss": nn.functional.cross_entropy}, "a loss of its own"),
    ],
    ids=["dropout", "branches", "loss"],
)
def test_another_model_is_refused_with_the_reason(
    build: Callable[[], nn.Module], options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.workers.kernels.vmapped.open_device", lambda: torch.device("cpu"))
    with pytest.raises(UserError, match=reason) as refusal:
        require_engine("cuda", ModelSpec("mine:net", build, (6,), 3, **options), 4)
    assert "model.name = 'mine:net'" in str(refusal.value) and 'take "pool"' in str(refusal.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_engine_is_refused() -> None:
    with pytest.raises(UserError, match="finds no GPU on this machine") as refusal:
        require_engine("cuda", SPECS["cnn"], 16)
    assert 'simulation.engine = "cuda"' in str(refusal.value)


def test_a_model_that_only_the_trainer_can_refuse_says_so() -> None:
    spec = ModelSpec("own", Peeking, (6,), 3)
    data, parts = local_data(spec, (8, 8))
    with pytest.raises(NotStackable, match="cannot vectorise"):
        trainer_of(spec).train(
            first_params(spec), ClientTasks.of(make_clients(parts, epochs=1)), workspace(data)
        )
