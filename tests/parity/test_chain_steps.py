"""Our own step for chains of convolutions, pooling and dense layers is PyTorch's, to float32 rounding.

The tolerance 1e-5 is for sums in another order over a round's steps.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from coordinator.workers.kernels import native
from coordinator.workers.kernels.chain_steps import ChainRuntime, ChainTrainer
from coordinator.workers.kernels.engine import make_trainer, require_engine
from coordinator.workers.kernels.layer_chain import NotStackable, find_chain
from coordinator.workers.kernels.native import CannotCompile
from edge_client.train.trainer import Trainer, TrainTask
from models.zoo import cnn
from models.zoo.spec import ModelSpec
from strategies.client_rules import ClientRule, ControlVariates, PlainSGD, Proximal
from strategies.local_optimizers import AdamW
from tests.bench.plain_loop import build_cnn
from tests.support.cli import CACHE
from tests.support.local_data import examples, first_params, noise_like, torch_runtime
from tests.support.require import compiler


@pytest.fixture
def _compiler() -> None:
    compiler()


needs_compiler = pytest.mark.usefixtures("_compiler")


class Functional(nn.Module):
    """As PyTorch's tutorials write it: functions between layers, images of one channel without an axis for it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, (3, 2), padding=1, bias=False)
        self.drop = nn.Dropout(0)
        self.fc1, self.fc2 = nn.Linear(5 * 4 * 4, 7, bias=False), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv(x.unsqueeze(1))), 2, 2)
        x = torch.relu(self.fc1(self.drop(x.view(-1, 80))))
        logits: torch.Tensor = self.fc2(x)
        return logits


SPECS = [
    cnn.spec((8, 8), 10),
    cnn.spec((2, 7, 5), 3, channels=(4, 3), hidden=6),
    ModelSpec("lenet", lambda: build_cnn((32, 32, 3), 10), (32, 32, 3), 10),
    ModelSpec("functional", Functional, (8, 8), 3),
]


def runtime(spec: ModelSpec, cache: Path) -> ChainRuntime:
    return ChainRuntime(spec, find_chain(spec, spec.build(0)), cache)


@pytest.fixture(scope="module")
def cache() -> Path:
    return CACHE / "compiled"


@needs_compiler
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "clip_grad_norm": 0.5},
        {"rule": Proximal(mu=0.5)},
        {"optimizer": AdamW()},
    ],
    ids=["plain", "momentum", "proximal", "adamw"],
)
def test_steps_end_where_the_loop_ends(spec: ModelSpec, options: dict[str, Any], cache: Path) -> None:
    data, params = examples(spec.input_shape, spec.classes, 30, seed=1, padded=2), first_params(spec)
    task = TrainTask(
        seed=4, batch_size=8, lr=0.01, epochs=2, **options
    )  # the last batch of an epoch is short
    expected = Trainer(torch_runtime(spec)).train(params, task, data).update

    found = Trainer(runtime(spec, cache)).train(params, task, data).update

    assert found.train_loss == pytest.approx(expected.train_loss, abs=1e-5)
    assert list(found.delta) == list(expected.delta)
    for name, delta in expected.delta.items():
        # AdamW divides by the size of the gradients, so rounding shows in the smallest of them.
        tolerance = 1e-4 if "optimizer" in options else 1e-5
        np.testing.assert_allclose(found.delta[name], delta, rtol=0, atol=tolerance, err_msg=name)


@needs_compiler
@pytest.mark.parametrize("rule", [PlainSGD(), ControlVariates()], ids=["plain", "scaffold"])
def test_a_runtime_trains_one_client_after_the_other(rule: ClientRule, cache: Path) -> None:
    spec = SPECS[0]
    broadcast = {"control": noise_like(first_params(spec), seed=5)} if rule != PlainSGD() else {}
    ours, theirs = Trainer(runtime(spec, cache)), Trainer(torch_runtime(spec))
    for seed, count in enumerate((5, 21, 1, 40)):
        data = examples(spec.input_shape, spec.classes, count, seed=seed)
        task = TrainTask(seed=seed, batch_size=10, lr=0.1, epochs=1, rule=rule, broadcast=broadcast)
        expected = theirs.train(first_params(spec), task, data).update
        found = ours.train(first_params(spec), task, data).update
        for name, delta in expected.delta.items():
            np.testing.assert_allclose(found.delta[name], delta, rtol=0, atol=1e-5, err_msg=name)


@st.composite
def chains(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, int, int]]:
    """Any chain that the step knows."""
    number = st.integers
    shape = channels, height, width = draw(number(1, 9)), draw(number(3, 9)), draw(number(3, 12))
    layers: list[nn.Module] = []
    for _ in range(draw(number(1, 3))):
        kernel = draw(number(1, min(height, 5))), draw(number(1, min(width, 5)))
        stride, padding, outputs = draw(number(1, 3)), draw(number(0, 2)), draw(number(1, 19))
        layers.append(nn.Conv2d(channels, outputs, kernel, stride, padding, bias=draw(st.booleans())))
        channels = outputs
        height = (height + 2 * padding - kernel[0]) // stride + 1
        width = (width + 2 * padding - kernel[1]) // stride + 1
        if draw(st.booleans()):
            layers.append(draw(st.sampled_from([nn.ReLU(), nn.Tanh(), nn.Sigmoid()])))
        if draw(st.booleans()):
            pool = draw(number(1, min(height, 3))), draw(number(1, min(width, 3)))
            layers.append(nn.MaxPool2d(pool))
            height, width = height // pool[0], width // pool[1]
    features = channels * height * width
    layers.append(nn.Flatten())
    if draw(st.booleans()):
        hidden = draw(number(1, 20))
        layers += [nn.Linear(features, hidden, bias=draw(st.booleans())), nn.ReLU()]
        features = hidden
    layers.append(nn.Linear(features, 4))
    if draw(st.booleans()):
        layers.append(nn.Tanh())
    return nn.Sequential(*layers), shape


