"""Figures of a model: MACs by hand, accuracy alike in torch and LiteRT, latencies of what was asked, and Pareto fronts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from models import zoo
from models.compress import report
from models.compress.quantization import quantize
from models.compress.step import StepModel
from models.zoo.spec import ModelSpec


def test_macs_are_those_counted_by_hand() -> None:
    spec = zoo.get("cnn", input_shape=(8, 8), classes=10, channels=[8, 16], hidden=32)
    module = spec.build(0)
    convolutions = 8 * 8 * 8 * 9 + 4 * 4 * 16 * 8 * 9
    assert report.macs(module, spec) == convolutions + 256 * 32 + 32 * 10
    assert report.parameters(module) == 8 * 9 + 8 + 16 * 8 * 9 + 16 + 256 * 32 + 32 + 320 + 10


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.fc = (
            nn.Embedding(20, 6),
            nn.LSTM(6, 8, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.lstm(self.embedding(x))[0][:, -1])
        return logits


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        logits: torch.Tensor = self.fc(self.attention(h, h, h, need_weights=False)[0].mean(1))
        return logits


@pytest.mark.parametrize(
    ("module", "macs"),
    [(Recurrent, 5 * 4 * 8 * (6 + 8) + 8 * 3), (Attentive, 5 * 4 * 8 * 8 + 2 * 5 * 5 * 8 + 8 * 3)],
)
def test_macs_of_fused_operations_count(module: Callable[[], nn.Module], macs: int) -> None:
    spec = ModelSpec("fused", module, (5,), 3, "int32", vocab=20)
    built = spec.build(0).eval()
    assert report.macs(built, spec) == macs
    assert all(parameter.grad is None for parameter in built.parameters())


def test_zeros_are_parameters_that_compress() -> None:
    spec = zoo.get("mlp", input_shape=(64,), classes=10)
    module = spec.build(0)
    x, y = np.zeros((4, 64), np.float32), np.arange(4, dtype=np.int32)
    before = report.measure(StepModel(spec, module), x, y)
    module.get_submodule("hidden.0").weight.data[:32] = 0
    after = report.measure(StepModel(spec, module), x, y)
    assert (after["parameters"], after["bytes"]) == (before["parameters"], before["bytes"])
    assert after["nonzero"] == before["nonzero"] - 32 * 64
    assert after["compressed_bytes"] < 0.7 * before["compressed_bytes"] < before["bytes"]


@pytest.mark.slow
def test_a_file_is_scored_as_its_module_is() -> None:
    spec = zoo.get("mlp", input_shape=(8,), classes=4)
    module = spec.build(1)
    content = quantize.to_tflite(module, spec)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 8)).astype(np.float32), rng.integers(0, 4, 50).astype(np.int32)
    np.testing.assert_allclose(report.logits(content, x), report.logits(module, x), atol=1e-5)
    y[:10] = -1
    expected = (report.logits(module, x)[10:].argmax(1) == y[10:]).mean()
    assert report.quality(content, x, y) == pytest.approx(expected) == report.quality(module, x, y)
    figures = report.measure(StepModel(spec, module, content), x, y)
    assert figures["bytes"] == len(content)
    found = report.latency({"file": content, "again": content}, x, turns=2)
    assert set(found) == {"file", "again"} and min(found.values()) > 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    chosen = {points[place] for place in report.pareto_front([(cost, -worth) for cost, worth in points])}
    beaten = {
        point for point in points if any(o != point and o[0] <= point[0] and o[1] >= point[1] for o in points)
    }
    assert chosen == set(points) - beaten


@pytest.mark.slow
def test_the_plot_shows_rows_without_a_latency_too(tmp_path: Path) -> None:
    rows = [
        {"name": "source", "accuracy": 0.9, "bytes": 3000, "latency_us": None},
        {"name": "quantize", "accuracy": 0.89, "bytes": 900, "latency_us": 12.0},
    ]
    report.plot(rows, tmp_path / "pareto.png", 300)
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    report.plot(rows[:1], tmp_path / "one.png", 300)


def test_points_and_legend_of_the_plot_bear_the_numbers_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, place, **_: drawn.append(figure) or Path(place).touch()
    )
    steps = [("source", "float32", 0.9), ("distil", "float32", 0.88), ("quantize", "static-int8", 0.87)]
    rows = [
        {"name": f"step-{number:02}-{kind}", "step": number, "kind": kind, "model": "cnn", "precision": precision,
         "accuracy": accuracy, "bytes": 3000 - 900 * number, "latency_us": 9.0 - number}
        for number, (kind, precision, accuracy) in enumerate(steps)
    ]  # fmt: skip

    report.plot(rows, tmp_path / "pareto.png", 300)
    named = [{**row, "name": "a" * 60} for row in rows]
    for row in named:
        del row["step"], row["kind"]  # as a search's candidates
    report.plot(named, tmp_path / "long.png", 300)

    figure = drawn[0]
    (legend,) = figure.legends
    assert legend.get_texts()[0].get_text().splitlines() == [
        "0  source (cnn)",
        "1  distil (cnn)",
        "2  quantize (static-int8)",
    ]
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "1", "2"]
    assert figure.axes[0].get_ylabel() == "accuracy on 300 rows"
    for each in drawn:
        each.canvas.draw()
        full = each.bbox
        shown = [*each.legends, *(text for axes in each.axes for text in axes.texts)]
        for artist in shown:
            box = artist.get_window_extent()
            assert full.x0 <= box.x0 and box.x1 <= full.x1 and full.y0 <= box.y0 and box.y1 <= full.y1
