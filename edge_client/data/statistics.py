"""Statistics of a table's training rows that give no single row away, and their merge over sites.

`edge_client.wire.statistics` says what is reported and what is withheld. The merge of means and squared deviations is that of
Chan, Golub and LeVeque (1979), exact to rounding whatever the means are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import numpy.typing as npt

from edge_client.data.cells import date_number, folded, is_missing, number, numbers
from edge_client.data.connector import DataConfig, DataProblem
from edge_client.data.contract import TABLE_KINDS, with_schema
from edge_client.data.examples import NoExamples
from edge_client.data.labels import class_name, quantities
from edge_client.data.options import HELD_OUT, TableOptions
from edge_client.data.rows import held_out_rows
from edge_client.data.table import Column, Record, Table, feature, held_out
from edge_client.data.table_reader import EXCLUDED, feature_names, read_rows
from edge_client.data.tables import read_table
from edge_client.wire.schema import DataSchema
from edge_client.wire.statistics import (
    EMPTY,
    LARGEST,
    MAX_CATEGORIES,
    MAX_COLUMNS,
    ColumnStatistics,
    StatisticsRequest,
    StatisticsResult,
)
from edge_client.wire.strict import is_text

LONGEST_TEXT = 200
"""Characters of a category that is reported by name."""

Moments = tuple[int, float, float]
"""Count, mean and standard deviation."""


def read_statistics(
    config: DataConfig, request: StatisticsRequest, schema: DataSchema | None = None
) -> StatisticsResult:
    """Statistics of the rows of a data set that a device trains on. `schema`: of the model, which says how a table is read.

    Raises:
        NoExamples: the data set is no table.
        DataProblem: it cannot be read, or the request names a column that is no input of it.
    """
    if config.kind not in TABLE_KINDS:
        raise NoExamples(
            f"statistics are of tables ({', '.join(TABLE_KINDS)}); the data set is of kind {config.kind!r}"
        )
    described = config if schema is None else with_schema(config, schema)
    return read_table(described, lambda table, options: _of_table(table, options, request))


def _of_table(table: Table, options: TableOptions, request: StatisticsRequest) -> StatisticsResult:
    records = list(table.records)
    if not records:
        raise DataProblem(f"{table.name}: has column names but no rows")
    table = replace(table, records=records)
    options = _completed(table, options, request)
    if request.quantity and options.classes:
        raise DataProblem(
            f"{table.name}: the label {options.label!r} is to be reported as a quantity, and option classes names classes of it; "
            'remove the option, or ask without data.task = "regression"'
        )
    roles = dict.fromkeys(options.exclude, EXCLUDED)
    roles |= {options.label: "label"} if options.label else {}
    roles |= {options.split: "split"} if options.split else {}
    features = feature_names(table, roles, options.features or None)
    for name in request.columns:
        table.index(name, "statistics")
        if name not in features:
            raise DataProblem(
                f"{table.name}: column {name!r} is no input of the data set; statistics are of its inputs only"
            )
    is_quantity = request.quantity or bool(options.label_scale)
    training = ~_held_out_rows(table, records, features, options, is_quantity=is_quantity)
    trained = [record for record, trains in zip(records, training, strict=True) if trains]
    return of_records(table, trained, replace(options, features=request.columns or features), request)


def _completed(table: Table, options: TableOptions, request: StatisticsRequest) -> TableOptions:
    """The options with what the request says where they say nothing: the label, and columns that are no input."""
    if not options.label and request.label in options.exclude:
        raise DataProblem(
            f"{table.name}: column {request.label!r} is the label elsewhere, and option exclude keeps it back here"
        )
    label = options.label or (request.label if request.label in table.columns else "")
    own = {label, options.split, *options.features}
    exclude = (*options.exclude, *(name for name in request.exclude if name not in own))
    return replace(options, label=label, exclude=tuple(dict.fromkeys(exclude)))


def of_records(
    table: Table, records: Sequence[Record], options: TableOptions, request: StatisticsRequest
) -> StatisticsResult:
    """Statistics of some records of a table: of `options.features`, and of the label, by class or as a column of numbers.

    Columns of the option `categories` are no numbers, even if they look so; of `dates`, days since 1970-01-01.

    Raises:
        DataProblem: a column is not there, or a number is too large.
    """
    least, features = request.minimum_count, options.features
    if len(features) + request.quantity > MAX_COLUMNS:
        raise DataProblem(
            f"{table.name}: {len(features)} columns, statistics are of {MAX_COLUMNS} at most; name them by features"
        )
    if len(records) < least:
        return StatisticsResult(0, least)
    columns = {}
    for name in features:
        column = _column(table, name, records)
        if any(isinstance(cell, list | tuple) for cell in column.cells):
            continue  # an array, such as an image
        columns[name] = _statistics(column, options, request)
    without_classes = StatisticsResult(len(records), least, columns, other_labels=len(records))
    if not options.label:
        return without_classes
    if request.quantity or options.label_scale:
        if request.quantity:
            name = request.label or options.label
            columns[name] = _quantity(_column(table, options.label, records), name, columns, request)
        return without_classes
    classes = Counter(_class(cell, table) for cell in _column(table, options.label, records).cells)
    labels, other = disclosed(classes, least)
    return StatisticsResult(len(records), least, columns, labels, other)


def disclosed(
    counts: Mapping[str, int], least: int, most: int = MAX_CATEGORIES
) -> tuple[dict[str, int], int]:
    """The cells of a partition that may be reported, and how many rows the others have: 0 or at least `least`."""
    ordered = sorted(((count, name) for name, count in counts.items()), key=lambda cell: (-cell[0], cell[1]))
    shown = [
        (name, count)
        for count, name in ordered
        if count >= least and len(name) <= LONGEST_TEXT and is_text(name)
    ][:most]
    hidden = sum(counts.values()) - sum(count for _, count in shown)
    while shown and 0 < hidden < least:
        hidden += shown.pop()[1]
    return dict(shown), hidden


def pooled(results: Iterable[StatisticsResult]) -> StatisticsResult:
    """The statistics of all sites together. Of numbers they equal those of the pooled rows; of categories and classes,
    they are lower bounds, and `other` holds the rest.

    A column that is of numbers at some sites and of categories at others is what it is at most of them.
    """
    listed = [result for result in results if result.rows]
    names = list(dict.fromkeys(name for result in listed for name in result.columns))
    return StatisticsResult(
        rows=sum(result.rows for result in listed),
        minimum_count=min((result.minimum_count for result in listed), default=0),
        columns={
            name: _pooled_column([each.columns[name] for each in listed if name in each.columns])
            for name in names
        },
        labels=_sums(result.labels for result in listed),
        other_labels=sum(result.other_labels for result in listed),
    )


def moments(statistics: StatisticsResult) -> dict[str, Moments]:
    """Count, mean and deviation of each column of numbers that is reported."""
    return {
        name: (column.count, column.mean, deviation(column))
        for name, column in statistics.columns.items()
        if column.mean is not None
    }


def deviation(column: ColumnStatistics) -> float:
    """Standard deviation, over the count."""
    return math.sqrt((column.squares or 0.0) / column.count) if column.count else 0.0


def bin_edges(statistics: StatisticsResult, bins: int) -> dict[str, tuple[float, ...]]:
    """Edges between `bins` bins of equal width from the low to the high bound of each column of numbers that varies."""
    edges = {}
    for name, column in statistics.columns.items():
        if column.low is not None and column.high is not None and column.low < column.high:
            inner = np.linspace(column.low, column.high, bins + 1)[1:-1].tolist()
            edges[name] = tuple(dict.fromkeys(inner))
    return edges


def _statistics(column: Column, options: TableOptions, request: StatisticsRequest) -> ColumnStatistics:
    is_date = column.name in options.dates or (column.name not in options.categories and _holds_dates(column))
    if is_date:
        dates = replace(options, dates=(column.name,), categories={}, standardise="local")
        values = feature(column, dates)[:, 0]
    elif column.name in options.categories or _has_text(column):
        spelled = folded if column.name in options.fold else str.strip
        texts = Counter(EMPTY if cell is None else spelled(str(cell)) for cell in column.cells)
        categories, other = disclosed(texts, request.minimum_count)
        return ColumnStatistics("category", len(column.cells), categories=categories, other=other)
    else:
        values = numbers(column.cells, column.table.decimal_comma)
    return replace(_of_numbers(column, values, request.edges.get(column.name), request), date=is_date)


def _quantity(
    label: Column, name: str, others: Mapping[str, ColumnStatistics], request: StatisticsRequest
) -> ColumnStatistics:
    """Statistics of the label's numbers, to be reported as `name`."""
    if name in others:
        raise DataProblem(
            f"{label.table.name}: the label is {label.name!r} here, and column {name!r}, the label at other devices, an input; exclude it"
        )
    values = quantities(label.cells, label.place, label.table.decimal_comma)
    return _of_numbers(label, values, request.edges.get(name), request)


