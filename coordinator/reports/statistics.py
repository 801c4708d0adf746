"""The report of federated statistics: each site beside all sites together.

Drift of a column of numbers is the standardised mean difference to the pool, and its population stability index (PSI) over
the bins of the histogram; of categories and classes the PSI over those that some site reports. PSI below 0.1 counts as no drift,
from 0.25 as large (Siddiqi 2006, chapter 8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_client.data.statistics import deviation, pooled
from edge_client.wire.statistics import EMPTY, ColumnStatistics, StatisticsResult

BINS = 10
"""Bins of a histogram."""

_REST = "\0"
"""Names what a site withholds where it is a cell of its own; no text is called so."""


def make_report(
    results: Mapping[str, StatisticsResult],
    silent: Mapping[str, str] | None = None,
    *,
    quantity: str = "",
) -> dict[str, Any]:
    """The statistics of all sites as JSON.

    Args:
        silent: site -> why it reported nothing.
        quantity: the column of a label that is a quantity; its drift is that of the labels.

    `sites` with fewer training rows than the minimum count have `rows` null.
    """
    pool = pooled(results.values())
    useful = {name: result for name, result in results.items() if result.rows}
    drifts = {name: _column_drifts(name, column.kind, useful) for name, column in pool.columns.items()}
    label_drifts = (
        drifts.get(quantity, {})
        if quantity
        else _drifts(
            {name: _Counts(each.labels, each.rows, each.minimum_count) for name, each in useful.items()}
        )
    )
    return {
        "minimum_count": max((result.minimum_count for result in results.values()), default=0),
        "quantity": quantity or None,
        "pooled": {
            "rows": pool.rows,
            "columns": {name: _figures(column, pool) for name, column in pool.columns.items()},
            "labels": _shares(pool.labels, pool.other_labels),
        },
        "sites": {
            name: {
                "rows": result.rows or None,
                "columns": {
                    column: _figures(reported, result)
                    | {"drift": drifts[column].get(name)}
                    | _mean_difference(reported, pool.columns[column])
                    for column, reported in result.columns.items()
                },
                "labels": _shares(result.labels, result.other_labels),
                "label_drift": label_drifts.get(name),
            }
            for name, result in sorted(results.items())
        },
        "silent": dict(sorted((silent or {}).items())),
    }


def stability_index(shares: Mapping[str, float], expected: Mapping[str, float], least: float) -> float:
    """PSI of shares against expected ones. `least`: > 0, counts for every smaller share, which may be one withheld."""
    total = 0.0
    for cell in sorted(shares.keys() | expected.keys()):
        here = max(shares.get(cell, 0.0), least)
        there = max(expected.get(cell, 0.0), least)
        total += (here - there) * math.log(here / there)
    return total


@dataclass(frozen=True)
class _Counts:
    """Cells that a site reports of one partition of its rows, and all these rows. `cells`: all there are, if that is known."""

    reported: Mapping[str, int]
    rows: int
    least: int
    cells: tuple[str, ...] = ()


def _column_drifts(name: str, kind: str, results: Mapping[str, StatisticsResult]) -> dict[str, float]:
    """Site -> drift of a column, of those that report it as what it is at most sites."""
    parts = {}
    for site, result in results.items():
        column = result.columns.get(name)
        if column is None or not column.count or column.kind != kind:
            continue
        if kind == "category":
            parts[site] = _Counts(column.categories, column.count, result.minimum_count)
        elif column.histogram:
            bins = {str(place): count for place, count in enumerate(column.histogram)}
            reported = {place: count for place, count in bins.items() if count}
            parts[site] = _Counts(reported, column.count, result.minimum_count, tuple(bins))
    return _drifts(parts)


def _drifts(parts: Mapping[str, _Counts]) -> dict[str, float]:
    """Site -> PSI of its shares against those of all sites; without sites that report no cell.

    What a site withholds is spread over the cells that it does not report as other sites have them, so that withholding alone
    is no drift.
    """
    cells = list(dict.fromkeys(cell for part in parts.values() for cell in (*part.cells, *part.reported)))
    least = max((part.least for part in parts.values()), default=0)
    weights = {
        cell: sum(part.reported.get(cell, 0) for part in parts.values()) or least / 2 for cell in cells
    }
    spread = {site: _spread(part, weights) for site, part in parts.items()}
    rows = sum(part.rows for part in parts.values()) or 1
    expected = {
        cell: sum(counts.get(cell, 0.0) for counts in spread.values()) / rows for cell in (*cells, _REST)
    }
    return {
        site: stability_index(
            {cell: count / part.rows for cell, count in spread[site].items()},
            expected,
            part.least / (2 * part.rows),
        )
        for site, part in parts.items()
        if part.reported
    }


def _spread(part: _Counts, weights: Mapping[str, float]) -> dict[str, float]:
    """Rows by cell. Without a cell to spread it over, what is withheld is a cell of its own."""
    unreported = {cell: weight for cell, weight in weights.items() if cell not in part.reported}
    rest, whole = part.rows - sum(part.reported.values()), sum(unreported.values())
    if not whole:
        return {**part.reported, _REST: rest}
    return {**part.reported, **{cell: rest * weight / whole for cell, weight in unreported.items()}}


def _mean_difference(column: ColumnStatistics, pool: ColumnStatistics) -> dict[str, float]:
    """How far the site's mean is from the pooled one, in pooled deviations."""
    if column.mean is None or pool.mean is None:
        return {}
    spread = deviation(pool)
    return {"mean_difference": (column.mean - pool.mean) / spread if spread > 0 else 0.0}


def _figures(column: ColumnStatistics, result: StatisticsResult) -> dict[str, Any]:
    """What is reported of one column; null where it is withheld."""
    if not column.count:
        return {"kind": column.kind, "count": None, "missing": None}
    if column.kind == "category":
        missing = column.categories.get(EMPTY)
        return {
            "kind": "category",
            "count": column.count - (missing or 0),
            "missing": None if missing is None else missing / column.count,
            "categories": {name: count for name, count in column.categories.items() if name != EMPTY},
            "other": column.other,
        }
    return {
        "kind": "number",
        "count": column.count,
        "missing": 1 - column.count / result.rows,
        "mean": column.mean,
        "deviation": deviation(column),
        "low": column.low,
        "high": column.high,
        "histogram": list(column.histogram),
    }


def _shares(reported: Mapping[str, int], other: int) -> dict[str, Any]:
    return {"classes": dict(reported), "other": other}
