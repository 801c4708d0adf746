"""What a PyTorch client keeps to beside the numbers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from edge_client.data.examples import Examples
from edge_client.train.torch_trainer import TorchRuntime, load, read
from edge_client.train.trainer import Trainer, TrainTask
from models.zoo import mlp
from models.zoo.spec import masked_cross_entropy
from strategies import presets
from tests.support.local_data import examples, first_params, torch_runtime

SPEC = mlp.spec((6,), 3, hidden=[8])
DATA = examples((6,), 3, 20, seed=1)


class WithEverything(nn.Module):
    """BatchNorm, dropout, a frozen layer, one that is never used and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.unused = nn.Linear(2, 2)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.dropout(self.norm(self.frozen(x)).relu()))


def runtime_with_everything(seed: int = 0) -> tuple[TorchRuntime, WithEverything]:
    torch.manual_seed(seed)
    module = WithEverything()
    return TorchRuntime(module, masked_cross_entropy), module


def bits(params: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in params.items()}


def test_the_same_task_gives_the_same_bits_dropout_included() -> None:
    (first, module), (second, _) = runtime_with_everything(0), runtime_with_everything(1)
    params = read(module)
    task = TrainTask(seed=3, batch_size=8, lr=0.1, epochs=2)
    Trainer(first).train(
        params, TrainTask(seed=9, batch_size=4, lr=1.0, steps=2), DATA
    )  # leaves nothing behind
    torch.rand(7)
    deltas = [Trainer(runtime).train(params, task, DATA).update.delta for runtime in (first, second)]
    assert bits(deltas[0]) == bits(deltas[1])


def test_only_trainable_tensors_are_sent_and_unused_ones_do_not_move() -> None:
    runtime, module = runtime_with_everything()
    params = read(module)
    delta = (
        Trainer(runtime).train(params, TrainTask(seed=0, batch_size=8, lr=0.1, steps=2), DATA).update.delta
    )
    assert set(delta) == {"norm.weight", "norm.bias", "unused.weight", "unused.bias", "fc.weight", "fc.bias"}
    assert set(params) - set(delta) == {
        "frozen.weight",
        "frozen.bias",
        "norm.running_mean",
        "norm.running_var",
    }
    assert np.abs(delta["fc.weight"]).max() > 0
    assert not delta["unused.weight"].any()


def test_batchnorm_keeps_its_running_statistics() -> None:
    runtime, module = runtime_with_everything()
    params = read(module)
    Trainer(runtime).train(params, TrainTask(seed=0, batch_size=8, lr=0.1, steps=3), DATA)
    assert module.norm.running_mean.tolist() == params["norm.running_mean"].tolist()
    assert module.norm.running_var.tolist() == params["norm.running_var"].tolist()


def test_dropout_is_off_in_evaluation() -> None:
    runtime, module = runtime_with_everything()
    params = read(module)
    Trainer(runtime).train(params, TrainTask(seed=0, batch_size=8, lr=0.1, steps=1), DATA)
    assert runtime.logits(params, DATA.x).tobytes() == runtime.logits(params, DATA.x).tobytes()


def test_given_params_are_never_written_into_and_may_be_read_only() -> None:
    params = first_params(SPEC)
    before = bits(params)
    shared = Examples(DATA.x.copy(), DATA.y.copy())
    for array in (*params.values(), shared.x, shared.y):
        array.setflags(write=False)
    trainer = Trainer(torch_runtime(SPEC))
    task = TrainTask(seed=0, batch_size=8, lr=0.5, steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = trainer.train(params, task, shared).update.delta
        trainer.evaluate(params, shared)
    assert bits(params) == before
    kept = bits(first)
    trainer.train(params, TrainTask(seed=1, batch_size=8, lr=0.5, steps=3), shared)
    assert bits(first) == kept


def test_a_missing_tensor_is_named() -> None:
    params = first_params(SPEC)
    del params["fc.bias"]
    with pytest.raises(KeyError, match=r"fc\.bias"):
        torch_runtime(SPEC).logits(params, DATA.x)


class Scaled(nn.Module):
    """One tensor has no axes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.fc(x)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedadam"])
def test_a_tensor_without_axes_goes_through_whole_rounds(name: str) -> None:
    strategy = presets.get(name, clip_norm=0.01)
    trainer = Trainer(TorchRuntime(Scaled(), masked_cross_entropy))
    params = read(Scaled())
    state, kept = strategy.init(params, trainer.runtime.trainable), {}
    for number in range(2):
        task = TrainTask(
            number, 8, 0.1, steps=2, rule=strategy.client_rule, broadcast=strategy.broadcast(state)
        )
        result = trainer.train(params, task, DATA, kept)
        kept = result.client_state
        fold = strategy.start(1)
        fold.add(0, strategy.transform(result.update))
        params, state = strategy.apply(params, state, fold.finish(), num_clients=1)
    assert isinstance(params["scale"], np.ndarray) and params["scale"].shape == ()
    assert params["scale"] != 2.0


def test_read_after_load_is_identity() -> None:
    params = first_params(SPEC, seed=5)
    module = SPEC.build(seed=6)
    load(module, params)
    assert bits(read(module)) == bits(params)
    read(module)["fc.bias"][:] = 0
    assert bits(read(module)) == bits(params)


class Tied(nn.Module):
    """Its second layer uses the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.second(self.first(x).relu())
        return logits


def test_a_tied_tensor_is_one_tensor_under_its_first_name() -> None:
    module = Tied()
    params = read(module)
    assert sorted(params) == ["first.bias", "first.weight", "second.bias"]
    runtime = TorchRuntime(module, nn.functional.cross_entropy)
    assert sorted(runtime.trainable) == sorted(params)
    moved = {name: value + 1 for name, value in params.items()}
    load(module, moved)
    assert np.array_equal(module.second.weight.detach().numpy(), moved["first.weight"])
