"""ONNX files, looked at without believing them: what one takes and gives, and where its weights lie.

Weights may lie in files beside it (`external_data`). These are taken from below the file's own folder only, and never
through a link. Nothing here computes what the file says.
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
"""Of the file, as protobuf has it, and of each one beside it."""
MOST_VALUES = 64
"""Inputs, and outputs, that a file may have."""

_DTYPES = {"float": "float32", "double": "float64"}


class BadOnnx(ValueError):
    """This is no ONNX file, or none that is taken; the message says why."""


@dataclass(frozen=True)
class Opened:
    """A file that was checked.

    Attributes:
        external: path below the file's folder -> the file with weights there.
    """

    path: Path
    sha256: str
    model: ModelProto
    external: dict[str, Path]


def opened(path: Path) -> Opened:
    """The file at `path`, parsed and checked (`onnx.checker`, shapes inferred). Holds the file twice in memory.

    Raises:
        BadOnnx: it is too large, broken, or has weights elsewhere than below its folder.
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
        raise BadOnnx(f"is not a sound ONNX file: {_first_line(error)}") from None
    return Opened(path, hashlib.sha256(content).hexdigest(), model, external)


def described(model: ModelProto) -> dict[str, Any]:
    """What the model takes and gives, as JSON: `ir_version`, `opset` by domain, `producer`, `inputs`, `outputs`.

    An extent of a shape is a number, the name of a variable one, or None where nothing is said.

    Raises:
        BadOnnx: it has more than `MOST_VALUES` of them.
    """
    held = {tensor.name for tensor in model.graph.initializer}
    inputs = [_value(value) for value in model.graph.input if value.name not in held]
    outputs = [_value(value) for value in model.graph.output]
    for what, values in (("inputs", inputs), ("outputs", outputs)):
        if len(values) > MOST_VALUES:
            raise BadOnnx(f"has {len(values)} {what}, expected at most {MOST_VALUES}")
    return {
        "ir_version": model.ir_version,
        "opset": {each.domain or "ai.onnx": each.version for each in model.opset_import},
        "producer": f"{model.producer_name} {model.producer_version}".strip()[:200],
        "inputs": inputs,
        "outputs": outputs,
    }


def messages(message: Message) -> Iterator[Message]:
    """A message and all in it. Tensors are not looked into."""
    waiting = [message]
    while waiting:
        here = waiting.pop()
        yield here
        if isinstance(here, TensorProto):
            continue
        for field, value in here.ListFields():
            if field.message_type is not None:
                waiting.extend([value] if isinstance(value, Message) else value)


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > LIMIT_BYTES:
            raise BadOnnx(f"has {size} bytes, expected at most {LIMIT_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise BadOnnx(f"cannot be read: {error.strerror}") from None


def _external(model: ModelProto, folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for tensor in messages(model):
        if isinstance(tensor, TensorProto) and tensor.data_location == TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            location = place.get("location", "")
            named = f"says that tensor {tensor.name[:100]!r} is in {location[:200]!r}"
            if location not in found:
                found[location] = _confined(folder, location, named)
            _require_within(found[location], place, named)
    return found


def _confined(folder: Path, location: str, named: str) -> Path:
    """The file with weights at `location` below `folder`."""
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


def _require_within(path: Path, place: dict[str, str], named: str) -> None:
    size = path.stat().st_size
    offset, length = (place.get(key, "0") for key in ("offset", "length"))
    if not (offset.isdecimal() and length.isdecimal()) or int(offset) + int(length) > size:
        raise BadOnnx(f"{named}, {length[:30]} bytes from {offset[:30]}; that file has {size} bytes")


def _value(value: ValueInfoProto) -> dict[str, Any]:
    tensor = value.type.tensor_type
    extents: list[int | str | None] = []
    for dim in tensor.shape.dim:
        extents.append(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param if dim.dim_param else None
        )
    kind = TensorProto.DataType.Name(tensor.elem_type).lower() if value.type.HasField("tensor_type") else ""
    return {"name": value.name, "dtype": _DTYPES.get(kind, kind), "shape": extents}


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[
        :300
    ]
