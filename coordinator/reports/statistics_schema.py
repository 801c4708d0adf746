"""The data schema of a table that only devices hold, made from their statistics alone.

It names what the statistics name: a text or class only if some device has the minimum count of rows of it. Texts that no device
reports share one value of their column, so that rows with them can be trained on and predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.errors import UserError
from coordinator.experiments.defaults import minimum_count
from coordinator.experiments.schema import Categories, Data
from coordinator.fleets.robust_scale import Scale, scale_of
from edge_client.data.cells import folded, number
from edge_client.wire.schema import ColumnSchema, DataSchema
from edge_client.wire.statistics import EMPTY, ColumnStatistics, StatisticsResult
from models.datasets.columns import in_order

_KINDS = {"number": "numbers", "date": "dates", "category": "texts"}


def not_inputs(data: Data) -> tuple[str, ...]:
    """Columns that are no input: `data.exclude`, and the site and split, by default the columns of these names."""
    roles = ("site" if data.site is None else data.site, "split" if data.split is None else data.split)
    given = {data.label, *(data.features or ())}
    names = [name for name in (*(data.exclude or ()), *roles) if name and name not in given]
    return tuple(dict.fromkeys(names))


def make_schema(
    data: Data, results: Mapping[str, StatisticsResult], weight_cap: float
) -> tuple[DataSchema, list[str]]:
    """The schema, and notices. `results`: by the name of the device.

    Raises:
        UserError: listing every contradiction between devices, and what the schema needs and no device reports.
    """
    useful = {device: result for device, result in results.items() if result.rows}
    is_quantity = data.task == "regression"
    reported = dict.fromkeys(name for result in useful.values() for name in result.columns)
    names = [name for name in reported if not (is_quantity and name == data.label)]
    scale = scale_of(useful, weight_cap)
    problems = [
        *(problem for name in names if (problem := _column_problem(name, useful))),
        *(
            _quantity_problems(data.label, useful, scale)
            if is_quantity
            else _label_problems(data.label, useful)
        ),
    ]
    columns = [_column(name, data, useful, scale) for name in names if not problems]
    used = [column for column in columns if column is not None]
    if not problems and not used:
        problems.append(
            "no column is left for an input; every column has fewer values than the minimum count"
        )
    if data.scale == "fixed" and (
        unfixed := [
            column.name
            for column in used
            if column.kind != "category" and column.name not in (data.fixed or {})
        ]
    ):
        problems.append(
            f'data.scale = "fixed" needs mean and deviation in data.fixed of: {", ".join(unfixed)}'
        )
    if problems:
        raise UserError("\n  ".join(["no schema can be made from these statistics:", *problems]), "no_schema")
    unused = tuple(name for name in names if name not in {column.name for column in used})
    schema = DataSchema(
        kind="table",
        input_shape=(sum(column.width for column in used),),
        input_dtype="float32",
        classes=() if is_quantity else tuple(in_order(set(_classes(useful)))),
        columns=tuple(used),
        label=data.label,
        label_scale=scale.moments[data.label][1:] if is_quantity else None,
        ignored=(*not_inputs(data), *unused),
        scale=data.scale or "federated",
        minimum_count=minimum_count(data),
    )
    notices = [*_notices(unused), *([] if is_quantity else _withheld_classes(data.label, useful))]
    return schema, [*scale.notices, *notices]


@dataclass(frozen=True)
class _Kinds:
    """What a column holds, by device, of those that report any value; and the devices that lack it."""

    of: dict[str, str]
    lacking: list[str]


def _kinds(name: str, results: Mapping[str, StatisticsResult]) -> _Kinds:
    found = {device: result.columns[name] for device, result in results.items() if name in result.columns}
    return _Kinds(
        {
            device: "date" if column.date else column.kind
            for device, column in found.items()
            if column.count and column.categories.get(EMPTY) != column.count
        },
        [device for device in results if device not in found],
    )


def _column_problem(name: str, results: Mapping[str, StatisticsResult]) -> str | None:
    kinds = _kinds(name, results)
    if kinds.lacking:
        return (
            f"column {name!r} is no input at: {_listed(kinds.lacking)}; add it there, or leave it out: "
            f"--set 'data.exclude=[\"{name}\"]'"
        )
    if len(set(kinds.of.values())) < 2:
        return None
    places = "; ".join(
        f"of {words} at {_listed([device for device, each in kinds.of.items() if each == kind])}"
        for kind, words in _KINDS.items()
        if kind in kinds.of.values()
    )
    return (
        f"column {name!r} is {places}; correct the tables, or leave it out: --set 'data.exclude=[\"{name}\"]'"
    )


def _label_problems(label: str, results: Mapping[str, StatisticsResult]) -> list[str]:
    spelled: dict[str, dict[str, list[str]]] = {}
    for device, result in results.items():
        for name in result.labels:
            spelled.setdefault(folded(name), {}).setdefault(name, []).append(device)
    problems = [
        "classes differ in spelling: "
        + "; ".join(f"{name!r} at {_listed(devices)}" for name, devices in spellings.items())
        + "; correct the tables"
        for spellings in spelled.values()
        if len(spellings) > 1
    ]
    by_kind: dict[bool, list[str]] = {}
    for device, result in results.items():
        if result.labels:
            by_kind.setdefault(all(number(name) is not None for name in result.labels), []).append(device)
    if len(by_kind) > 1:
        problems.append(
            f"classes are numbers at {_listed(by_kind[True])}, and texts at {_listed(by_kind[False])}; correct the tables"
        )
    named = len(_classes(results))
    if named < 2:
        problems.append(
            f"the label {label!r} has {named} classes with the minimum count of rows, expected two or more; data.label names "
            'its column; if it is a quantity, set data.task = "regression"'
        )
    return problems


def _quantity_problems(label: str, results: Mapping[str, StatisticsResult], scale: Scale) -> list[str]:
    lacking = [device for device, result in results.items() if label not in result.columns]
    if lacking:
        return [
            f"the label {label!r} is not reported as a quantity by: {_listed(lacking)}; data.label names its column, or the option "
            "label of a device; devices with earlier software report classes only"
        ]
    _, mean, spread = scale.moments.get(label, (0, 0.0, 0.0))
    if not spread > 0:
        return [f"every label of {label!r} is {mean:g}; there is nothing to predict"]
    return []


def _classes(results: Mapping[str, StatisticsResult]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for result in results.values():
        counts.update({name: rows for name, rows in result.labels.items() if name != EMPTY})
    return counts


def _column(
    name: str, data: Data, results: Mapping[str, StatisticsResult], scale: Scale
) -> ColumnSchema | None:
    """The column; None if no device reports a value of it."""
    kinds = set(_kinds(name, results).of.values())
    if not kinds:
        return None
    (kind,) = kinds
    if kind == "category":
        return _category(
            name, data.categories or Categories(), [each.columns[name] for each in results.values()]
        )
    column = ColumnSchema(name, "date" if kind == "date" else "number", unit=(data.units or {}).get(name, ""))
    if data.scale == "fixed":
        mean, deviation = (data.fixed or {}).get(name, (0.0, 1.0))
    elif data.scale in ("site", "none"):
        return column
    else:
        _, mean, deviation = scale.moments[name]
    return replace(column, mean=mean, deviation=deviation)


def _category(name: str, rules: Categories, columns: list[ColumnStatistics]) -> ColumnSchema | None:
    counts: Counter[str] = Counter()
    for column in columns:
        for text, rows in column.categories.items():
            counts[folded(text) if rules.fold else text] += rows
    counts.pop(EMPTY, None)
    frequent = sorted(counts.items(), key=lambda cell: (-cell[1], cell[0]))[: rules.max]
    if not frequent:
        return None
    texts = in_order({text for text, _ in frequent})
    return ColumnSchema(name, "category", categories=tuple(texts), other=True, fold=rules.fold)


def _notices(unused: tuple[str, ...]) -> list[str]:
    if not unused:
        return []
    return [f"columns without a value that any device reports are no inputs: {', '.join(unused)}"]


def _withheld_classes(label: str, results: Mapping[str, StatisticsResult]) -> list[str]:
    notices = []
    if withheld := {device: each.other_labels for device, each in results.items() if each.other_labels}:
        places = ", ".join(f"{device} ({rows:,} rows)" for device, rows in withheld.items())
        notices.append(
            f"devices withhold classes of {label!r} with few rows: {places}; a device with a class that the schema does not name "
            "declines to train: add the name to its classes"
        )
    return notices


def _listed(devices: list[str]) -> str:
    return ", ".join(devices[:10]) + (f" and {len(devices) - 10} others" if len(devices) > 10 else "")
