"""The loss curve of a pretraining as a picture."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

from edge_client.files import write_durably

Point = tuple[int, float, float | None]
"""Step, counted from 1; loss; learning rate, where it is known."""


def read_curve(folder: Path, losses: Sequence[float]) -> list[Point]:
    """The points of `curve.jsonl`, where the worker has left one; else of `losses` alone."""
    path = folder / "curve.jsonl"
    if not path.exists():
        return [(step, loss, None) for step, loss in enumerate(losses, 1)]
    points = (json.loads(line) for line in path.read_text("utf-8").splitlines())
    return [(point["step"], point["loss"], point.get("lr")) for point in points]


def draw_curve(path: Path, title: str, points: Sequence[Point]) -> None:
    """Loss and learning rate by step."""
    # Figure and canvas directly: pyplot keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = [step for step, _, _ in points]
    left.plot(steps, [loss for _, loss, _ in points], color="#1f6feb", lw=0.8)
    left.set_ylabel("training loss (cross-entropy)")
    left.set_ylim(bottom=0)
    rates = [(step, rate) for step, _, rate in points if rate is not None]
    right.plot([step for step, _ in rates], [rate for _, rate in rates], color="#8a8a8a")
    right.set_ylabel("learning rate")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    write_durably(path, buffer.getvalue())
