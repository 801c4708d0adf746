"""The picture of an audit: rows of the client above what was reconstructed of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from coordinator.privacy.audit.outcome import Outcome
from coordinator.reports.curves import as_png
from edge_client.files import write_durably

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 8


def draw(path: Path, outcomes: Sequence[Outcome], title: str) -> None:
    """Writes the picture as a PNG: images, or the values of rows of a table as curves. Outcomes without rows are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [each for each in outcomes if each.pairs]
    figure = Figure(figsize=(1.15 * _COLUMNS + 2.9, 2.35 * len(drawn) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    parts = figure.subfigures(len(drawn), 1, squeeze=False)[:, 0]
    for part, outcome in zip(parts, drawn, strict=True):
        lines = [
            f"update of {outcome.attacked}; seen by {outcome.view.observer}",
            f"defence: {outcome.view.defence}{' (what if)' if outcome.view.is_supposed else ''}",
            f"{outcome.measure} {outcome.similarity:.2f}, by guessing {outcome.guess:.2f}: {outcome.verdict}",
        ]
        part.suptitle("     ".join(lines), fontsize=8, x=0.01, ha="left")
        axes = part.subplots(2, _COLUMNS, squeeze=False)
        for each in axes.flat:
            each.set_axis_off()
        for column, pair in enumerate(outcome.pairs[:_COLUMNS]):
            values = np.concatenate([pair.row.reshape(-1), pair.reconstruction.reshape(-1)])
            low, high = float(values.min()), float(values.max())
            for at, row in enumerate((pair.row, pair.reconstruction)):
                _draw_row(axes[at, column], row, low, high)
            axes[1, column].set_title(f"{pair.similarity:.2f}", fontsize=7, pad=2)
    write_durably(path, as_png(figure))


def _draw_row(axes: Axes, row: npt.NDArray[np.float32], low: float, high: float) -> None:
    if row.ndim == 3 and row.shape[0] in (1, 3):
        row = row[0] if row.shape[0] == 1 else (np.moveaxis(row, 0, -1) - low) / max(high - low, 1e-9)
    if row.ndim == 1 or min(row.shape[:2]) < 3:
        axes.bar(np.arange(row.size), row.reshape(-1), color="#1f6feb")
        axes.set_ylim(min(low, 0.0), max(high, 1e-9))
        return
    axes.imshow(row, cmap="gray_r", vmin=low, vmax=high)
