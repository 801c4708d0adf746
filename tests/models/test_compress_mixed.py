"""The layer that quantization ruins is found, and it alone is kept."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from models import zoo
from models.compress.quantization import quantize, sensitivity
from models.compress.step import StepModel, StepRefused
from tests.support.compressing import context, digits, trained
from tests.support.long import extended

LOGITS = hnp.arrays(np.float32, (4, 3), elements=st.floats(-20, 20, width=32))


@cache
def fragile() -> StepModel:
    """A classifier whose first layer has one weight a unit that is huge, and multiplied with a pixel that is always 0.

    In float32 that changes nothing; with one scale a unit, all other weights of the layer round to zero.
    """
    model = trained(zoo.get("mlp", input_shape=(8, 8), classes=10, hidden=[24, 16]))
    module = copy.deepcopy(model.module)
    assert not digits().x_train[:, 0, 0].any()
    with torch.no_grad():
        first = next(p for p in module.parameters() if p.ndim == 2 and p.shape[1] == 64)
        first[:, 0] = 1e4
    return StepModel(model.spec, module)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["dynamic-int8", *extended("static-int8")])
def test_the_ruined_layer_is_kept_and_the_others_are_quantized(precision: str) -> None:
    with pytest.raises(StepRefused, match="points below float32"):
        quantize.step(fragile(), digits(), quantize.QuantizeOptions(precision), context(fragile()))  # type: ignore[arg-type]

    options = sensitivity.MixedOptions(precision, held_out_rows=200, calibration_rows=100)  # type: ignore[arg-type]
    made = sensitivity.mixed(fragile(), digits(), options, context(fragile()))

    table = made.facts["sensitivities"]
    assert made.precision == "mixed"
    assert [row["weights"] for row in table if row["kept"]] == [64 * 24]
    assert table[0]["divergence"] > 100 * table[1]["divergence"]
    assert made.facts["weights"] == pytest.approx({"float32": 1536 / 2080, "int8": 544 / 2080})
    assert made.facts["accuracy"] >= made.facts["float32_accuracy"] - 0.02


@pytest.mark.slow
@pytest.mark.extended
def test_a_bound_that_no_mixture_holds_is_reported() -> None:
    options = sensitivity.MixedOptions("int4", "dynamic-int8", held_out_rows=200)
    with pytest.raises(
        StepRefused, match=r"no mixture of int4 and dynamic-int8 is within 0\.5 points .* at best"
    ):
        sensitivity.mixed(fragile(), digits(), options, context(fragile()))


@given(LOGITS, LOGITS)
def test_divergence_is_zero_for_the_same_and_never_negative(p: np.ndarray, q: np.ndarray) -> None:
    assert sensitivity.divergence(p, p) == 0
    assert sensitivity.divergence(p, q) >= -1e-9


def test_divergence_is_that_of_the_definition() -> None:
    p, q = np.log(np.array([[0.5, 0.5]], np.float32)), np.log(np.array([[0.25, 0.75]], np.float32))
    assert sensitivity.divergence(p, q) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), rel=1e-6)
