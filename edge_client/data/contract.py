"""A model's data schema applied to a device's data set before it trains.

The schema says what the columns are. A device's configuration says where its rows lie, and may repeat what the schema says;
where the two contradict each other the data set is refused, because the model would be trained on something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from edge_client.data.connector import DataConfig, DataProblem
from edge_client.data.options import TableOptions
from edge_client.data.quoting import listed
from edge_client.wire.schema import DataSchema

TABLE_KINDS = ("csv", "parquet", "sqlite")

TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
"""Of files that are read as a table where a model takes one."""

_ARRAYS = "numpy"
_IMAGES = "images"

_SLACK = 0.01
"""Share of the range of pixels that resized or augmented images may leave it by."""

_NOT_FOR_A_SCHEMA = ("scale", "shape", "dtype")
"""Options of single values, which the schema's columns leave no room for."""

_DECIDED = (
    *("label", "label_scale", "features", "exclude", "classes", "categories", "other", "fold", "dates"),
    *("standardised", "scaling", "standardise", "closed"),
)


def with_schema(config: DataConfig, schema: DataSchema) -> DataConfig:
    """The data set's configuration with everything that the schema says.

    Raises:
        DataProblem: an option contradicts the schema.
    """
    given = dict(config.options)
    if schema.kind != "table" or config.kind not in TABLE_KINDS:
        return _as_images(_with_label_scale(config, schema), schema)
    if surplus := [name for name in _NOT_FOR_A_SCHEMA if name in given]:
        raise DataProblem(
            f"{config.kind} data: option {surplus[0]} does not fit the model's schema, which says how every column is read; remove it"
        )
    decided = _schema_options(schema, config.kind)
    decided["exclude"] = [*decided["exclude"], *given.pop("exclude", ())]
    if "label" in given:
        del decided["label"]  # a device's column may have another name
    for name, value in decided.items():
        own = given.get(name, value)
        same = sorted(own) == sorted(value) if name == "features" else _plain(own) == _plain(value)
        if not same:
            raise DataProblem(
                f"{config.kind} data: option {name} says {shortened(own)}, the model's schema {shortened(value)}; remove the option, the "
                "schema comes with the task"
            )
    return replace(config, options=given | decided)


def _as_images(config: DataConfig, schema: DataSchema) -> DataConfig:
    """The configuration of arrays or images, which has to name the model's classes; a folder of images is read as the model's are."""
    own = _plain(config.options.get("classes", ()))
    if isinstance(own, list) and own and schema.classes and own != list(schema.classes):
        raise DataProblem(
            f"{config.kind} data: option classes says {listed(own)}, the model's schema {listed(schema.classes)}; name the same "
            "classes in the same order"
        )
    if config.kind != _IMAGES or schema.kind == "array":
        return config
    if schema.image is None:
        raise DataProblem(f"{config.kind} data: the model was trained on data of kind {schema.kind}")
    if schema.image.layout == "HWC" or schema.image.mean:
        raise DataProblem(
            f"{config.kind} data: the model takes images of layout {schema.image.layout}"
            f"{', normalised by channel' if schema.image.mean else ''}, which a folder is not read as; give them as kind {_ARRAYS!r}"
        )
    # 255 of a file stands for the model's largest pixel.
    scale = schema.image.maximum / (255 * schema.image.divisor)
    decided: dict[str, Any] = {
        "shape": list(schema.input_shape),
        "scale": scale,
        **({"classes": list(schema.classes)} if schema.classes else {}),
    }
    for name, value in decided.items():
        given = _plain(config.options.get(name, value))
        if given != value and not (name == "scale" and math.isclose(given, scale, rel_tol=1e-6)):
            raise DataProblem(
                f"{config.kind} data: option {name} says {given}, the model's schema {value}; remove the option, the schema "
                "comes with the task"
            )
    return replace(config, options={**config.options, **decided})