def _holds_dates(column: Column) -> bool:
    """Whether the cells are dates and gaps alone, as a simulation finds it."""
    present = [cell for cell in column.cells if not is_missing(cell)]
    return bool(present) and all(
        not isinstance(cell, list | tuple)
        and number(cell, column.table.decimal_comma) is None
        and date_number(cell) is not None
        for cell in present
    )


def _has_text(column: Column) -> bool:
    """Whether a cell is neither a number nor a gap."""
    gaps = np.flatnonzero(np.isnan(numbers(column.cells, column.table.decimal_comma))).tolist()
    return any(not is_missing(column.cells[row]) for row in gaps)


def _of_numbers(
    column: Column, cells: npt.NDArray[np.float64], edges: Sequence[float] | None, request: StatisticsRequest
) -> ColumnStatistics:
    """Statistics of the numbers in the cells of a column; NaN are gaps."""
    too_large = np.flatnonzero(np.abs(cells) > LARGEST)
    if len(too_large):
        raise column.problem(int(too_large[0]), f"is too large; expected at most {LARGEST:g}")
    values, least = cells[~np.isnan(cells)], request.minimum_count
    if len(values) < least:
        return ColumnStatistics("number", 0)
    mean = float(values.mean())
    low = high = None
    if len(values) >= 2 * least:
        ordered = np.sort(values)
        # Halfway to the next one, because the k-th number itself is one row's.
        low = float(ordered[least - 1 : least + 1].mean())
        high = float(ordered[-least - 1 : len(ordered) - least + 1].mean())
    return ColumnStatistics(
        "number",
        len(values),
        mean=mean,
        squares=float(((values - mean) ** 2).sum()),
        low=low,
        high=high,
        histogram=() if edges is None else _histogram(values, edges, least),
    )