@needs_compiler
@settings(deadline=None)
@given(made=chains(), batches=st.lists(st.integers(1, 37), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_any_chain_has_the_gradients_of_autograd(
    made: tuple[nn.Module, tuple[int, int, int]], batches: list[int], seed: int, cache: Path
) -> None:
    module, shape = made
    spec = ModelSpec("any", lambda: module, shape, 4)
    ours, theirs = runtime(spec, cache), torch_runtime(spec)
    rng = torch.Generator().manual_seed(seed)
    for batch in batches:
        x, y = torch.randn(batch, *shape, generator=rng), torch.randint(-1, 4, (batch,), generator=rng).int()
        y[0] = 1
        expected_loss, expected = theirs._differentiate(x, y)
        loss, gradients = ours._differentiate(x, y)
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
        for found, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.extended
@pytest.mark.parametrize("march", ["haswell", "x86-64"])
def test_narrower_vectors_give_the_same(march: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("needs an x86-64 processor")
    flags = [f"-march={march}" if flag == "-march=native" else flag for flag in native._FLAGS]
    monkeypatch.setattr(native, "_FLAGS", tuple(flags))
    for spec in SPECS:
        ours, theirs = runtime(spec, tmp_path), torch_runtime(spec)
        for batch in (1, 3, 8, 20, 37):
            x, y = spec.example_batch(batch)
            wanted = theirs._differentiate(x, y)[1]
            for found, expected in zip(ours._differentiate(x, y)[1], wanted, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def sequential(*layers: nn.Module) -> ModelSpec:
    return ModelSpec("own", lambda: nn.Sequential(*layers), (2, 6, 6), 3)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3)), "groups"),
        (sequential(nn.Conv2d(2, 4, 3, padding="same"), nn.Flatten(), nn.Linear(144, 3)), "another padding"),
        (sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 3)), "GELU"),
        (sequential(nn.Conv2d(2, 3, 6), nn.Flatten(), nn.Tanh(), nn.Linear(3, 3)), "does not follow a layer"),
        (sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(4, 3)), "MaxPool2d"),
        (sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)), "BatchNorm2d"),
        (sequential(nn.Conv2d(2, 3, 6), nn.Flatten()), "end in a linear layer"),
        (sequential(nn.Conv2d(3, 3, 6), nn.Flatten(), nn.Linear(3, 3)), "does not see images"),
        (sequential(nn.Linear(6, 3)), "flat examples"),
        (replace(SPECS[0], loss=F.cross_entropy), "loss of its own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_models_are_left_to_the_other_compiler(spec: ModelSpec, reason: str) -> None:
    with pytest.raises(NotStackable, match=reason):
        find_chain(spec, spec.build(0))


def test_frozen_params_are_left_to_the_other_compiler() -> None:
    module = cnn.spec((8, 8), 10).build(0)
    module.conv1.requires_grad_(False)
    with pytest.raises(NotStackable, match=r"conv1\.weight is frozen"):
        find_chain(SPECS[0], module)


class Hooked(nn.Sequential):
    """What its graph does not show: a hook that scales the output of its last layer."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 3, 6), nn.Flatten(), nn.Linear(3, 3))
        self[2].register_forward_hook(lambda module, inputs, output: 2 * output)


@needs_compiler
def test_a_model_that_does_more_than_its_graph_shows_trains_as_the_pool_does(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOP_CACHE_DIR", str(cache.parent))
    spec = ModelSpec("own", Hooked, (2, 6, 6), 3)
    assert "other gradients" in require_engine("compiled", spec, 8)


@pytest.mark.slow
@needs_compiler
def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOP_CACHE_DIR", str(tmp_path))
    assert require_engine("compiled", SPECS[0], 8) == ""
    monkeypatch.setattr(native, "COMPILERS", ())
    trainer = make_trainer("compiled", SPECS[1], 8)
    assert isinstance(trainer, ChainTrainer)
    (library,) = (tmp_path / "compiled").iterdir()
    assert library.parent.stat().st_mode & 0o077 == 0

    broken = tmp_path / "elsewhere" / "compiled" / library.name
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no library")
    monkeypatch.setenv("FEDLOOP_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert f"{broken} cannot be loaded" in require_engine("compiled", SPECS[2], 8)


def test_without_a_compiler_the_pool_trains_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    assert "no C++ compiler was found here" in require_engine("compiled", SPECS[0], 16)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compiled").write_text("a file")
    monkeypatch.setenv("FEDLOOP_CACHE_DIR", str(tmp_path))
    assert "compiled cannot be written (File exists)" in require_engine("compiled", SPECS[0], 16)


def test_what_a_compiler_refuses_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int broken( {")
    with pytest.raises(CannotCompile, match=r"error"):
        native.load(source, tmp_path / "compiled")
    assert not list((tmp_path / "compiled").iterdir())