def require_inputs(x: npt.NDArray[Any], schema: DataSchema) -> None:
    """Requires that examples can be images or texts as the model was trained on them: pixels in their range, ids of its tokens.

    Raises:
        DataProblem: some cannot.
    """
    if schema.image is not None and x.size:
        image = schema.image
        means, deviations = image.mean or (0.0,), image.deviation or (1.0,)
        ends = (0.0, image.maximum / image.divisor)
        bounds = [
            (end - mean) / spread for mean, spread in zip(means, deviations, strict=True) for end in ends
        ]
        least, most = min(bounds), max(bounds)
        slack = _SLACK * (most - least)
        low, high = float(x.min()), float(x.max())
        if low < least - slack or high > most + slack:
            raise DataProblem(
                f"the local data has pixels from {low:g} to {high:g}, the model's images from {least:g} to {most:g}; see the option "
                "`scale` in this device's configuration"
            )
    if schema.text is not None and x.size:
        text = schema.text
        most_id = max(text.first + text.tokens - 1, text.padding, text.unknown or 0, text.end or 0)
        if x.min() < 0 or x.max() > most_id:
            raise DataProblem(
                f"the local data has token ids from {x.min()} to {x.max()}, the model's vocabulary of {text.unit} 0 to {most_id}; encode "
                "the texts with the model's own vocabulary"
            )


def table_at(path: Path, schema: DataSchema, encoding: str | None = None) -> DataConfig:
    """The configuration that reads the table in a file as the schema says. `encoding`: of its text, if the user gave it."""
    kind = table_kind(path)
    return with_schema(
        DataConfig(kind, path, {"encoding": encoding} if encoding and kind == "csv" else {}), schema
    )


def table_kind(path: Path) -> str:
    """The kind of data that a table in a file is, by the file's name."""
    return "parquet" if path.suffix.lower() == ".parquet" else "csv"


def _with_label_scale(config: DataConfig, schema: DataSchema) -> DataConfig:
    """The configuration of arrays, whose labels are scaled as the schema says if they are quantities."""
    if schema.label_scale is None:
        return config
    scale = list(schema.label_scale)
    if config.kind != _ARRAYS:
        raise DataProblem(
            f"{config.kind} data: its labels are classes, and the model predicts a quantity; expected data of kind "
            f"{', '.join((*TABLE_KINDS, _ARRAYS))}"
        )
    own = _plain(config.options.get("label_scale", scale))
    if own != scale:
        raise DataProblem(
            f"{config.kind} data: option label_scale says {own}, the model's schema {scale}; remove the option, the schema "
            "comes with the task"
        )
    return replace(config, options={**config.options, "label_scale": scale})


def contradiction(schema: DataSchema, found: DataSchema) -> str | None:
    """How images, texts or classes differ from those of the model with this schema, if they do.

    Arrays say nothing of what they are, so they fit any input of their shape. Shapes are compared where a model's input is.
    """
    if "array" not in (schema.kind, found.kind) and schema.kind != found.kind:
        return f"its rows are of kind {found.kind}, and the model was trained on data of kind {schema.kind}"
    for name in ("image", "text"):
        known, own = getattr(schema, name), getattr(found, name)
        for part in fields(known) if known is not None and own is not None else ():
            if (expected := getattr(known, part.name)) != (value := getattr(own, part.name)):
                return f"{name}.{part.name} is {shortened(value)} here and {shortened(expected)} in the model's schema"
    if schema.classes and found.classes and schema.classes != found.classes:
        return f"its classes are {listed(found.classes)}; the model's are {listed(schema.classes)}, in this order"
    return None


def options_of(schema: DataSchema) -> TableOptions:
    """The options of a data set that say the same as the schema."""
    texts = [column for column in schema.columns if column.kind == "category"]
    return TableOptions(
        label=schema.label,
        features=tuple(column.name for column in schema.columns),
        exclude=schema.ignored,
        classes=schema.classes,
        label_scale=schema.label_scale or (),
        categories={column.name: column.categories for column in texts},
        other=tuple(column.name for column in texts if column.other),
        fold=tuple(column.name for column in texts if column.fold),
        dates=tuple(column.name for column in schema.columns if column.kind == "date"),
        standardised=tuple(column.name for column in schema.columns if column.standardised),
        scaling={
            column.name: (column.mean, column.deviation)
            for column in schema.columns
            if column.mean is not None and column.deviation is not None
        },
        standardise="local" if schema.scale == "site" else "none",
        closed=True,
    )


def _schema_options(schema: DataSchema, kind: str) -> dict[str, Any]:
    """The options that a schema decides, as a configuration of this kind has them."""
    options = options_of(schema)
    decided = {name: _plain(getattr(options, name)) for name in _DECIDED}
    return decided | ({"schema_encoding": schema.encoding} if schema.encoding and kind == "csv" else {})


def _plain(value: Any) -> Any:
    """Tuples as lists, so that values of a file and of Python compare."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def shortened(value: Any) -> str:
    return listed(list(map(str, value))) if isinstance(value, list | tuple | Mapping) else repr(value)
