"""The data schema of a model: what its rows look like in their natural form, and how they become its input.

It travels with the params: in the folder of a run as `schema.json`, in the registry, in the manifest of a release, and
with the tasks of a run on devices. Whoever has the model can therefore read rows as its training did. The document has
sorted keys; its fingerprint is the SHA-256 of that text. MLflow's model signature describes columns alike; here the
fitted preprocessing is part of it.

Of images and texts it says how they become arrays (`edge_client.wire.preprocessing`); these keys are left out of the
documents of other data, which read the same as before they existed.

A schema holds no row: of a category that fewer than the experiment's `data.minimum_count` training rows have it has no
name, and of numbers only mean and standard deviation.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edge_client.wire.preprocessing import ImageSchema, TextSchema, image_checks, text_checks
from edge_client.wire.strict import InvalidDocument, parse

FORMAT = 1

SCHEMA_NAME = "schema.json"
"""Its name as a file."""

_LATER = ("image", "text")
_LATER_OF_TEXT = ("merges", "end", "stops", "tokenizer")

Scale = Literal["site", "federated", "fixed", "none"]
"""Whose mean and deviation numbers are scaled by: each site's own, all sites', given ones; or they stay as they are."""


@dataclass(frozen=True)
class ColumnSchema:
    """One column of the input.

    Attributes:
        name: in the header of a table.
        kind: a date is the number of days since 1970-01-01; a category makes one value for each text, 0 or 1.
        unit: of the numbers, for people.
        categories: texts in the order of their values; an empty cell is none of them.
        other: whether a last value stands for every text that is not listed.
        fold: whether upper and lower case, and blanks, make no difference.
        mean, deviation: of the training rows, > 0 or the column is constant; None where numbers are not scaled so.
        standardised: the numbers arrive standardised, so that only gaps are filled (scale `site`).
    """

    name: str
    kind: Literal["number", "category", "date"] = "number"
    unit: str = ""
    categories: tuple[str, ...] = ()
    other: bool = False
    fold: bool = False
    mean: float | None = None
    deviation: float | None = None
    standardised: bool = False

    @property
    def width(self) -> int:
        """How many values of an example it makes."""
        return len(self.categories) + self.other if self.kind == "category" else 1


@dataclass(frozen=True)
class DataSchema:
    """See the module's docstring.

    Attributes:
        kind: `table`: named columns; `image`; `text`; `array`: numbers or token ids in the input's own shape.
        input_shape: of one example.
        classes: their names in the order of their indices; empty: the indices themselves.
        columns: of a table, in the order of the input.
        label: the label's column.
        label_scale: mean and deviation of a label that is a quantity, by which the model's output is scaled back; None: classes.
        ignored: columns that are no input, such as the site; a table may have them.
        scale: of the numbers of a table; gaps are filled with the mean, and refused with `none`.
        encoding: of text files; empty: UTF-8 or UTF-16 by their first bytes.
        minimum_count: training rows from which a category, or a token of private text, is named.
        image: of kind `image`; text: of kind `text`; None of others.
    """

    kind: Literal["table", "array", "image", "text"]
    input_shape: tuple[int, ...]
    input_dtype: Literal["float32", "int32"]
    classes: tuple[str, ...] = ()
    columns: tuple[ColumnSchema, ...] = ()
    label: str = ""
    label_scale: tuple[float, ...] | None = None
    ignored: tuple[str, ...] = ()
    scale: Scale = "none"
    encoding: str = ""
    minimum_count: int = 1
    image: ImageSchema | None = None
    text: TextSchema | None = None
    format: int = FORMAT

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the document."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(self.to_document(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    def to_document(self) -> dict[str, Any]:
        """What `to_json` writes: without what older software does not know where it says nothing, `image`, `text` and some of its keys."""
        document = {
            name: value for name, value in asdict(self).items() if name not in _LATER or value is not None
        }
        for name in _LATER_OF_TEXT if self.text is not None else ():
            if document["text"][name] in (None, (), ""):
                del document["text"][name]
        return document

    def class_name(self, index: int) -> str:
        """The name of a class; its index where classes have no names."""
        return self.classes[index] if index < len(self.classes) else str(index)


def from_json(text: str | bytes, place: str = SCHEMA_NAME) -> DataSchema:
    """The schema in a document. `place` begins every error.

    Raises:
        InvalidDocument: not JSON, another format, a key missing, unknown or of another type, or a contradiction.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidDocument(f"{place} is not JSON: {error}") from None
    return from_document(document, place)


def from_document(document: Any, place: str = SCHEMA_NAME) -> DataSchema:
    """As `from_json`, from a parsed document."""
    version = document.get("format") if isinstance(document, Mapping) else None
    if version != FORMAT:
        raise InvalidDocument(f"{place}: format is {version!r}, this software reads format {FORMAT}")
    schema = parse(DataSchema, document, place)
    for holds, problem in checks(schema):
        if not holds:
            raise InvalidDocument(f"{place}: {problem}")
    return schema


def checks(schema: DataSchema) -> Iterable[tuple[bool, str]]:
    """What the types of its values do not express: a condition, and what is wrong if it is false."""
    names = [column.name for column in schema.columns]
    yield len(set(names)) == len(names), "a column is there twice"
    scale = schema.label_scale or (0.0, 1.0)
    yield len(scale) == 2 and scale[1] > 0, "label_scale is not mean and deviation > 0"
    yield (
        schema.label_scale is None or not schema.classes,
        "label_scale is of a quantity, which has no classes",
    )
    yield len(set(schema.classes)) == len(schema.classes), "a class is there twice"
    yield all(extent > 0 for extent in schema.input_shape), "input_shape has an extent below 1"
    yield (schema.image is not None) == (schema.kind == "image"), "image is of data of kind image"
    yield (schema.text is not None) == (schema.kind == "text"), "text is of data of kind text"
    if schema.image is not None:
        yield schema.input_dtype == "float32", "an image's input_dtype is float32"
        yield from image_checks(schema.image, schema.input_shape)
    if schema.text is not None:
        yield schema.input_dtype == "int32", "a text's input_dtype is int32"
        yield from text_checks(schema.text, schema.input_shape)
    if schema.kind == "table":
        width = sum(column.width for column in schema.columns)
        yield math.prod(schema.input_shape) == width, f"its columns make {width} values of an example"
        yield schema.input_dtype == "float32", "a table's input_dtype is float32"
    for column in schema.columns:
        given = (column.mean is None) + (column.deviation is None)
        scaled = schema.scale in ("federated", "fixed") and column.kind != "category"
        yield given == (0 if scaled else 2), f"column {column.name!r}: mean and deviation do not fit scale"
        yield (column.deviation or 0) >= 0, f"column {column.name!r}: deviation is negative"
        yield len(set(column.categories)) == len(column.categories), f"column {column.name!r}: a text twice"
        texts = bool(column.categories) or column.other
        yield column.kind == "category" or not texts, f"column {column.name!r}: only a category has texts"
