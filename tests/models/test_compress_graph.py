"""Folding: the same answers from fewer operations, in the module and in the exported file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models import zoo
from models.compress.graph import FoldOptions, fold
from models.compress.pruning.lowrank import LowRankOptions, factorise
from models.compress.pruning.structure import rebuild
from models.compress.step import Data, StepModel, StepRefused
from models.pretrain.params import params_of
from models.zoo.spec import ModelSpec
from tests.support.compression import context

pytestmark = pytest.mark.slow

QUIET = FoldOptions(show_operators=False)


def model_of(build: Callable[[], nn.Module], shape: tuple[int, ...] = (8,), classes: int = 4) -> StepModel:
    spec = ModelSpec("own", build, shape, classes)
    return StepModel(spec, experienced(spec.build(0)))


def zoo_model(name: str, **options: Any) -> StepModel:
    spec = zoo.get(name, input_shape=(8, 8), classes=10, **options)
    return StepModel(spec, experienced(spec.build(0)))


def experienced(module: nn.Module) -> nn.Module:
    """BatchNorms with other statistics and weights than they began with."""
    torch.manual_seed(1)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is not None:
            assert part.running_var is not None
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(part.weight, 0.5, 2.0)
            nn.init.normal_(part.bias)
    return module.eval()


def rows(model: StepModel) -> Data:
    x = np.random.default_rng(0).random((16, *model.spec.input_shape), np.float32)
    y = np.zeros(16, np.int32)
    return Data(x, y, x, y)


def answers(module: nn.Module, model: StepModel) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.from_numpy(rows(model).x_test))  # type: ignore[no-any-return]


def norms_in(module: nn.Module) -> int:
    return sum(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


@pytest.mark.parametrize(
    ("name", "options"),
    [("resnet8", {"norm": "batch"}), ("resnet", {"norm": "batch", "width": 8, "blocks": [1, 2]})],
)
def test_every_batch_norm_of_a_residual_network_is_folded_and_the_answers_stay(
    name: str, options: dict[str, Any]
) -> None:
    model = zoo_model(name, **options)
    folded = fold(model, rows(model), QUIET, context(model))
    assert norms_in(model.module) == len(folded.facts["folded"]) > 0 == norms_in(folded.module)
    assert torch.allclose(answers(folded.module, model), answers(model.module, model), atol=1e-5, rtol=1e-5)
    again = rebuild(model.spec, params_of(folded.module))
    assert torch.equal(answers(again, model), answers(folded.module, model))
    assert "batch_norm" in folded.facts["torch"]["before"]
    assert "batch_norm" not in folded.facts["torch"]["after"]


def test_the_exported_file_has_no_more_operations_and_computes_no_constants() -> None:
    model = zoo_model("resnet8", norm="batch", width=4)
    facts = fold(model, rows(model), FoldOptions(), context(model)).facts
    before, after = facts["tflite"]["before"], facts["tflite"]["after"]
    assert after["CONV_2D"] + after.get("DEPTHWISE_CONV_2D", 0) == 9
    assert sum(after.values()) <= sum(before.values())
    assert not {"MUL", "SUB", "RELU"} & set(after)
    assert facts["fused_activations"]["after"]["RELU"] == 7
    assert facts["of_constants"]["tflite"] == []


class Mixed(nn.Module):
    """Of everything something that folds and something that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.second, self.norm2 = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.norm3 = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 4)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("steps", torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm1(self.first(x)).relu())
        shared = self.second(h)
        h = self.norm2(shared) + shared + self.norm3(h) + torch.exp(-self.steps)  # type: ignore[operator]
        return self.out(h)  # type: ignore[no-any-return]


@pytest.mark.extended
def test_shared_inputs_are_not_folded_and_the_facts_list_removed_layers() -> None:
    model = model_of(Mixed)
    folded = fold(model, rows(model), FoldOptions(), context(model))
    facts = folded.facts
    assert facts["folded"] == [{"norm": "norm1", "into": "first"}]
    assert facts["batch_norms_left"] == ["norm2", "norm3"]
    assert facts["dropouts_removed"] == ["drop"]
    assert facts["never_read"] == ["unused"]
    assert "dropout" in facts["torch"]["before"] and "dropout" not in facts["torch"]["after"]
    assert facts["of_constants"]["torch"] >= 2 and facts["of_constants"]["tflite"] == []
    assert "EXP" not in facts["tflite"]["before"]
    assert torch.allclose(answers(folded.module, model), answers(model.module, model), atol=1e-5)


class Twice(nn.Module):
    """One layer, called twice, once before a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.layer(self.layer(x))))  # type: ignore[no-any-return]


class Places(nn.Module):
    """A BatchNorm whose channels are the second axis, after a Linear over the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.layer(x)).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("build", "shape"), [(Twice, (8,)), (Places, (6, 6))])
def test_a_batch_norm_that_would_not_fold_exactly_is_left(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model = model_of(build, shape)
    folded = fold(model, rows(model), QUIET, context(model))
    assert folded.facts["folded"] == [] and folded.facts["batch_norms_left"] == ["norm"]
    assert torch.equal(answers(folded.module, model), answers(model.module, model))


def test_factors_of_a_layer_take_its_batch_norm() -> None:
    model = zoo_model("resnet8", norm="batch")
    thin = factorise(model, rows(model), LowRankOptions(rank=3, epochs=0), context(model))
    folded = fold(thin, rows(model), QUIET, context(model))
    assert {"norm": "stages.2.norm2", "into": "stages.2.conv2.1"} in folded.facts["folded"]
    again = rebuild(model.spec, params_of(folded.module))
    assert torch.equal(answers(again, model), answers(folded.module, model))


def test_the_model_given_is_left_as_it_was() -> None:
    model = zoo_model("resnet8", norm="batch")
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    fold(model, rows(model), QUIET, context(model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    assert norms_in(model.module) == 7


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if float(x.sum()) > 0 else -self.fc(x)  # type: ignore[no-any-return]


def test_a_forward_pass_that_depends_on_values_is_refused() -> None:
    model = model_of(Undecided)
    with pytest.raises(StepRefused, match="fold cannot trace 'own'"):
        fold(model, rows(model), QUIET, context(model))
