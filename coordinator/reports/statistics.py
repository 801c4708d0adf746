"""The report of federated statistics: each site beside all sites together.

Drift of a column of numbers is the standardised mean difference to the pool, and its population stability index (PSI) over
the bins of the histogram; of categories and classes the PSI over those that are told. PSI below 0.1 counts as no drift, from
0.25 as large (Siddiqi 2006, chapter 8). Counts that a site does not tell are one cell together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edge_client.data.statistics import deviation, pooled
from edge_client.wire.statistics import EMPTY, ColumnStatistics, StatisticsResult

BINS = 10
"""Bins of a histogram."""

MODERATE, LARGE = 0.1, 0.25
"""PSI from which drift is moderate, and large."""


def make_report(
    results: Mapping[str, StatisticsResult], silent: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The statistics of all sites as JSON. `silent`: site -> why it told nothing.

    `sites` with fewer training rows than the minimum count have `rows` null.
    """
    pool = pooled(results.values())
    return {
        "minimum_count": max((result.minimum_count for result in results.values()), default=0),
        "pooled": {
            "rows": pool.rows,
            "columns": {name: _figures(column, pool) for name, column in pool.columns.items()},
            "labels": _shares(pool.labels, pool.other_labels),
        },
        "sites": {name: _site(result, pool) for name, result in sorted(results.items())},
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


def _site(result: StatisticsResult, pool: StatisticsResult) -> dict[str, Any]:
    if not result.rows:
        return {"rows": None, "columns": {}, "labels": {}, "label_drift": None}
    labels = _told_and_rest(result.labels, result.rows)
    return {
        "rows": result.rows,
        "columns": {
            name: _figures(column, result) | _drift(column, pool.columns[name], _least(result))
            for name, column in result.columns.items()
        },
        "labels": _shares(result.labels, result.other_labels),
        "label_drift": _index(labels, pool.labels, pool.rows, _least(result)),
    }


def _figures(column: ColumnStatistics, result: StatisticsResult) -> dict[str, Any]:
    """What is told of one column; null where it is withheld."""
    if not column.count:
        return {"kind": column.kind, "count": None, "missing": None}
    if column.kind == "category":
        missing = column.categories.get(EMPTY)
        return {
            "kind": "category",
            "count": column.count,
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


def _least(result: StatisticsResult) -> float:
    """The share that stands for cells that may be withheld: half of the smallest that is told."""
    return result.minimum_count / (2 * result.rows)


def _index(shares: Mapping[str, float], told: Mapping[str, int], whole: int, least: float) -> float:
    return stability_index(shares, _same_cells(shares, told, whole), least)


def _drift(column: ColumnStatistics, pool: ColumnStatistics, least: float) -> dict[str, Any]:
    if not column.count or column.kind != pool.kind:
        return {"drift": None}
    if column.kind == "category":
        shares = _told_and_rest(column.categories, column.count)
        return {"drift": _index(shares, pool.categories, pool.count, least)}
    spread = deviation(pool)
    apart = (column.mean or 0.0) - (pool.mean or 0.0)
    difference = apart / spread if spread > 0 else 0.0
    drift = None
    if column.histogram and pool.histogram:
        shares = _told_and_rest(_by_bin(column), column.count)
        drift = _index(shares, _by_bin(pool), pool.count, least)
    return {"drift": drift, "mean_difference": difference}


def _by_bin(column: ColumnStatistics) -> dict[str, int]:
    return {str(place): count for place, count in enumerate(column.histogram) if count}


def _told_and_rest(told: Mapping[str, int], whole: int) -> dict[str, float]:
    """Share of each cell that is told, and `rest`: of all others together."""
    shares = {f"={name}": count / whole for name, count in told.items()}
    rest = whole - sum(told.values())
    return shares | ({"rest": rest / whole} if rest else {})


def _same_cells(shares: Mapping[str, float], told: Mapping[str, int], whole: int) -> dict[str, float]:
    """The pool's shares of the cells of a site; the other cells are the rest."""
    expected = {f"={name}": count / whole for name, count in told.items() if f"={name}" in shares}
    rest = 1 - sum(expected.values())
    return expected | ({"rest": rest} if rest > 1e-12 else {})


def _shares(told: Mapping[str, int], other: int) -> dict[str, Any]:
    return {"told": dict(told), "other": other}
