"""Taking channels out: what is left is smaller, still told by its params, and still right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from models import zoo
from models.compress import report
from models.compress.pruning.prune import PruneOptions, prune
from models.compress.pruning.structure import rebuild
from models.compress.pruning.structured import StructuredOptions, structured
from models.compress.step import Data, StepModel, StepRefused
from models.pretrain.params import params_of
from models.zoo.spec import ModelSpec
from tests.support.compression import accuracy, context, digits, trained
from tests.support.long import extended

pytestmark = pytest.mark.slow

ONCE = {"epochs": 0, "rounds": 1}


@pytest.fixture(scope="module")
def data() -> Data:
    return digits()


@pytest.fixture(scope="module")
def resnet8(data: Data) -> StepModel:
    return trained("resnet8", data, epochs=4, norm="batch", width=8)


def untrained(name: str, **options: Any) -> StepModel:
    spec = zoo.get(name, input_shape=(8, 8), classes=10, **options)
    return StepModel(spec, spec.build(1).eval())


ZOO: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {"hidden": [48, 32]}),
    ("cnn", {}),
    ("cnn", {"hidden": 20}),
    ("resnet8", {"norm": "batch"}),
    ("resnet8", {"norm": "group"}),
    ("resnet", {"norm": "batch", "width": 8}),
    ("resnet", {"norm": "group", "width": 16, "blocks": [1, 2]}),
]


@pytest.mark.parametrize(("name", "options"), ZOO)
@pytest.mark.parametrize("ratio", [0.3, *extended(0.7)])
def test_a_smaller_variant_of_every_model_has_the_same_classes_and_is_recognised_by_its_params(
    name: str, options: dict[str, Any], ratio: float, data: Data
) -> None:
    full = untrained(name, **options)
    less = structured(full, data, StructuredOptions(ratio=ratio, **ONCE), context(full))  # type: ignore[arg-type]
    x = torch.from_numpy(data.x_test[:5])
    with torch.no_grad():
        answer = less.module(x)
        assert answer.shape == (5, 10) and answer.isfinite().all()
        assert torch.equal(rebuild(less.spec, params_of(less.module))(x), answer)
    assert report.parameters(less.module) < report.parameters(full.module)
    assert report.macs(less.module, less.spec) < report.macs(full.module, full.spec)


def test_half_the_channels_of_resnet8_are_a_quarter_of_its_bytes(data: Data) -> None:
    full = untrained("resnet8", norm="batch")
    facts = structured(full, data, StructuredOptions(ratio=0.5, **ONCE), context(full)).facts  # type: ignore[arg-type]
    assert facts["bytes"]["before"] == pytest.approx(312_000, rel=0.02)
    assert facts["bytes"]["after"] == pytest.approx(79_000, rel=0.02)
    assert facts["channels"]["stages.2.conv2"] == {"before": 64, "after": 32}
    assert facts["channels"]["fc"] == {"before": 10, "after": 10}


@pytest.mark.extended
def test_learnt_values_survive(resnet8: StepModel, data: Data) -> None:
    options = StructuredOptions(ratio=0.4, rounds=2, epochs=3, batch_size=32, lr=3e-3)
    less = structured(resnet8, data, options, context(resnet8))
    assert accuracy(less, data) >= accuracy(resnet8, data) - 0.03


def test_channels_of_little_weight_go_first(data: Data) -> None:
    full = untrained("mlp", hidden=[16])
    module = copy.deepcopy(full.module)
    faint = list(range(0, 16, 2))
    with torch.no_grad():
        for layer in (module.hidden[0],):  # type: ignore[index]
            layer.weight[faint] *= 1e-3
            layer.bias[faint] *= 1e-3
        module.fc.weight[:, faint] *= 1e-3  # type: ignore[index,union-attr,operator]
    model = StepModel(full.spec, module)
    less = structured(model, data, StructuredOptions(ratio=0.5, **ONCE), context(model))  # type: ignore[arg-type]
    x = torch.from_numpy(data.x_test[:20])
    assert torch.allclose(less.module(x), module(x), atol=1e-3)


def test_ranking_all_layers_together_takes_more_of_some_than_of_others(
    resnet8: StepModel, data: Data
) -> None:
    options = StructuredOptions(ratio=0.6, per_layer="global", **ONCE)  # type: ignore[arg-type]
    less = structured(resnet8, data, options, context(resnet8))
    channels = less.facts["channels"].values()
    assert all(layer["after"] >= 1 for layer in channels)
    assert len({round(layer["after"] / layer["before"], 1) for layer in channels}) > 2


def test_a_ratio_that_leaves_nothing_of_a_layer_is_refused(data: Data) -> None:
    grouped = untrained("resnet8", norm="group", width=8)
    with pytest.raises(
        StepRefused, match=r"leaves nothing of norm .*8 channels in 4 groups; lower ratio .at most 0.50"
    ):
        structured(grouped, data, StructuredOptions(ratio=0.6), context(grouped))
    small = untrained("cnn")
    with pytest.raises(StepRefused, match="leaves nothing of conv1"):
        structured(small, data, StructuredOptions(ratio=0.5, round_to=8), context(small))


def test_channels_are_left_in_multiples_and_layers_to_keep_are_kept(resnet8: StepModel, data: Data) -> None:
    less = structured(resnet8, data, StructuredOptions(ratio=0.4, round_to=4, **ONCE), context(resnet8))  # type: ignore[arg-type]
    left = [layer["after"] for name, layer in less.facts["channels"].items() if name != "fc"]
    assert all(count % 4 == 0 for count in left)
    groups = untrained("resnet8", norm="group")
    less = structured(groups, data, StructuredOptions(ratio=0.4, round_to=8, **ONCE), context(groups))  # type: ignore[arg-type]
    assert all(layer["after"] % 8 == 0 for name, layer in less.facts["channels"].items() if name != "fc")
    less = structured(resnet8, data, StructuredOptions(keep="stages.2.conv1", **ONCE), context(resnet8))  # type: ignore[arg-type]
    assert less.facts["channels"]["stages.2.conv1"] == {"before": 32, "after": 32}


def test_weights_that_are_zero_stay_zero_through_fine_tuning(resnet8: StepModel, data: Data) -> None:
    sparse = prune(resnet8, data, PruneOptions(epochs=0, sparsity=0.5), context(resnet8))
    still = structured(sparse, data, StructuredOptions(ratio=0.0, rounds=1, epochs=1), context(sparse))
    assert report.nonzero(still.module) <= report.nonzero(sparse.module)


def test_the_model_given_is_left_as_it_was(resnet8: StepModel, data: Data) -> None:
    before = {name: tensor.clone() for name, tensor in resnet8.module.state_dict().items()}
    structured(resnet8, data, StructuredOptions(epochs=1, rounds=1), context(resnet8))
    after = resnet8.module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_transformers_are_refused_with_a_way_out(data: Data) -> None:
    spec = zoo.get("textcls", input_shape=(12,), classes=3, input_dtype="int32", vocab=30, width=16)
    model = StepModel(spec, spec.build(0).eval())
    with pytest.raises(StepRefused, match=r"embedding is a TokenEmbedding.*lowrank"):
        structured(model, data, StructuredOptions(), context(model))


class Stubborn(nn.Module):
    """Has a size in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 12), nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.flatten(1)).reshape(-1, 3, 4)).mean(1)  # type: ignore[no-any-return]


def test_sizes_in_a_forward_pass_are_refused(data: Data) -> None:
    spec = ModelSpec("stubborn", Stubborn, (8, 8), 10)
    model = StepModel(spec, spec.build(0).eval())
    with pytest.raises(StepRefused, match="'stubborn', sizes are part of its forward pass"):
        structured(model, data, StructuredOptions(ratio=0.4), context(model))
