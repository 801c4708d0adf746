"""A model is taken to tflite-micro itself: it runs there in the arena that is told, or is refused with the reason."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import nn

from models.compress import memory, micro
from models.compress.micro_interpreter import MicroModel
from models.compress.pipeline import c_array
from models.compress.quantization import quantize, recipes
from models.compress.step import StepModel, StepRefused
from models.zoo.spec import ModelSpec
from tests.support.compressing import cnn, context, digits
from tests.support.long import extended


@cache
def fitted() -> StepModel:
    return micro.compile_model(cnn(), digits(), micro.MicroOptions(), context(cnn()))


@pytest.mark.slow
def test_a_model_runs_in_the_reported_arena_and_in_no_smaller_one() -> None:
    made = fitted()
    assert made.tflite is not None
    assert made.precision == "static-int8"
    arena = made.facts["arena_bytes"]
    assert 3_000 < arena < 8_000
    MicroModel(made.tflite, arena)
    with pytest.raises(RuntimeError):
        MicroModel(made.tflite, arena - 256)
    assert made.facts["micro_accuracy"] >= made.facts["float32_accuracy"] - 0.02


@pytest.mark.slow
def test_a_model_that_needs_more_than_there_is_is_refused() -> None:
    with pytest.raises(StepRefused, match=r"the arena needs [\d,]+ bytes, 3,000 are allowed; try"):
        micro.compile_model(fitted(), digits(), micro.MicroOptions(arena_bytes=3_000), context(cnn()))
    with pytest.raises(StepRefused, match=r"the model needs [\d,]+ bytes, 5,000 are allowed"):
        micro.compile_model(fitted(), digits(), micro.MicroOptions(flash_bytes=5_000), context(cnn()))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["dynamic-int8", *extended("float16")])
def test_errors_of_the_interpreter_are_quoted(precision: str) -> None:
    tflite = recipes.quantize(quantize.to_tflite(cnn().module, cnn().spec), precision)  # type: ignore[arg-type]
    words = "Hybrid models are not supported" if precision == "dynamic-int8" else "DEQUANTIZE"
    with pytest.raises(StepRefused, match=f"tflite-micro does not run the file: .*{words}"):
        micro.run(tflite, digits().x_test[:2])


def test_a_runtime_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SECONDS", 0.001)
    monkeypatch.setattr(micro, "SECONDS", 0.001)
    with pytest.raises(StepRefused, match=r"LiteRT does not run the file: it did not finish within 0\.001 s"):
        memory.measure(b"", digits().x_test)


@pytest.mark.slow
def test_an_operation_that_it_does_not_have_is_named() -> None:
    with pytest.raises(StepRefused, match="tflite-micro has no GELU"):
        micro.require_operators(quantize.to_tflite(GELU.build(0), GELU))


@pytest.mark.slow
def test_the_c_array_holds_the_file() -> None:
    made = fitted()
    assert made.tflite is not None
    text = c_array(made.tflite)
    assert bytes(int(byte, 16) for byte in re.findall(r"0x([0-9a-f]{2})", text)) == made.tflite
    assert f"g_model_len = {len(made.tflite)};" in text
    assert "alignas(16) extern const unsigned char g_model[]" in text


class Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x)


GELU = ModelSpec("gelu", Gelu, (4,), 4)