def _histogram(values: npt.NDArray[np.float64], edges: Sequence[float], least: int) -> tuple[int, ...]:
    counts = np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1)
    by_bin = {str(place): int(count) for place, count in enumerate(counts) if count}
    shown, _ = disclosed(by_bin, least)
    return tuple(shown.get(str(place), 0) for place in range(len(counts)))


def _pooled_column(columns: Sequence[ColumnStatistics]) -> ColumnStatistics:
    ((kind, _),) = Counter(column.kind for column in columns).most_common(1)
    alike = [column for column in columns if column.kind == kind and column.count]
    if not alike:
        return ColumnStatistics(kind, 0)
    merged = reduce(_merged, alike)
    if kind == "category":
        other = sum(column.other for column in alike)
        return replace(merged, categories=_sums(column.categories for column in alike), other=other)
    lows = [column.low for column in alike if column.low is not None]
    highs = [column.high for column in alike if column.high is not None]
    binned = [column.histogram for column in alike if column.histogram]
    return replace(
        merged,
        low=min(lows, default=None),
        high=max(highs, default=None),
        histogram=tuple(sum(counts) for counts in zip(*binned, strict=True)),
    )


def _merged(first: ColumnStatistics, second: ColumnStatistics) -> ColumnStatistics:
    """Count, mean and squared deviations of both together."""
    count = first.count + second.count
    if first.mean is None or second.mean is None:
        return replace(first, count=count)
    apart, share = second.mean - first.mean, second.count / count
    between = apart * apart * first.count * share
    squares = (first.squares or 0.0) + (second.squares or 0.0) + between
    return replace(first, count=count, mean=first.mean + apart * share, squares=squares)


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items(), key=lambda cell: (-cell[1], cell[0])))


def _column(table: Table, name: str, records: Sequence[Record]) -> Column:
    place = table.index(name, "statistics")
    return Column(table, name, [cells[place] for _, cells in records], [at for at, _ in records])


def _class(cell: object, table: Table) -> str:
    """The name of a label's class, so that 1 and 1.0 are one."""
    text = EMPTY if cell is None else str(cell).strip()
    value = number(text, table.decimal_comma)
    return text if value is None else class_name(value)


def _held_out_rows(
    table: Table,
    records: Sequence[Record],
    features: Sequence[str],
    options: TableOptions,
    *,
    is_quantity: bool,
) -> npt.NDArray[np.bool_]:
    """[N]: the rows that the device does not train on, chosen as for training.

    Where the options do not name the categories or classes of a column of texts, its own texts in order stand for them.
    """
    if options.test_path is not None:
        return np.zeros(len(records), np.bool_)
    if options.split:
        return held_out(_column(table, options.split, records))
    share = HELD_OUT if options.held_out is None else options.held_out
    open_features = [
        name for name in features if name not in options.categories and name not in options.dates
    ]
    texts = {**_own_texts(table, records, open_features), **options.categories}
    few = tuple(
        name for name in features if name in options.categories or len(texts.get(name, ())) <= MAX_CATEGORIES
    )
    if not few:
        return np.zeros(len(records), np.bool_)
    chosen = replace(
        options,
        features=few,
        categories={name: names for name, names in texts.items() if name in few},
        classes=() if is_quantity else options.classes or _own_classes(table, records, options.label),
        label_scale=(0.0, 1.0) if is_quantity else (),  # rows are chosen by labels in their own unit
        standardise=options.standardise if options.dtype == "int32" else "local",
    )
    rows = read_rows(table, chosen, labelled=bool(options.label))
    return held_out_rows(rows.x, rows.y, share)


def _own_texts(
    table: Table, records: Sequence[Record], features: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """The texts of each column that holds some, in order."""
    found = {}
    for name in features:
        column = _column(table, name, records)
        if any(isinstance(cell, list | tuple) for cell in column.cells) or not _has_text(column):
            continue
        texts = {str(cell).strip() for cell in column.cells if cell is not None}
        found[name] = tuple(sorted(texts - {EMPTY}))
    return found


def _own_classes(table: Table, records: Sequence[Record], label: str) -> tuple[str, ...]:
    if not label:
        return ()
    names = {_class(cell, table) for cell in _column(table, label, records).cells}
    return () if all(name.isdecimal() for name in names) else tuple(sorted(names - {EMPTY}))
