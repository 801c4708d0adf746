"""Several runs side by side: keys that differ, figures, and how long each took to an accuracy, in rounds and in simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.json_values import flatten
from coordinator.reports.sweep import final_figures
from coordinator.reports.sweep_curves import draw_times

_FIGURES = ("test_accuracy", "test_loss", "test_rows", "model_sha256")

Report = Mapping[str, Any]


def compare(labels: Sequence[str], reports: Sequence[Report]) -> dict[str, Any]:
    """`runs`, and for each differing key of `experiment` and each key of `final` a value per run; None where it has none."""
    experiments = [flatten(report["experiment"]) for report in reports]
    keys = {key: None for each in experiments for key in each}
    settings = {key: [each.get(key) for each in experiments] for key in keys}
    figures: dict[str, list[Any]] = {
        "state": [report["state"] for report in reports],
        "rounds": [len(report["rounds"]) for report in reports],
    }
    figures |= {key: [report["final"].get(key) for report in reports] for key in _FIGURES}
    judged = [{} if report["final"].get("metrics") is None else final_figures(report) for report in reports]
    figures |= {
        key: [each.get(key) for each in judged] for each in judged for key in each if key not in figures
    }
    figures |= {key: [report.get(key) for report in reports] for key in ("bytes_up", "bytes_down", "clients")}
    for key in ("rejected", "silent"):
        figures[key] = [sum(row[key] for row in report["rounds"]) for report in reports]
    figures |= {
        key: [_sum(report["rounds"], key) for report in reports] for key in ("seconds", "simulated_seconds")
    }
    differing = {key: values for key, values in settings.items() if any(each != values[0] for each in values)}
    return {"runs": list(labels), "experiment": differing, "final": figures}


def until_accuracy(reports: Sequence[Report], accuracy: float) -> dict[str, list[Any]]:
    """What each run took until its test accuracy was this or more, by what it is; None for a run that never got there."""
    needed = [_rounds_until(report["rounds"], accuracy) for report in reports]
    return {
        f"rounds_until_accuracy_{accuracy:g}": [None if rounds is None else len(rounds) for rounds in needed],
        **{
            f"{key}_until_accuracy_{accuracy:g}": [
                None if rounds is None else _sum(rounds, key) for rounds in needed
            ]
            for key in ("bytes_up", "seconds", "simulated_seconds")
        },
    }


def draw(path: Path, labels: Sequence[str], reports: Sequence[Report]) -> None:
    """Draws loss and accuracy over simulated time, a line for each run.

    Raises:
        UserError: a run has no simulated time, or the file cannot be written.
    """
    for label, report in zip(labels, reports, strict=True):
        if _sum(report["rounds"], "simulated_seconds") is None:
            raise UserError(
                f"--plot draws over simulated time, and {label} has none: it is no simulation, or has no round"
            )
    names = [f"{label} ({at})" if labels.count(label) > 1 else label for at, label in enumerate(labels, 1)]
    try:
        draw_times(path, "runs", {name: [each] for name, each in zip(names, reports, strict=True)})
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written: {error.strerror}") from None


def _rounds_until(rounds: Sequence[Report], accuracy: float) -> Sequence[Report] | None:
    for number, row in enumerate(rounds, start=1):
        if row["test_accuracy"] is not None and row["test_accuracy"] >= accuracy:
            return rounds[:number]
    return None


def _sum(rounds: Sequence[Report], key: str) -> float | None:
    """Over all rounds; None if one of them has no such figure, or there is none."""
    values: list[Any] = [row.get(key) for row in rounds]
    return None if not values or None in values else sum(values)
