"""Inspects untrusted ONNX files: their inputs, outputs and weights.

Weights may lie in separate files (`external_data`). These are accepted only below the file's own folder, and never
through a link. Nothing here executes the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
from google.protobuf.message import DecodeError, Message
from onnx import ModelProto, TensorProto, ValueInfoProto
from onnx.shape_inference import InferenceError

LIMIT_BYTES = 2**31 - 1
"""Limit of the file, from protobuf, and of each external one."""
MAX_VALUES = 64
"""Limit of inputs, and of outputs."""

_DTYPES = {"float": "float32", "double": "float64"}


class BadOnnx(ValueError):
    """Not an ONNX file, or not an accepted one; the message says why."""


@dataclass(frozen=True)
class OnnxFile:
    """A checked file.

    Attributes:
        external: path below the file's folder -> the file with weights there.
    """

    path: Path
    sha256: str
    model: ModelProto
    external: dict[str, Path]


def open_file(path: Path) -> OnnxFile:
    """The file at `path`, parsed and checked (`onnx.checker`, with inferred shapes). Holds the file twice in memory.

    Raises:
        BadOnnx: it is too large, invalid, or has weights outside its folder.
    """
    content = _read(path)
    model = ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError:
        raise BadOnnx("is not an ONNX file: it cannot be parsed") from None
    if not model.graph.output:
        raise BadOnnx("is not an ONNX file: it has no graph with outputs")
    external = _external(model, path.parent)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, InferenceError, RuntimeError) as error:
        raise BadOnnx(f"is not a valid ONNX file: {_first_line(error)}") from None
    return OnnxFile(path, hashlib.sha256(content).hexdigest(), model, external)


def describe(model: ModelProto) -> dict[str, Any]:
    """The model's description as JSON: `ir_version`, `opset` by domain, `producer`, `inputs`, `outputs`.

    A dimension of a shape is a number, the name of a variable dimension, or None if unknown.

    Raises:
        BadOnnx: it has more than `MAX_VALUES` inputs or outputs.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [_value(value) for value in model.graph.input if value.name not in weights]
    outputs = [_value(value) for value in model.graph.output]
    for what, values in (("inputs", inputs), ("outputs", outputs)):
        if len(values) > MAX_VALUES:
            raise BadOnnx(f"has {len(values)} {what}, expected at most {MAX_VALUES}")
    return {
        "ir_version": model.ir_version,
        "opset": {each.domain or "ai.onnx": each.version for each in model.opset_import},
        "producer": f"{model.producer_name} {model.producer_version}".strip()[:200],
        "inputs": inputs,
        "outputs": outputs,
    }


def messages(message: Message) -> Iterator[Message]:
    """A message and all messages in it, except those inside tensors."""
    pending = [message]
    while pending:
        current = pending.pop()
        yield current
        if isinstance(current, TensorProto):
            continue
        for field, value in current.ListFields():
            if field.message_type is not None:
                pending.extend([value] if isinstance(value, Message) else value)


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > LIMIT_BYTES:
            raise BadOnnx(f"has {size} bytes, expected at most {LIMIT_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise BadOnnx(f"cannot be read: {error.strerror}") from None


def _external(model: ModelProto, folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for tensor in messages(model):
        if isinstance(tensor, TensorProto) and tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            location = entries.get("location", "")
            named = f"says that tensor {tensor.name[:100]!r} is in {location[:200]!r}"
            if location not in files:
                files[location] = _confined(folder, location, named)
            _require_within(files[location], entries, named)
    return files


def _confined(folder: Path, location: str, named: str) -> Path:
    """The file at `location`, which must lie below `folder`."""
    parts = PurePosixPath(location).parts
    if not parts or any(bad in location for bad in ("\\", "\0", ":")) or parts[0] == "/" or ".." in parts:
        raise BadOnnx(f"{named}; expected a file below its own folder")
    path = folder.joinpath(*parts)
    if path.resolve() != folder.resolve().joinpath(*parts):
        raise BadOnnx(f"{named}, which is a link; expected a file below its own folder")
    if not path.is_file():
        raise BadOnnx(f"{named}; there is no such file")
    if path.stat().st_size > LIMIT_BYTES:
        raise BadOnnx(f"{named}, which has {path.stat().st_size} bytes; expected at most {LIMIT_BYTES}")
    return path


def _require_within(path: Path, entries: dict[str, str], named: str) -> None:
    size = path.stat().st_size
    offset, length = (entries.get(key, "0") for key in ("offset", "length"))
    if not (offset.isdecimal() and length.isdecimal()) or int(offset) + int(length) > size:
        raise BadOnnx(f"{named}, {length[:30]} bytes from {offset[:30]}; that file has {size} bytes")


def _value(value: ValueInfoProto) -> dict[str, Any]:
    tensor = value.type.tensor_type
    shape: list[int | str | None] = []
    for dim in tensor.shape.dim:
        shape.append(dim.dim_value if dim.HasField("dim_value") else dim.dim_param if dim.dim_param else None)
    kind = TensorProto.DataType.Name(tensor.elem_type).lower() if value.type.HasField("tensor_type") else ""
    return {"name": value.name, "dtype": _DTYPES.get(kind, kind), "shape": shape}


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[
        :300
    ]
