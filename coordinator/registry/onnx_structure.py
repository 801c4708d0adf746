"""Checks that a file is an ONNX model by its structure alone, and finds its external weight files.

The registry stores files from anybody with its token without opening them. So that it does not store arbitrary files as
`onnx`, this module walks the protobuf messages of a model: numbers, wire types and lengths of fields, and the names of
external files. It decodes nothing else, uses no parser library, and works for any size. `fedloop model import` checks the
rest with `onnx.checker`. https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from coordinator.errors import UserError
from coordinator.registry.contents import Contents

MAX_FIELDS = 500_000
"""Fields visited at most, a few seconds of work. A model of a thousand layers has about ten thousand."""
_LONGEST_NAME = 1000

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}

# Message -> field number -> the message in that field; other fields are skipped.
_WITHIN = {
    "model": {7: "graph", 8: "opset", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 12: "output", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "opset": {},
    "output": {},
}
_IR_VERSION, _DATA_LOCATION, _KEY, _VALUE = 1, 14, 1, 2
_EXTERNAL = 1


class _Field(NamedTuple):
    """A field of a message: its wire type, and its value or the start and end of its bytes."""

    number: int
    wire: int
    value: int
    end: int


def external_files(contents: Contents, path: str) -> frozenset[str]:
    """The external weight files that the ONNX model at `path` names, relative to it.

    Raises:
        UserError: `missing_file`, or `bad_file`: it is not an ONNX model.
    """
    if path not in contents:
        raise UserError(f"{path} is missing", "missing_file")
    try:
        with (
            contents[path].place.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return _Walk(content).external_files()
    except (_NotOnnx, ValueError) as error:  # an empty file cannot be mapped
        raise UserError(f"{path} is not an ONNX file: {error}", "bad_file") from None


class _NotOnnx(Exception):
    """The reason, without any of the content."""


class _Walk:
    """One walk through the messages of a model."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._left = MAX_FIELDS

    def external_files(self) -> frozenset[str]:
        files: set[str] = set()
        seen: Counter[str] = Counter()
        waiting = [("model", 0, len(self._content))]
        while waiting:
            message, start, end = waiting.pop()
            seen[message] += 1
            is_external, entries = False, []
            for field in self._fields(start, end):
                within = _WITHIN[message].get(field.number)
                if within is not None and field.wire != _BYTES:
                    raise _NotOnnx(f"field {field.number} of a {message} is not a message")
                if within == "entry":
                    entries.append(field)
                elif within is not None:
                    waiting.append((within, field.value, field.end))
                elif message == "tensor" and field.number == _DATA_LOCATION:
                    is_external = field.value == _EXTERNAL
                elif message == "model" and field.number == _IR_VERSION and field.wire == _VARINT:
                    seen["version"] += field.value > 0
            if is_external:
                files.add(self._location(entries))
        for part in ("version", "opset", "graph", "output"):
            if not seen[part]:
                raise _NotOnnx(f"it has no {part}")
        return frozenset(files)

    def _location(self, entries: Sequence[_Field]) -> str:
        for entry in entries:
            pair = {field.number: field for field in self._fields(entry.value, entry.end)}
            if {_KEY, _VALUE} <= pair.keys() and self._text(pair[_KEY]) == "location":
                return self._text(pair[_VALUE])
        raise _NotOnnx("a tensor is in an external file without a name")

    def _text(self, field: _Field) -> str:
        if field.wire != _BYTES or field.end - field.value > _LONGEST_NAME:
            raise _NotOnnx("the name of an external file is invalid")
        return self._content[field.value : field.end].decode("utf-8", "replace")

    def _fields(self, start: int, end: int) -> Iterator[_Field]:
        place = start
        while place < end:
            self._left -= 1
            if self._left < 0:
                raise _NotOnnx(f"it has more than {MAX_FIELDS:,} fields")
            key, place = self._varint(place, end)
            number, wire = key >> 3, key & 7
            if wire == _VARINT:
                value, place = self._varint(place, end)
                yield _Field(number, wire, value, place)
                continue
            if wire == _BYTES:
                length, place = self._varint(place, end)
            elif wire in _FIXED:
                length = _FIXED[wire]
            else:
                raise _NotOnnx("it is not a protobuf message")
            if not number or place + length > end:
                raise _NotOnnx("it is not a protobuf message, or truncated")
            yield _Field(number, wire, place, place + length)
            place += length

    def _varint(self, place: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while place < end and shift < 64:
            byte = self._content[place]
            value |= (byte & 0x7F) << shift
            place, shift = place + 1, shift + 7
            if byte < 0x80:
                return value, place
        raise _NotOnnx("it is not a protobuf message, or truncated")
