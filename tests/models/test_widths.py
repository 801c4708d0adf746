"""Narrower variants: each tensor is the leading part of the model's, and the scaler can be folded into the params."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.train import torch_trainer
from edge_client.train.torch_trainer import TorchRuntime
from edge_client.train.trainer import Trainer, TrainTask
from models import catalog, widths, zoo
from models.zoo.resolve import ModelNotFound
from models.zoo.spec import ModelSpec
from strategies.params import Params
from strategies.slices import require_slices, shapes_of
from tests.support.artifacts import local_examples

SHAPE = (8, 8)
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {"hidden": [12, 7]}),
    ("cnn", {"channels": [5, 8]}),
    ("cnn", {"channels": [4, 6], "hidden": 9}),
    ("resnet8", {"width": 8}),
]


def complete(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return catalog.MODELS[name].options.model_validate(options).model_dump()


def build(name: str, **options: Any) -> ModelSpec:
    return zoo.get(name, input_shape=SHAPE, classes=10, **options)


def narrower(name: str, options: dict[str, Any], width: float) -> ModelSpec:
    return build(widths.MODEL, base=name, base_options=complete(name, options), width=width)


def params_of(spec: ModelSpec) -> Params:
    return torch_trainer.read(spec.build(3))


@given(st.sampled_from(MODELS), st.floats(0.05, 1))
@settings(max_examples=25)
def test_a_variant_has_the_shapes_of_the_scaled_model_which_are_leading_parts(
    model: tuple[str, dict[str, Any]], width: float
) -> None:
    name, options = model
    scaled = widths.scale_options(name, complete(name, options), width)
    catalog.MODELS[name].options.model_validate(scaled)
    shapes = shapes_of(params_of(narrower(name, options, width)))
    assert shapes == shapes_of(params_of(build(name, **scaled)))
    require_slices(shapes, shapes_of(params_of(build(name, **options))))


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_a_variant_of_full_width_is_the_model(name: str, options: dict[str, Any]) -> None:
    assert widths.scale_options(name, complete(name, options), 1.0) == complete(name, options)


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_the_plain_narrower_model_answers_as_the_variant_once_the_scaler_is_folded(
    name: str, options: dict[str, Any]
) -> None:
    variant = narrower(name, options, 0.25)
    params = params_of(variant)
    scaled = widths.scale_options(name, complete(name, options), 0.25)
    plain = build(name, **scaled)
    x = local_examples(variant, 6, seed=1).x
    expected = TorchRuntime(variant.build(0), variant.loss).logits(params, x)
    runtime = TorchRuntime(plain.build(0), plain.loss)
    folded = widths.fold_scaler(params, name, scaled, 0.25)
    np.testing.assert_allclose(runtime.logits(folded, x), expected, rtol=1e-4, atol=1e-5)
    if widths.scaled_layers(name, complete(name, options)):
        assert np.abs(runtime.logits(params, x) - expected).max() > 1e-3


def test_the_scaler_divides_what_the_next_layer_sums() -> None:
    """By hand: relu((W x + b) / r), then the last layer."""
    variant = narrower("mlp", {"hidden": [8]}, 0.5)
    params = params_of(variant)
    x = local_examples(variant, 4, seed=1).x
    hidden = np.maximum((x.reshape(4, -1) @ params["hidden.0.weight"].T + params["hidden.0.bias"]) / 0.5, 0)
    expected = hidden @ params["fc.weight"].T + params["fc.bias"]
    found = TorchRuntime(variant.build(0), variant.loss).logits(params, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_variant_trains() -> None:
    variant = narrower("cnn", {"channels": [4, 8], "hidden": 8}, 0.5)
    data, params = local_examples(variant, 32, seed=1), params_of(variant)
    trainer = Trainer(TorchRuntime(variant.build(0), variant.loss))
    update = trainer.train(params, TrainTask(seed=1, batch_size=8, lr=0.05, epochs=3), data).update
    assert shapes_of(update.delta) == shapes_of(params)
    assert all(np.abs(value).max() > 0 for value in update.delta.values())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("logreg", {}, "'logreg' cannot be cut into narrower models; expected mlp, cnn, resnet8"),
        ("resnet8", {"norm": "batch", "width": 8}, "'resnet8' with norm = \"batch\" cannot be cut .* running statistics"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_cut_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(widths.NoNarrowerModel, match=message):
        widths.scale_options(name, complete(name, options), 0.5)
    with pytest.raises(ModelNotFound, match=message):
        narrower(name, options, 0.5)
