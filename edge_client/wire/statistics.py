"""Statistics of one device's table, as they travel: the request of the coordinator, and what the device reports.

A device reports sums over many rows, never of few. With the minimum count k of the request, or the owner's if that is larger:

- With fewer than k training rows it reports nothing but that.
- A category, a class or a bin of a histogram that fewer than k rows have is not reported. What is reported of a column leaves 0 or at
  least k rows unreported: else the smallest reported cells are withheld too, because a difference would give the small one away.
- A column of numbers with fewer than k values is not reported. Its bounds lie beside the k-th smallest and the k-th largest value,
  never an extreme; they are reported from 2 k values on.

Sums are exact: whoever knows all rows but one can compute the last. Noise against that is not added here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from edge_client.wire.strict import InvalidDocument

MINIMUM_COUNT = 10
"""Rows from which a count is reported, unless the owner or the request wants more."""

MAX_ROWS = 2**53
"""The integers that float64 holds."""
MAX_COLUMNS = 256
MAX_CATEGORIES = 100
MAX_EDGES = 64

LARGEST = 1e30
"""Largest number that a device trains on; sums of a fleet's squares stay finite."""

EMPTY = ""
"""The category of cells without a text."""


@dataclass(frozen=True)
class StatisticsRequest:
    """What the coordinator asks, the `message` of a statistics task.

    Attributes:
        minimum_count: rows from which a count is reported, >= 2.
        columns: of the input; empty: all that the device trains on.
        edges: column of numbers -> ascending edges between the bins of its histogram; the outer bins are open.
        label: column of the label of a table that has it, where the device's configuration names none (since 1.4).
        exclude: columns that are no input; a table need not have them (since 1.4).
        quantity: the label is a quantity and reported as a column of numbers, under the name of `label` if that is given (since 1.4).
    """

    minimum_count: int = MINIMUM_COUNT
    columns: tuple[str, ...] = ()
    edges: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    label: str = ""
    exclude: tuple[str, ...] = ()
    quantity: bool = False


@dataclass(frozen=True)
class ColumnStatistics:
    """One column over the training rows.

    Attributes:
        count: rows with a number; of categories all rows. 0: the column is not reported.
        mean: of the numbers. squares: sum of the squared deviations from it.
        low, high: halfway between the k-th smallest number and the next, and between the k-th largest and the one before.
        histogram: rows per bin of the requested edges, 0 where they are not reported; empty if none was requested.
        categories: text -> rows; `""` are empty cells.
        other: rows of all texts that are not reported.
        date: the numbers are dates, as days since 1970-01-01 (since 1.4).
    """

    kind: Literal["number", "category"]
    count: int
    mean: float | None = None
    squares: float | None = None
    low: float | None = None
    high: float | None = None
    histogram: tuple[int, ...] = ()
    categories: Mapping[str, int] = field(default_factory=dict)
    other: int = 0
    date: bool = False


@dataclass(frozen=True)
class StatisticsResult:
    """POST /tasks/{task}/statistics: all that a statistics task reports of the device's training rows.

    Attributes:
        rows: training rows; 0: fewer than `minimum_count`, and nothing else is reported.
        minimum_count: the one applied, at least the request's.
        columns: name -> statistics; of the inputs, and of a label that is a quantity.
        labels: class -> rows. other_labels: rows of all classes that are not reported.
        site: the device's name for the origin of its data, for the report.
    """

    rows: int
    minimum_count: int
    columns: Mapping[str, ColumnStatistics] = field(default_factory=dict)
    labels: Mapping[str, int] = field(default_factory=dict)
    other_labels: int = 0
    site: str = field(default="", metadata={"for_people": True})


def require_valid_request(request: StatisticsRequest) -> StatisticsRequest:
    """The request. Raises: InvalidDocument: a value is out of its range."""
    checks = [
        (request.minimum_count >= 2, f"minimum_count is {request.minimum_count}, expected 2 or more"),
        (
            len(request.columns) <= MAX_COLUMNS,
            f"{len(request.columns)} columns, expected {MAX_COLUMNS} at most",
        ),
        (
            len(request.edges) <= MAX_COLUMNS,
            f"edges of {len(request.edges)} columns, expected {MAX_COLUMNS} at most",
        ),
        *(
            (
                len(edges) <= MAX_EDGES and list(edges) == sorted(set(edges)),
                f"edges of {name[:200]!r} do not ascend, or are more than {MAX_EDGES}",
            )
            for name, edges in request.edges.items()
        ),
    ]
    for holds, problem in checks:
        if not holds:
            raise InvalidDocument(f"statistics: {problem}")
    return request


def require_valid(result: StatisticsResult, request: StatisticsRequest) -> StatisticsResult:
    """The result, if it can be one of the request, and holds no small count.

    Raises:
        InvalidDocument: naming the first wrong place.
    """
    for holds, problem in _checks(result, request):
        if not holds:
            raise InvalidDocument(f"StatisticsResult.{problem[:200]}")
    return result


def _checks(result: StatisticsResult, request: StatisticsRequest) -> Iterator[tuple[bool, str]]:
    least = result.minimum_count
    yield least >= request.minimum_count, f"minimum_count is {least}, asked for {request.minimum_count}"
    yield result.rows <= MAX_ROWS, f"rows is {result.rows}, expected {MAX_ROWS} at most"
    yield result.rows == 0 or result.rows >= least, f"rows is {result.rows}, fewer than {least}"
    yield result.rows > 0 or not (result.columns or result.labels), "columns or labels without rows"
    yield _is_partition(result.labels, result.other_labels, result.rows, least), "labels do not add up"
    for name, column in result.columns.items():
        place = f"columns[{name!r}]"
        counts = column.count == 0 or least <= column.count <= result.rows
        yield counts, f"{place}.count is {column.count} of {result.rows} rows"
        if column.kind == "category":
            whole = column.count in (0, result.rows)
            yield (
                whole and _is_partition(column.categories, column.other, column.count, least),
                f"{place} does not add up",
            )
            yield column.mean is None and not column.histogram, f"{place} is of categories and has numbers"
            continue
        yield not column.categories and not column.other, f"{place} is of numbers and has categories"
        has_sums = column.mean is not None and column.squares is not None and column.squares >= 0
        yield has_sums == (column.count > 0), f"{place}.mean and squares do not fit its count"
        values = (column.mean, column.low, column.high)
        bounded = all(abs(value) <= LARGEST for value in values if value is not None)
        yield (
            bounded and (column.squares or 0) <= column.count * (2 * LARGEST) ** 2,
            f"{place} has too large numbers",
        )
        bins = len(request.edges.get(name, ())) + 1 if name in request.edges else 0
        yield (
            len(column.histogram) in (0, bins),
            f"{place}.histogram has {len(column.histogram)} bins, not {bins}",
        )
        by_bin = {str(place): count for place, count in enumerate(column.histogram) if count}
        rest = column.count - sum(by_bin.values()) if column.histogram else 0
        yield (
            _is_partition(by_bin, rest, sum(by_bin.values()) + rest, least),
            f"{place}.histogram does not add up",
        )


def _is_partition(reported: Mapping[str, int], rest: int, whole: int, least: int) -> bool:
    """Whether the counts make up the whole, and none of them is small."""
    return (
        all(count >= least for count in reported.values())
        and (rest == 0 or rest >= least)
        and sum(reported.values()) + rest == whole
    )
