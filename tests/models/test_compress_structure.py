"""A module whose layers compression has changed comes back from its spec and its params alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch_pruning
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from models import zoo
from models.compress.pruning.structure import StructureError, rebuild
from models.job import JobError
from models.pretrain import params
from models.zoo import ModelSpec

RESNET = zoo.get("resnet8", input_shape=(8, 8), classes=10, norm="batch")


def assert_same(module: nn.Module, spec: ModelSpec) -> nn.Module:
    """`module` and what its params give agree on what they answer; gives the latter."""
    module.eval()
    again = rebuild(spec, params.params_of(module))
    x, _ = spec.example_batch(3)
    with torch.no_grad():
        torch.testing.assert_close(again(x), module(x))
    assert not again.training
    return again


@pytest.mark.parametrize(
    "name, options", [("cnn", {"hidden": 8}), ("mlp", {}), ("resnet8", {"norm": "batch"}), ("resnet8", {})]
)
def test_an_unchanged_module_comes_back(name: str, options: dict[str, object]) -> None:
    spec = zoo.get(name, input_shape=(8, 8), classes=10, **options)
    assert_same(spec.build(1), spec)


def test_a_text_model_comes_back() -> None:
    spec = zoo.get("textcls", input_shape=(8,), classes=3, input_dtype="int32")
    assert_same(spec.build(1), spec)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_channels_that_torch_pruning_took_are_missing_here_too(norm: str) -> None:
    spec = zoo.get("resnet8", input_shape=(8, 8), classes=10, norm=norm)
    module = spec.build(1).eval()
    x, _ = spec.example_batch(1)
    torch_pruning.pruner.MagnitudePruner(
        module,
        x,
        importance=torch_pruning.importance.MagnitudeImportance(),
        pruning_ratio=0.5,
        ignored_layers=[module.get_submodule("fc")],
        round_to=4,
    ).step()
    again = assert_same(module, spec)
    assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in spec.build(1).parameters()) / 3
    assert again.get_submodule("stages.2.norm1").weight.shape == (32,)


def test_a_factorised_linear_is_two() -> None:
    spec = zoo.get("cnn", input_shape=(8, 8), classes=10, hidden=32)
    module = spec.build(1)
    full = module.get_submodule("hidden")
    first, second = nn.Linear(full.in_features, 4, bias=False), nn.Linear(4, 32)
    module.set_submodule("hidden", nn.Sequential(first, second))
    again = assert_same(module, spec)
    assert [layer.weight.shape for layer in again.get_submodule("hidden")] == [(4, 256), (32, 4)]


@pytest.mark.parametrize("kind", ["channel", "spatial", "tucker"])
def test_a_factorised_convolution_keeps_its_stride_and_padding(kind: str) -> None:
    spec = zoo.get("cnn", input_shape=(8, 7), classes=10)
    module = spec.build(1)
    full = module.get_submodule("conv2")
    inputs, outputs = full.in_channels, full.out_channels
    factors = {
        "channel": [
            nn.Conv2d(inputs, 3, 3, stride=2, padding=1, bias=False),
            nn.Conv2d(3, outputs, 1),
        ],
        "spatial": [
            nn.Conv2d(inputs, 3, (3, 1), stride=(2, 1), padding=(1, 0), bias=False),
            nn.Conv2d(3, outputs, (1, 3), stride=(1, 2), padding=(0, 1)),
        ],
        "tucker": [
            nn.Conv2d(inputs, 3, 1, bias=False),
            nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
            nn.Conv2d(4, outputs, 1),
        ],
    }[kind]
    module.set_submodule("conv2", nn.Sequential(*factors))
    assert_same(module, spec)


def test_the_first_factor_of_a_pointwise_convolution_strides() -> None:
    module = RESNET.build(1)
    module.set_submodule(
        "stages.1.shortcut", nn.Sequential(nn.Conv2d(16, 2, 1, stride=2, bias=False), nn.Conv2d(2, 32, 1))
    )
    assert_same(module, RESNET)


def test_folded_batch_norms_are_gone() -> None:
    module = RESNET.build(1).eval()
    for norm in (layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    folded = copy.deepcopy(module)
    for conv, norm in (("stem", "norm"), *((f"stages.{i}.conv{j}", f"stages.{i}.norm{j}") for i in range(3) for j in (1, 2))):  # fmt: skip
        folded.set_submodule(conv, fuse_conv_bn_eval(folded.get_submodule(conv), folded.get_submodule(norm)))
        folded.set_submodule(norm, nn.Identity())
    again = assert_same(folded, RESNET)
    assert not [layer for layer in again.modules() if isinstance(layer, nn.BatchNorm2d)]
    x, _ = RESNET.example_batch(2)
    with torch.no_grad():
        torch.testing.assert_close(again(x), module(x), rtol=1e-4, atol=1e-5)


def test_a_depthwise_convolution_stays_depthwise() -> None:
    def module(channels: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, groups=channels),
            nn.Flatten(),
            nn.Linear(2 * channels * 16, 3),
        )

    assert_same(module(3), ModelSpec("deep", lambda: module(6), (1, 4, 4), 3))


def test_impossible_values_are_refused() -> None:
    spec = zoo.get("cnn", input_shape=(8, 8), classes=10)
    found = params.params_of(spec.build(1))
    with pytest.raises(JobError, match=r"tensor 'extra' is not one of the model's"):
        rebuild(spec, {**found, "extra": np.zeros(1, np.float32)})
    with pytest.raises(JobError, match=r"tensor 'fc.weight' is missing"):
        rebuild(spec, {name: value for name, value in found.items() if name != "fc.weight"})
    with pytest.raises(StructureError, match=r"conv1.weight is \(8, 9\), expected 4 axes"):
        rebuild(spec, {**found, "conv1.weight": found["conv1.weight"].reshape(8, 9)})
    with pytest.raises(StructureError, match=r"conv2.\*.weight: none of 1 factors has a kernel of 3"):
        kept = {name: value for name, value in found.items() if not name.startswith("conv2")}
        rebuild(spec, {**kept, "conv2.0.weight": np.zeros((16, 8, 2, 3), np.float32)})
    text = zoo.get("textcls", input_shape=(8,), classes=3, input_dtype="int32")
    with pytest.raises(JobError, match=r"'embedding.position' is \(4, 32\), the model has \(8, 32\)"):
        rebuild(text, {**params.params_of(text.build(0)), "embedding.position": np.zeros((4, 32))})
    group = zoo.get("resnet8", input_shape=(8, 8), classes=10)
    with pytest.raises(StructureError, match=r"norm.weight has 6 channels, expected a multiple of its 4"):
        rebuild(group, {**params.params_of(group.build(0)), "norm.weight": np.ones(6, np.float32)})
