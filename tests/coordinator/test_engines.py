"""Which engine trains a simulation's PyTorch clients, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from coordinator.errors import UserError
from coordinator.experiments import engines, experiment
from coordinator.reports.progress import Quiet
from coordinator.runs.model_setup import set_up_engine
from coordinator.workers.kernels.engine import choose_engine, require_engine
from models.zoo import cnn
from models.zoo.spec import ModelSpec
from strategies import presets
from strategies.strategy import BLOCK
from tests.support.require import compiler


def engine(*sets: str) -> str:
    return experiment.load(None, sets).simulation.engine


def refused(*sets: str) -> str:
    with pytest.raises(UserError) as caught:
        experiment.load(None, sets)
    return str(caught.value)


TORCH = "federation.runtimes={torch=1}"


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ((), "pool"),
        ((TORCH,), "compiled"),
        ((TORCH, "model.name=logreg"), "stacked"),
        ((TORCH, "model.name=mlp"), "stacked"),
        ((TORCH, "model.name=mlp", "model.hidden=[256,64]"), "stacked"),
        ((TORCH, "model.name=mlp", "model.hidden=[64,512]"), "compiled"),
        (("federation.runtimes={torch=1,litert=1}", "model.name=mlp"), "pool"),
        ((TORCH, "model.name=mlp", "model.adapt=head", "model.init=some.safetensors"), "pool"),
        ((TORCH, "model.name=mine:net"), "auto"),
        (("federation.runtimes={torch=1,litert=1}", "model.name=mine:net"), "pool"),
        ((TORCH, "model.name=mine.keras"), "pool"),
        ((TORCH, "model.name=resnet8"), "pool"),
    ],
)
def test_auto_follows_the_shipped_rule(sets: tuple[str, ...], expected: str) -> None:
    assert engine(*sets) == expected


@pytest.mark.parametrize("name", ["pool", "stacked", "compiled"])
def test_a_requested_engine_is_used(name: str) -> None:
    assert engine(TORCH, "model.name=mlp", f"simulation.engine={name}") == name


def test_experiments_of_earlier_versions_name_the_pool_processes() -> None:
    assert engine("simulation.engine=processes") == "pool"


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        ((TORCH, "model.name=cnn"), "model.name = 'cnn' is none"),
        (("federation.runtimes={litert=1}", "model.name=mlp"), "federation.runtimes has none"),
        ((TORCH, "model.name=mlp", "model.adapt=head", "model.init=a.safetensors"), "model.adapt = 'head'"),
        ((TORCH, "model.name=net.keras"), "a Keras model"),
    ],
)
def test_stacked_is_refused_where_it_cannot_train(sets: tuple[str, ...], reason: str) -> None:
    message = refused(*sets, "simulation.engine=stacked")
    assert 'simulation.engine = "stacked"' in message and reason in message


def test_compiled_is_refused_without_torch_clients() -> None:
    assert "federation.runtimes has none" in refused(
        "federation.runtimes={litert=1}", "simulation.engine=compiled"
    )


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (("federation.runtimes={litert=1}",), "federation.runtimes has none"),
        ((TORCH, "model.name=net.keras"), "a Keras model"),
        ((TORCH, "federation.mode=async", "strategy.name=fedbuff"), 'not for federation.mode = "async"'),
        ((TORCH, "strategy.name=ditto"), "asks each for a model of its own"),
    ],
)
def test_a_gpu_is_refused_for_clients_that_cannot_train_as_one(sets: tuple[str, ...], reason: str) -> None:
    message = refused(*sets, "simulation.engine=cuda")
    assert 'simulation.engine = "cuda"' in message and reason in message


def test_a_gpu_has_one_worker_and_large_stacks_by_default() -> None:
    assert engines.default_workers("cuda") == 1
    assert engines.clients_per_job("cuda", 60_000) == 256
    assert engines.clients_per_job("cuda", 10**9) == BLOCK


def test_compiled_clients_of_a_larger_model_train_in_small_jobs() -> None:
    assert engines.clients_per_job("compiled", 600) == 64
    assert engines.clients_per_job("compiled", 60_000) == 16


def test_an_unknown_engine_is_refused() -> None:
    assert "simulation.engine = 'ray'" in refused("simulation.engine=ray")


def test_a_users_own_dense_model_can_be_stacked() -> None:
    own = ModelSpec("mine:net", lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), (6,), 3)
    assert require_engine("stacked", own, 16) == ""


def test_a_users_own_model_that_cannot_be_stacked_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError) as refusal:
        require_engine("stacked", cnn.spec((8, 8), 10), 16)
    assert "model.name = 'cnn': it has Conv2d 'conv1'" in str(refusal.value)


class Hooked(nn.Sequential):
    """What its graph does not show: a hook that scales the output of its layer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3))
        self[0].register_forward_hook(lambda module, inputs, output: 2 * output)


def test_a_model_that_does_more_than_its_graph_shows_is_refused() -> None:
    with pytest.raises(UserError, match="more than its layers show"):
        require_engine("stacked", ModelSpec("mine:net", Hooked, (6,), 3), 16)


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.unsqueeze(1))


@pytest.mark.parametrize(
    ("build", "shape", "expected"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 3)), (6,), "stacked"),
        (lambda: dense(256), (6,), "stacked"),
        (lambda: dense(257), (6,), "compiled"),
        (Convolutions, (6, 6), "compiled"),
        (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), (6,), "pool"),
        (Hooked, (6,), "pool"),
    ],
)
def test_auto_looks_at_the_layers_of_a_users_own_model(
    build: Any, shape: tuple[int, ...], expected: str
) -> None:
    if expected == "compiled":
        compiler()
    assert choose_engine("auto", ModelSpec("mine:net", build, shape, 3), 16) == {
        "engine": expected,
        "why": "",
    }


def test_clients_of_an_own_strategy_that_do_more_than_take_steps_are_trained_by_the_pool() -> None:
    """Which is known only once the strategy is made; the workers need not be asked then."""
    resolved = experiment.load(None, [TORCH, "model.name=mine:net"])
    asked: Any = None

    found = set_up_engine(resolved, presets.get("qfedavg"), {}, asked, Quiet())

    assert (found["engine"], found["chosen"]) == ("pool", "pool")


def test_without_a_compiler_the_pool_trains_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    normalized = ModelSpec("mine:net", lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), (6,), 3)
    assert "no C++ compiler" in require_engine("compiled", normalized, 16)
