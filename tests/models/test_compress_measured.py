"""The precision chosen by measuring: the least bytes times latency of those that keep their accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from models.compress import report
from models.compress.quantization import quantize
from models.compress.step import Data, Precision, StepRefused
from tests.support.compressing import cnn, context, digits

SIZES = {"float32": 400, "dynamic-int8": 150, "static-int8": 160}


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    sizes: Mapping[str, int],
    latencies: Mapping[str, float],
    wrong: str = "",
    broken: str = "",
) -> tuple[str, dict[str, Any]]:
    """What is chosen of files with these bytes and latencies; `wrong` answers falsely, `broken` cannot be made."""
    monkeypatch.setattr(report, "logits", lambda file, x: np.eye(2, dtype=np.float32)[[file[0]] * len(x)])
    y = np.zeros(20, np.int32)
    x = np.zeros((20, 4), np.float32)

    def make(float32: bytes, precision: Precision, data: Data, calibration_rows: int) -> bytes:
        if precision == broken:
            raise StepRefused("cannot be made")
        return bytes([precision == wrong]) * sizes[precision]

    monkeypatch.setattr(quantize, "quantize_file", make)
    monkeypatch.setattr(report, "latency", lambda files, rows: dict(latencies))
    precision, file, facts = quantize.choose(
        b"", Data(x, y, x, y), quantize.QuantizeOptions(), lambda line: None
    )
    assert len(file) == sizes[precision]
    return precision, {each["precision"]: each["refused"] for each in facts["measured"]["tried"]}


def test_a_transformer_is_not_made_five_times_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    latencies = {"float32": 36.0, "dynamic-int8": 42.0, "static-int8": 193.0}
    assert chosen(monkeypatch, SIZES, latencies)[0] == "dynamic-int8"


def test_a_network_of_convolutions_becomes_static_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    latencies = {"float32": 36.0, "dynamic-int8": 42.0, "static-int8": 12.0}
    assert chosen(monkeypatch, SIZES, latencies)[0] == "static-int8"


def test_a_model_that_only_grows_stays_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"float32": 100, "dynamic-int8": 110, "static-int8": 180}
    latencies = {"float32": 20.0, "dynamic-int8": 21.0, "static-int8": 19.0}
    assert chosen(monkeypatch, sizes, latencies)[0] == "float32"


def test_candidates_that_lose_accuracy_or_cannot_be_made_are_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latencies = {"float32": 36.0, "dynamic-int8": 12.0, "static-int8": 12.0}
    precision, refused = chosen(monkeypatch, SIZES, latencies, wrong="dynamic-int8", broken="static-int8")
    assert precision == "float32"
    assert refused == {
        "float32": "",
        "dynamic-int8": "loses 100.0 points of accuracy",
        "static-int8": "cannot be made",
    }


@pytest.mark.slow
def test_auto_measures_real_files_and_says_what_each_came_to() -> None:
    made = quantize.step(cnn(), digits(), quantize.QuantizeOptions("auto"), context(cnn()))
    tried = {each["precision"]: each for each in made.facts["measured"]["tried"]}
    assert set(tried) == set(quantize.CANDIDATES)
    assert made.tflite is not None and len(made.tflite) == tried[made.precision]["bytes"]
    assert made.facts["bytes"] < made.facts["float32_bytes"]
