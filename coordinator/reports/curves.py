"""Figures as PNG files, and the curves of a run: loss and accuracy over rounds."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.files import write_durably
from models.tasks import TASKS, TaskKind

_TEST = "#1f6feb"

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def loss_name(task: TaskKind | None) -> str:
    """What the loss of a task is."""
    return TASKS[task or "classification"].loss


def draw_curves(
    path: Path,
    title: str,
    start: Mapping[str, Any],
    rounds: Sequence[Mapping[str, Any]],
    loss: str = "cross-entropy",
) -> None:
    """Writes the figure of `make_curves` as a PNG file."""
    write_durably(path, as_png(make_curves(title, start, rounds, loss)))


def make_curves(
    title: str,
    start: Mapping[str, Any],
    rounds: Sequence[Mapping[str, Any]],
    loss: str = "cross-entropy",
) -> Figure:
    """Loss and accuracy per round, with the spread of accuracy over clients. Round 0 is the initial model.

    Values that are None leave gaps. `loss`: what it is.
    """
    figure, left, right = make_figure()
    _draw_loss(left, start, rounds, loss)
    _draw_accuracy(right, start, rounds)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
    figure.suptitle(title)
    return figure


def make_figure() -> tuple[Figure, Axes, Axes]:
    """A figure with two axes side by side."""
    # Figure and canvas directly: pyplot has global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, left, right


def as_png(figure: Figure) -> bytes:
    """The figure as a PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def _draw_loss(axes: Axes, start: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], loss: str) -> None:
    numbers = [row["round"] for row in rounds]
    trained = [row for row in rounds if row["train_loss"] is not None]
    axes.plot(
        [row["round"] for row in trained],
        [row["train_loss"] for row in trained],
        label="training (clients' mean)",
        color="#8a8a8a",
    )
    _draw_test(axes, start, rounds, "test_loss", "test")
    style_axes(axes, f"loss ({loss})", numbers)
    axes.set_ylim(bottom=0)


def _draw_accuracy(axes: Axes, start: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> None:
    numbers = [row["round"] for row in rounds]
    of_clients = [row for row in rounds if row["client_accuracy_median"] is not None]
    if of_clients:
        scored = [row["round"] for row in of_clients]
        low, high = curve(of_clients, "client_accuracy_min"), curve(of_clients, "client_accuracy_max")
        middle, extremes = curve(of_clients, "client_accuracy_median"), "clients, minimum to maximum"
        if scored == numbers:
            axes.fill_between(scored, low, high, color=_TEST, alpha=0.15, lw=0, label=extremes)
            axes.plot(scored, middle, color=_TEST, ls=":", label="clients, median")
        else:  # a band would cover rounds in which no client was scored
            axes.vlines(scored, low, high, color=_TEST, alpha=0.3, label=extremes)
            axes.plot(scored, middle, color=_TEST, ls="", marker="_", label="clients, median")
    _draw_test(axes, start, rounds, "test_accuracy", "all test rows")
    style_axes(axes, "test accuracy", numbers)
    axes.set_ylim(0, 1.01)
    last = rounds[-1]["test_accuracy"]
    if last is not None:
        axes.annotate(
            f"{last:.3f}", (numbers[-1], last), xytext=(-4, -14), textcoords="offset points", ha="right"
        )


def _draw_test(
    axes: Axes, start: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], key: str, label: str
) -> None:
    """Draws a figure of the test rows: a line where every round has it, else a point for each round that has."""
    values = curve([start, *rounds], key)
    gaps = any(row[key] is None for row in rounds)
    axes.plot([0, *(row["round"] for row in rounds)], values, color=_TEST, marker="." * gaps, label=label)


def curve(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The values of one key; NaN where a row has none."""
    return [math.nan if row[key] is None else row[key] for row in rows]


def style_axes(axes: Axes, label: str, numbers: Sequence[int]) -> None:
    """Labels and scales axes over the rounds `numbers`."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0, max(numbers))
