"""Thin layers in place of a thick one: exact at full rank, the best at any other, and told by params."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from models import zoo
from models.compress import report
from models.compress.pruning.lowrank import (
    Decomposition,
    LowRankOptions,
    factorise,
)
from models.compress.pruning.structure import rebuild
from models.compress.step import Data, StepModel, StepRefused
from models.pretrain.params import params_of
from tests.support.compression import accuracy, context, digits, trained


@pytest.fixture(scope="module")
def data() -> Data:
    return digits()


@pytest.fixture(scope="module")
def mlp(data: Data) -> StepModel:
    return trained("mlp", data, epochs=6, hidden=[96, 48])


def layers() -> list[nn.Linear | nn.Conv1d | nn.Conv2d]:
    torch.manual_seed(0)
    return [
        nn.Linear(12, 7),
        nn.Linear(5, 9, bias=False),
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.Conv2d(6, 4, 1, bias=False),
        nn.Conv2d(4, 6, (3, 5), padding=(2, 1), dilation=(1, 2), padding_mode="reflect"),
        nn.Conv1d(4, 5, 3, padding="same"),
    ]


@pytest.mark.parametrize("layer", layers(), ids=str)
def test_full_rank_is_the_same_layer(layer: nn.Linear | nn.Conv1d | nn.Conv2d) -> None:
    shape = {nn.Linear: (5, layer.weight.shape[1]), nn.Conv1d: (2, 4, 9)}.get(
        type(layer), (2, layer.weight.shape[1], 9, 9)
    )  # type: ignore[call-overload]
    x = torch.randn(shape)
    singular = Decomposition.of(layer)
    with torch.no_grad():
        pair = singular.factors(len(singular.values))
        assert torch.allclose(pair(x), layer(x), atol=1e-5)
        assert [name for name, _ in pair.named_parameters()] == ["0.weight", "1.weight"] + ["1.bias"] * (
            layer.bias is not None
        )


def test_energy_and_rank_go_together() -> None:
    singular = Decomposition.of(nn.Linear(30, 20))
    ranks = [singular.rank(energy) for energy in (0.01, 0.3, 0.6, 0.9, 0.99, 1.0)]
    assert ranks == sorted(ranks) and ranks[0] >= 1 and ranks[-1] == 20
    for energy, rank in zip((0.3, 0.6, 0.9), ranks[1:], strict=False):
        assert singular.energy_kept(rank) >= energy > singular.energy_kept(rank - 1)
    assert all(a < b for a, b in pairwise(singular.energy_kept(rank) for rank in range(1, 21)))


def test_the_error_is_what_the_singular_values_left_out_say() -> None:
    layer = nn.Linear(30, 20, bias=False)
    singular = Decomposition.of(layer)
    first, second = singular.factors(6)
    error = (second.weight @ first.weight - layer.weight).square().sum()  # type: ignore[operator]
    assert float(error.detach()) == pytest.approx(float(singular.values[6:].square().sum()), rel=1e-4)


def test_a_layer_of_low_rank_is_found_to_be_one() -> None:
    layer = nn.Linear(30, 20)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(20, 3) @ torch.randn(3, 30))
    assert Decomposition.of(layer).rank(0.999999) == 3


def test_break_even_is_where_the_factors_hold_as_much() -> None:
    singular = Decomposition.of(nn.Linear(30, 20))
    for rank in range(1, 21):
        weights = sum(
            p.numel() for name, p in singular.factors(rank).named_parameters() if name.endswith("weight")
        )
        assert (weights < 600) == (rank < singular.break_even)


def test_the_model_gets_smaller_and_is_recognised_by_its_params(mlp: StepModel, data: Data) -> None:
    thin = factorise(mlp, data, LowRankOptions(energy=0.8, epochs=0), context(mlp))
    assert thin.facts["parameters"]["after"] == report.parameters(thin.module) < report.parameters(mlp.module)
    assert thin.facts["macs"]["after"] < thin.facts["macs"]["before"]
    assert "hidden.0.0.weight" in params_of(thin.module)
    x = torch.from_numpy(data.x_test[:10])
    assert torch.equal(rebuild(thin.spec, params_of(thin.module))(x), thin.module(x))


def test_convolutions_of_a_residual_network_are_recognised_by_their_params(data: Data) -> None:
    spec = zoo.get("resnet8", input_shape=(8, 8), classes=10, norm="batch")
    model = StepModel(spec, spec.build(0).eval())
    thin = factorise(model, data, LowRankOptions(rank=4, epochs=0), context(model))
    assert {name for name, layer in thin.facts["layers"].items() if layer["factorised"]} >= {
        "stages.1.shortcut",
        "stages.2.conv2",
    }
    x = torch.from_numpy(data.x_test[:4])
    assert torch.equal(rebuild(spec, params_of(thin.module))(x), thin.module(x))


def test_text_models_are_factorised_too() -> None:
    spec = zoo.get("textcls", input_shape=(12,), classes=3, input_dtype="int32", vocab=30, width=32)
    model = StepModel(spec, spec.build(0).eval())
    x, y = spec.example_batch(24)
    rows = Data(x.numpy(), y.numpy(), x.numpy(), y.numpy())
    thin = factorise(model, rows, LowRankOptions(rank=6, epochs=1), context(model))
    assert torch.equal(rebuild(spec, params_of(thin.module))(x), thin.module(x))


def test_fine_tuning_brings_accuracy_back(mlp: StepModel, data: Data) -> None:
    cut = factorise(mlp, data, LowRankOptions(rank=4, epochs=0), context(mlp))
    tuned = factorise(mlp, data, LowRankOptions(rank=4, epochs=5, batch_size=32), context(mlp))
    assert accuracy(tuned, data) > accuracy(cut, data)


def test_a_second_time_leaves_the_factors_as_they_are(mlp: StepModel, data: Data) -> None:
    once = factorise(mlp, data, LowRankOptions(rank=8, epochs=0, keep="hidden.1, fc"), context(mlp))
    twice = factorise(once, data, LowRankOptions(rank=4, epochs=0), context(mlp))
    assert set(twice.facts["layers"]) == {"hidden.1", "fc"}
    x = torch.from_numpy(data.x_test[:10])
    assert torch.equal(rebuild(twice.spec, params_of(twice.module))(x), twice.module(x))


def test_layers_to_keep_are_not_pruned(mlp: StepModel, data: Data) -> None:
    thin = factorise(mlp, data, LowRankOptions(energy=0.5, epochs=0, keep="hidden.0"), context(mlp))
    assert isinstance(thin.module.get_submodule("hidden.0"), nn.Linear)
    assert isinstance(thin.module.get_submodule("hidden.1"), nn.Sequential)


def test_nothing_to_gain_is_refused_with_the_ranks(mlp: StepModel, data: Data) -> None:
    with pytest.raises(
        StepRefused, match=r"no layer of 'mlp' smaller at energy = 1.0: hidden.0 \(of 64, break-even 39\)"
    ):
        factorise(mlp, data, LowRankOptions(energy=1.0, epochs=0), context(mlp))
    full = factorise(mlp, data, LowRankOptions(energy=1.0, epochs=0, only_where_smaller=False), context(mlp))
    x = torch.from_numpy(data.x_test[:10])
    assert torch.allclose(full.module(x), mlp.module(x), atol=1e-4)
