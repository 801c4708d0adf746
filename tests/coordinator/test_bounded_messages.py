"""No text or list of a device's message is longer than it can need, whatever the field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.wire import device as wire
from edge_client.wire.strict import InvalidDocument, parse_message, require_bounded

MESSAGES: dict[type, dict[str, Any]] = {
    wire.EnrolRequest: {"token": "t", "csr": "c", "name": "n", "serial_number": "s"},
    wire.RenewRequest: {"certificate": "c", "csr": "c", "proof": "p"},
    wire.CheckIn: {
        "wire": "1.3",
        "software": "1.0",
        "runtimes": {"torch": "2.0"},
        "memory_bytes": 1,
        "device_class": "gateway",
        "labels": {"hall": "7"},
        "datasets": {"digits": 1},
        "models": ["cnn"],
        "ineligible": ["on battery"],
        "opted_out": ["a run"],
        "working_on": "task",
        "release_runtime": "litert",
        "releases": [
            {"rollout": "r", "model": "m", "version": 1, "standing": "active", "code": "c", "words": "w"}
        ],
    },
    wire.UploadStart: {"size_bytes": 1, "sha256": "ab", "decoded_bytes": 1},
    wire.EvaluationResult: {
        "base": "b",
        "rows": 1,
        "labels": 1,
        "correct": 1,
        "loss_sum": 0.5,
        "site": "s",
        "quantity": {"absolute_sum": 0.5, "label_sum": 0.1, "label_square_sum": 1.0},
        "scores": {
            "confusion": [[1]],
            "positives": [[1]],
            "negatives": [[1]],
            "calibration_rows": [1],
            "calibration_correct": [1],
            "calibration_sums": [0.5],
            "squared_sum": 0.5,
        },
    },
    wire.Decline: {"code": "failed", "words": "w"},
}
LONGEST = 8192


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a document there is text, a list or a table."""
    if isinstance(value, (str, list, dict)):
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def enlarged(value: Any, path: tuple[Any, ...], at: Any) -> Any:
    """The document with far more at this place."""
    if path:
        return (
            {**value, path[0]: enlarged(value[path[0]], path[1:], at)}
            if isinstance(value, dict)
            else [enlarged(value[0], path[1:], at)]
        )
    if isinstance(value, str):
        return "é\u202e" * 50_000
    if isinstance(value, list):
        return value * 10_000
    return value | {f"key {number}": next(iter(value.values())) for number in range(10_000)}


CASES = [(kind, path) for kind, document in MESSAGES.items() for path in places(document) if path]


@pytest.mark.parametrize(("kind", "path"), CASES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_texts_that_are_too_long_are_refused_by_name_or_cut(kind: type, path: tuple[Any, ...]) -> None:
    message = read(kind, MESSAGES[kind])
    assert largest(message) == largest(require_bounded(message, kind.__name__))
    try:
        result = require_bounded(read(kind, enlarged(MESSAGES[kind], path, path)), kind.__name__)
    except InvalidDocument as error:
        assert len(str(error)) < 500
        assert str(path[0]) in str(error)
    else:
        assert largest(result) <= 500
        assert "\u202e" not in repr(result)


def test_every_message_of_a_device_is_tried() -> None:
    tried = {(kind, path[0]) for kind, path in CASES}
    for kind in MESSAGES:
        hints = get_type_hints(kind)
        for field in fields(kind):
            if holds_text(hints[field.name]):
                assert (kind, field.name) in tried, (kind, field.name)


def holds_text(kind: Any) -> bool:
    if is_dataclass(kind):
        return True
    parts = [part for part in get_args(kind) if part is not type(None)]
    return kind is str or get_origin(kind) in (tuple, Mapping) or any(holds_text(part) for part in parts)


def read(kind: type, document: Any) -> Any:
    try:
        return parse_message(kind, document, kind.__name__)
    except InvalidDocument:  # of a literal: it takes no other text
        return parse_message(kind, MESSAGES[kind], kind.__name__)


def largest(value: Any) -> int:
    """Characters of the longest text, or entries of the longest list."""
    if is_dataclass(value) and not isinstance(value, type):
        return max(largest(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return max([len(value), *map(largest, value), *map(largest, value.values())], default=0)
    return max([len(value), *map(largest, value)], default=0) if isinstance(value, tuple) else 0


@given(st.text(max_size=200), st.text(max_size=200))
def test_values_that_fit_are_left_unchanged(key: str, value: str) -> None:
    labels = {key: value}
    assert require_bounded(labels, "labels") == labels
