"""The results of a sweep over its seeds: `sweep.csv`, `sweep.json`, `sweep.png` and `sweep_time.png`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from coordinator import json_values
from coordinator.reports.metrics import HEADLINE, REGRESSION
from coordinator.reports.sweep_curves import draw_sweep, draw_times
from edge_client.files import write_durably

SCORES = ("test_accuracy", "test_loss")
_FIGURES = (*HEADLINE, *REGRESSION, "perplexity")


def final_figures(report: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of the final model, by name; None: not measured, not defined, or not finite."""
    final = report["final"]
    metrics = final.get("metrics") or {}
    return {
        **{key: final[key] for key in SCORES},
        **{key: metrics[key] for key in _FIGURES if key in metrics},
    }


def write(out: Path, plan: Mapping[str, Any], reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Writes the table and the plots into `out`; returns the contents of `sweep.json`.

    `plan`: contents of `plan.json`. `reports`: by folder, each as `report.json`.
    """
    found = (each for report in reports.values() for each in final_figures(report).items())
    names = list(dict.fromkeys(name for name, value in found if value is not None))
    rows = [_row(row, [reports[folder] for folder in row["folders"]], names) for row in plan["rows"]]
    document = {"name": plan["name"], "keys": plan["keys"], "figures": names, "rows": rows}
    write_durably(out / "sweep.csv", _as_csv(document).encode())
    curves = {row["label"]: [reports[folder] for folder in row["folders"]] for row in plan["rows"]}
    draw_sweep(out / "sweep.png", plan["name"], curves)
    draw_times(out / "sweep_time.png", plan["name"], curves)
    write_durably(out / "sweep.json", json_values.dumps(document, indent=2).encode())
    return document


def _row(
    row: Mapping[str, Any], reports: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """A combination with each figure's mean, sample standard deviation, 95 % confidence interval and values over its seeds.

    A figure that one seed lacks, because it diverged, has no mean: that of the others would mislead.
    """
    described: dict[str, Any] = {}
    for name in names:
        values = [final_figures(report).get(name) for report in reports]
        known = [value for value in values if value is not None]
        complete = len(known) == len(values)
        described[name] = {
            "mean": fmean(known) if complete else None,
            "std": stdev(known) if complete and len(known) > 1 else None,
            **dict(
                zip(("low", "high"), confidence_interval(known) if complete else (None, None), strict=True)
            ),
            "n": len(known),
            "values": values,
        }
    return {**row, "n": len(reports), "figures": described}


def confidence_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Ends of the 95 % confidence interval of the mean, by Student's t distribution; None for fewer than two values.

    It is about other seeds of the same experiment, not about other data.
    """
    if len(values) < 2:
        return None, None
    from scipy import stats  # takes a third of a second

    half = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


_COLUMNS = ("mean", "std", "low", "high", "n")


def _as_csv(document: Mapping[str, Any]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    of_figures = [f"{name}_{what}" for name in document["figures"] for what in _COLUMNS]
    writer.writerow([*document["keys"], "seeds", *of_figures])
    for row in document["rows"]:
        cells = [row["figures"][name][what] for name in document["figures"] for what in _COLUMNS]
        writer.writerow(
            [*row["values"].values(), row["n"], *("" if cell is None else cell for cell in cells)]
        )
    return buffer.getvalue()
