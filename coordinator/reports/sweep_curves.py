"""The plots of a sweep: loss and accuracy over rounds, a line and a band for each combination, and over simulated time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.reports.curves import as_png, curve, make_figure, style_axes
from edge_client.files import write_durably

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEGEND_COLUMNS = 3
_LEGEND_INCHES = 0.22
_ROOM = 1.1
"""Height of the loss axis in initial losses: a diverging run must not flatten the others."""


def draw_sweep(path: Path, title: str, reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draws the mean over seeds as a line, minimum to maximum as a band; a regression has no accuracy.

    `reports`: by the label of the combination.
    """
    figure, left, right = make_figure()
    colours = _colours(len(reports))
    for colour, (label, of_seeds) in zip(colours, reports.items(), strict=True):
        for axes, key in ((left, "test_loss"), (right, "test_accuracy")):
            _draw(axes, [curve([each["start"], *each["rounds"]], key) for each in of_seeds], label, colour)
    seeds = max(len(of_seeds) for of_seeds in reports.values())
    longest = max(len(each["rounds"]) for of_seeds in reports.values() for each in of_seeds)
    style_axes(left, "test loss", range(longest + 1))
    style_axes(right, "test accuracy", range(longest + 1))
    losses = [each["start"]["test_loss"] for of_seeds in reports.values() for each in of_seeds]
    highest = max((loss for loss in losses if loss is not None), default=math.nan)
    left.set_ylim(0, _ROOM * highest if math.isfinite(highest) else None)
    right.set_ylim(0, 1.01)
    if not any(np.size(line.get_xdata()) for line in right.lines):
        right.remove()
        left.set_subplotspec(figure.add_gridspec(1, 1)[0, 0])
    _add_legend(figure, left)
    band = f"mean of {seeds} seeds, band from minimum to maximum" if seeds > 1 else "one seed"
    figure.suptitle(f"{title}: {band}")
    write_durably(path, as_png(figure))


def draw_times(path: Path, title: str, reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    """Draws loss and accuracy over simulated time, a line for each run; whether it did: only if every round has a time.

    `reports`: by the label of the combination.
    """
    runs = [report for of_seeds in reports.values() for report in of_seeds]
    if any(row.get("simulated_seconds") is None for report in runs for row in report["rounds"]):
        return False
    figure, left, right = make_figure()
    for colour, (label, of_seeds) in zip(_colours(len(reports)), reports.items(), strict=True):
        for index, report in enumerate(of_seeds):
            times = simulated_times(report["rounds"])
            for axes, key in ((left, "test_loss"), (right, "test_accuracy")):
                values = np.array(curve([report["start"], *report["rounds"]], key))
                scored = ~np.isnan(values)
                marker = "" if scored.all() else "."
                line = {"color": colour, "lw": 1.2, "label": "" if index else label}
                axes.plot(np.array(times)[scored], values[scored], marker=marker, **line)
    for axes, name in ((left, "test loss"), (right, "test accuracy")):
        axes.set_xlabel("simulated seconds")
        axes.set_ylabel(name)
        axes.set_xlim(0, None)
    right.set_ylim(0, 1.01)
    _add_legend(figure, left)
    figure.suptitle(f"{title}: over simulated time")
    write_durably(path, as_png(figure))
    return True


def simulated_times(rounds: Sequence[Mapping[str, Any]]) -> list[float]:
    """Simulated seconds since the run began: at its start, and at the end of each round."""
    return [0.0, *accumulate(row["simulated_seconds"] for row in rounds)]


def _add_legend(figure: Figure, axes: Axes) -> None:
    """The lines of `axes` by label, below all axes of the figure."""
    handles, labels = axes.get_legend_handles_labels()
    lines = -(-len(labels) // _LEGEND_COLUMNS)
    figure.set_figheight(figure.get_figheight() + _LEGEND_INCHES * lines)
    figure.legend(
        handles, labels, loc="outside lower center", ncols=_LEGEND_COLUMNS, frameon=False, fontsize=9
    )


def _draw(axes: Axes, curves: Sequence[Sequence[float]], label: str, colour: Any) -> None:
    """Draws the rounds in which every seed has a value; a diverged model has none."""
    points = list(enumerate(zip(*curves, strict=False)))  # a seed may have stopped early
    scored = [(number, values) for number, values in points if not any(map(math.isnan, values))]
    numbers = [number for number, _ in scored]
    if len(curves) > 1:
        low, high = ([choose(values) for _, values in scored] for choose in (min, max))
        axes.fill_between(numbers, low, high, color=colour, alpha=0.15, lw=0)
    means = [math.fsum(values) / len(values) for _, values in scored]
    axes.plot(numbers, means, color=colour, label=label, marker="." * (len(scored) < len(points)))


def _colours(count: int) -> list[Any]:
    """Colours that differ: the usual ten, or, for more, evenly spaced ones."""
    from matplotlib import colormaps

    if count <= 10:
        return list(colormaps["tab10"].colors[:count])  # type: ignore[attr-defined]
    return [colormaps["turbo"](index / (count - 1)) for index in range(count)]
