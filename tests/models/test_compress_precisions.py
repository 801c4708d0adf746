"""Each precision runs on LiteRT, keeps its accuracy, stores what its name says, and is refused where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models import zoo
from models.compress import report
from models.compress.quantization import (
    quantize,
    recipes,
)
from models.compress.quantization.quantize import ExportRefused
from models.compress.step import Data, Precision, StepModel, StepRefused
from models.conversion import flatbuffer
from models.zoo.spec import ModelSpec
from tests.support.compressing import cnn, context, digits
from tests.support.long import extended

pytestmark = pytest.mark.slow

LARGEST: dict[Any, float] = {
    "float32": 1.0,
    "float16": 0.65,
    "weight-int8": 0.48,
    "dynamic-int8": 0.42,
    "static-int8": 0.45,
    "int4": 0.32,
}
"""Bytes in units of float32's, for a model of which half is no weights."""
_SOME = ("dynamic-int8", "static-int8", "int4")


@pytest.mark.parametrize("precision", [*_SOME, *extended(*(each for each in LARGEST if each not in _SOME))])
def test_a_precision_keeps_its_accuracy_and_stores_what_its_name_says(precision: Precision) -> None:
    made = quantize.step(cnn(), digits(), quantize.QuantizeOptions(precision), context(cnn()))  # type: ignore[arg-type]

    assert made.precision == precision
    assert made.tflite is not None
    found = report.quality(made.tflite, digits().x_test, digits().y_test)
    assert found == made.facts["accuracy"] >= made.facts["float32_accuracy"] - 0.02
    assert made.facts["weights"][recipes.WEIGHTS[precision]] > 0.9
    assert made.facts["bytes"] == len(made.tflite) <= LARGEST[precision] * made.facts["float32_bytes"]
    assert made.facts["operators"]["CONV_2D"] == 1
    assert made.module is cnn().module


def test_static_int8_has_integers_outside_too_and_ranges_from_training_rows() -> None:
    made = quantize.step(cnn(), digits(), quantize.QuantizeOptions(calibration_rows=50), context(cnn()))
    assert made.tflite is not None
    runner = report.Runner(made.tflite)
    assert runner.input["dtype"] == runner.output["dtype"] == np.int8
    assert made.facts["calibration_rows"] == 50
    assert "float32" not in {tensor.dtype for tensor in flatbuffer.tensors(made.tflite)}


@pytest.mark.extended
def test_no_answer_to_a_calibration_row_is_clipped() -> None:
    """A moving average of ranges, say, would cut off the logits that the model is surest of."""
    rows = digits().x_train[:50]
    float32 = quantize.to_tflite(cnn().module, cnn().spec)
    ranges = recipes.calibrate(float32, rows)
    made = recipes.quantize(float32, "static-int8", ranges)

    scale, zero_point = report.Runner(made).output["quantization"]
    wanted = report.logits(float32, rows)
    assert (-128 - zero_point) * scale <= wanted.min() + scale
    assert (127 - zero_point) * scale >= wanted.max() - scale
    backwards = recipes.calibrate(float32, rows[::-1])
    assert {name: found["max"].item() for name, found in ranges.items() if found["max"].size == 1} == {
        name: found["max"].item() for name, found in backwards.items() if found["max"].size == 1
    }


@pytest.mark.extended
def test_ranges_of_other_rows_are_refused() -> None:
    dark = replace(digits(), x_train=digits().x_train / 100)
    with pytest.raises(StepRefused, match=r"static-int8 accuracy is .* points below float32"):
        quantize.step(cnn(), dark, quantize.QuantizeOptions(), context(cnn()))


def test_four_bits_are_refused_where_the_converter_has_none_for_the_weights() -> None:
    model = StepModel(DEPTHWISE, DEPTHWISE.build(0).eval())
    rows = np.random.default_rng(0).random((8, 4, 6, 6), np.float32)
    labels = report.logits(model.module, rows).argmax(-1).astype(np.int32)
    with pytest.raises(
        StepRefused, match=r"only \d+% of the weight values became int4; only FULLY_CONNECTED, CONV_2D"
    ):
        quantize.step(
            model, Data(rows, labels, rows, labels), quantize.QuantizeOptions("int4"), context(model)
        )


@pytest.mark.extended
def test_tensors_are_named_after_modules_and_not_after_their_classes() -> None:
    float32 = quantize.to_tflite(cnn().module, cnn().spec)
    names = [tensor.name for tensor in flatbuffer.tensors(float32)]
    assert [layer.name for layer in recipes.layers(float32)] == ["conv1", "conv2", "infer_logits_output"]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 30


@pytest.mark.extended
def test_a_text_models_embedding_table_becomes_int8_too() -> None:
    spec = zoo.get("textcls", input_shape=(8,), classes=3, vocab=64, layers=1)
    model = StepModel(spec, spec.build(0).eval())
    rows = np.random.default_rng(0).integers(1, 64, size=(30, 8)).astype(np.int32)
    labels = report.logits(model.module, rows).argmax(-1).astype(np.int32)
    options = quantize.QuantizeOptions(max_accuracy_drop=0.2)
    made = quantize.step(model, Data(rows, labels, rows, labels), options, context(model))
    assert made.tflite is not None
    assert made.facts["float32_accuracy"] == 1.0  # torch's own answers
    assert made.facts["weights"] == {"int8": 1.0}
    assert report.Runner(made.tflite).input["dtype"] == np.int32
    table = tuple(spec.build(0).get_parameter("embedding.weight").shape)
    assert [t.dtype for t in flatbuffer.tensors(made.tflite) if t.shape == table] == ["int8"]


def test_the_gate_is_a_bound_and_not_a_comparison() -> None:
    quantize.require_accuracy(0.90, 0.88, 0.02)
    quantize.require_accuracy(0.90, 0.95, 0.0)
    with pytest.raises(ExportRefused, match=r"2\.5 points"):
        quantize.require_accuracy(0.90, 0.875, 0.02)


@pytest.mark.parametrize("error", [1e-2, float("nan")])
def test_logits_that_differ_from_torch_are_refused(error: float) -> None:
    expected = np.ones((2, 3), np.float32)
    assert quantize.require_same_logits(expected + np.float32(1e-6), expected) < 1e-5
    with pytest.raises(ExportRefused, match="differs from the float model"):
        quantize.require_same_logits(expected + np.float32(error), expected)


class Depthwise(nn.Module):
    """Nearly all of its weights are of a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 5, groups=4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.conv(x).mean((2, 3)))
        return logits


DEPTHWISE = ModelSpec("depthwise", Depthwise, (4, 6, 6), 2)
