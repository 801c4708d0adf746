"""Mean and deviation of columns over devices, so that one device that reports wrong numbers cannot set the scale of all.

Reports cannot be verified. Two bounds limit what a single one does to a column:

- A device counts for at most `weight_cap` times the median number of rows.
- Of three devices or more, one is left out whose values are out of proportion: their root mean square distance from m is more
  than `OUT_OF_PROPORTION` times the median device's, with m for the median of the devices' means.

A device that stays therefore has a mean within `OUT_OF_PROPORTION` median distances of m. As long as fewer than half of the
devices lie, m and the median distance lie within the range of the honest ones. Where no bound applies, the result equals the
mean and deviation of the pooled rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from edge_client.data.statistics import Moments, deviation, moments, pooled
from edge_client.wire.statistics import ColumnStatistics, StatisticsResult

OUT_OF_PROPORTION = 10.0
"""Times the median distance. Honest sites differ by less, unless one of them measures in another unit."""

MIN_TO_COMPARE = 3
"""Of two devices nobody can say which one is wrong."""


@dataclass(frozen=True)
class Scale:
    """Moments by column, and a sentence for each bound that applied."""

    moments: dict[str, Moments]
    notices: tuple[str, ...]


def scale_of(results: Mapping[str, StatisticsResult], weight_cap: float) -> Scale:
    """Count, mean and deviation of each column of numbers. `results`: by the name of the device.

    Args:
        weight_cap: limit of a device's rows as a multiple of the median; 0: none.
    """
    kept: dict[str, dict[str, ColumnStatistics]] = {device: {} for device in results}
    notices = []
    for name in dict.fromkeys(name for result in results.values() for name in result.columns):
        reported = {
            device: result.columns[name]
            for device, result in results.items()
            if name in result.columns and result.columns[name].mean is not None
        }
        outside = _out_of_proportion(reported)
        if outside:
            places = "; ".join(
                f"{device} (mean {reported[device].mean:.4g}, deviation {deviation(reported[device]):.4g})"
                for device in outside
            )
            notices.append(
                f"the scale of {name!r} leaves out devices whose values are out of proportion: {places}; the median of all "
                f"means is {_center(reported.values()):.4g}; check the column's unit there"
            )
        inside = {device: column for device, column in reported.items() if device not in outside}
        for device, column in _capped(inside, weight_cap).items():
            if column.count < inside[device].count:
                notices.append(
                    f"the scale of {name!r} counts {column.count:,} of the {inside[device].count:,} rows that {device} reports "
                    f"(federation.weight_cap = {weight_cap:g})"
                )
            kept[device][name] = column
    found = pooled(replace(result, columns=kept[device]) for device, result in results.items())
    return Scale(moments(found), tuple(notices))


def _center(columns: Iterable[ColumnStatistics]) -> float:
    return median(column.mean for column in columns if column.mean is not None)


def _out_of_proportion(reported: Mapping[str, ColumnStatistics]) -> list[str]:
    if len(reported) < MIN_TO_COMPARE:
        return []
    center = _center(reported.values())
    distances = {
        device: math.hypot(deviation(column), (column.mean or 0.0) - center)
        for device, column in reported.items()
    }
    # 0: most devices have one and the same value, to which nothing is in proportion.
    limit = OUT_OF_PROPORTION * median(distances.values())
    return [device for device, distance in distances.items() if 0 < limit < distance]


def _capped(columns: Mapping[str, ColumnStatistics], weight_cap: float) -> dict[str, ColumnStatistics]:
    """The columns with at most `weight_cap` times the median number of rows, and as much of the squares."""
    if not columns or not weight_cap:
        return dict(columns)
    limit = max(1, int(weight_cap * median(column.count for column in columns.values())))
    return {
        device: column
        if column.count <= limit
        else replace(column, count=limit, squares=(column.squares or 0.0) * limit / column.count)
        for device, column in columns.items()
    }
