"""The Open Inference Protocol, version 2, as REST: JSON, and its extension for binary tensors.

A request's body is JSON; with the header `Inference-Header-Content-Length` that many bytes of JSON, then the values of the inputs that
have `binary_data_size`, one after the other, little-endian, row-major; of BYTES each value after its length in four bytes.
Answers likewise, for outputs that are asked for with `binary_data` or all by `binary_data_output`.

https://github.com/open-inference/open-inference-protocol, and for the extension
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from coordinator.serving.inference import DATATYPES, InferAnswer, InferRequest, Tensor, invalid
from coordinator.serving.protocol import (
    array_of_texts,
    decode_values,
    encode_values,
    limit_tensors,
    limit_texts,
    read_priority,
    read_shape,
    read_timeout,
    refuse_unsupported,
    require_datatype,
)

HEADER_LENGTH = b"inference-header-content-length"
_KINDS = {"BOOL": "b", "FP16": "fiu", "FP32": "fiu", "FP64": "fiu", "BYTES": "OU"}
"""Kinds of arrays that JSON values of a datatype may form; of all others whole numbers."""


@dataclass(frozen=True)
class Wanted:
    """What a REST request says about its answer. `binary`: names of outputs whose values follow the JSON; None: all."""

    binary: frozenset[str] | None


def parse_request(
    body: bytes, header_length: int | None, model: str, version: str
) -> tuple[InferRequest, Wanted]:
    """The request in a body.

    Raises:
        Refusal: 400, saying at which key.
    """
    document = parse_json(body if header_length is None else body[:header_length])
    rest = memoryview(body)[header_length:] if header_length is not None else memoryview(b"")
    listed = _list(document, "inputs", required=True)
    inputs = []
    for number, each in enumerate(listed):
        tensor, used = _input(_object(each, f"inputs[{number}]"), f"inputs[{number}]", rest)
        inputs.append(tensor)
        rest = rest[used:]
    if len(rest):
        raise invalid("wrong_size", f"{len(rest)} bytes follow the last tensor that has binary_data_size")
    parameters = _object(document.get("parameters") or {}, "parameters")
    refuse_unsupported(parameters, "the request", "timeout", "priority")
    outputs, binary = _outputs(document, parameters)
    return (
        InferRequest(
            model,
            inputs,
            version,
            _text(document.get("id", ""), "id"),
            outputs,
            read_timeout(parameters.get("timeout")),
            read_priority(parameters.get("priority")),
        ),
        binary,
    )


def parse_json(content: bytes | memoryview) -> dict[str, Any]:
    """Raises: Refusal: 400 `malformed`: it is no JSON object."""
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise invalid("malformed", f"the body is not JSON: {error}") from None
    return _object(document, "the body")


def encode_answer(answer: InferAnswer, wanted: Wanted) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON if values follow it."""
    outputs: list[dict[str, Any]] = []
    contents: list[bytes] = []
    for tensor in answer.outputs:
        described: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.array.shape,
        }
        if wanted.binary is None or tensor.name in wanted.binary:
            content = encode_values(tensor)
            contents.append(content)
            described["parameters"] = {"binary_data_size": len(content)}
        else:
            described["data"] = _json_values(tensor)
        outputs.append(described)
    document = {"model_name": answer.model, "model_version": answer.version, "outputs": outputs}
    if answer.id:
        document["id"] = answer.id
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return (head, None) if not contents else (b"".join((head, *contents)), len(head))


def _input(given: Mapping[str, Any], place: str, rest: memoryview) -> tuple[Tensor, int]:
    """A tensor, and how many of the bytes after the JSON are its."""
    name = _text(given.get("name"), f"{place}.name")
    datatype = require_datatype(given.get("datatype"), place)
    shape = read_shape(given.get("shape"), place)
    parameters = _object(given.get("parameters") or {}, f"{place}.parameters")
    refuse_unsupported(parameters, place)
    size = parameters.get("binary_data_size")
    if size is None:
        return Tensor(name, datatype, _from_json(given.get("data"), datatype, shape, place)), 0
    if "data" in given:
        raise invalid("malformed", f"{place}: has both data and binary_data_size")
    if type(size) is not int or not 0 <= size <= len(rest):
        raise invalid(
            "wrong_size",
            f"{place}: binary_data_size is {size!r:.100}, and {len(rest)} bytes are left of the body",
        )
    return Tensor(name, datatype, decode_values(rest[:size], datatype, shape, place)), size


def _from_json(data: object, datatype: str, shape: tuple[int, ...], place: str) -> npt.NDArray[Any]:
    if not isinstance(data, list):
        raise invalid("malformed", f"{place}: has no data, expected a list of values or binary_data_size")
    if datatype == "BYTES":
        return _texts(data, shape, place)
    try:
        values = _array(data, datatype) if data else np.zeros(0, DATATYPES[datatype])
    except ValueError:
        raise invalid("wrong_shape", f"{place}.data: its lists have several lengths") from None
    if values.dtype.kind not in _KINDS.get(datatype, "iu"):
        raise invalid("wrong_datatype", f"{place}.data: holds a value that is no {datatype}")
    if values.size != math.prod(shape):
        raise invalid(
            "wrong_size",
            f"{place}.data: has {values.size} values, expected {math.prod(shape)} for {list(shape)}",
        )
    return _cast(values, datatype, place).reshape(shape)


def _array(data: list[Any], datatype: str) -> npt.NDArray[Any]:
    """As `np.asarray`, in a quarter of the time for a flat list of floats; FP32 if that is wanted and all fit, else FP64."""
    if type(data[0]) is float:
        for code in "fd" if datatype == "FP32" else "d":
            # There may be something else among them, or too large a number.
            with suppress(struct.error, OverflowError):
                return np.frombuffer(struct.pack(f"{len(data)}{code}", *data), code)
    return np.asarray(data)


def _cast(values: npt.NDArray[Any], datatype: str, place: str) -> npt.NDArray[Any]:
    dtype = DATATYPES[datatype]
    if values.dtype == dtype:
        return values
    if dtype.kind in "iu" and values.size:
        limits = np.iinfo(dtype)
        if int(values.min()) < limits.min or int(values.max()) > limits.max:
            raise invalid("wrong_datatype", f"{place}.data: holds a value out of the range of {datatype}")
    with np.errstate(over="ignore"):  # becomes infinite, which the model's own check refuses
        return values.astype(dtype)


def _texts(data: Sequence[Any], shape: tuple[int, ...], place: str) -> npt.NDArray[Any]:
    limit_texts(math.prod(shape), place)
    flat: list[Any] = list(data)
    while flat and all(isinstance(each, list) for each in flat):
        flat = [value for each in flat for value in each]
    if not all(isinstance(each, str) for each in flat):
        raise invalid(
            "wrong_datatype", f"{place}.data: holds a value that is no text, which BYTES in JSON are"
        )
    if len(flat) != math.prod(shape):
        raise invalid(
            "wrong_size",
            f"{place}.data: has {len(flat)} values, expected {math.prod(shape)} for {list(shape)}",
        )
    return array_of_texts([each.encode() for each in flat]).reshape(shape)


def _json_values(tensor: Tensor) -> Any:
    if tensor.datatype == "BYTES":
        return [each.decode("utf-8", "replace") for each in tensor.array.ravel().tolist()]
    values = np.ascontiguousarray(tensor.array).ravel()
    return values.astype(np.float32) if tensor.datatype == "FP16" else values


def _outputs(document: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[list[str], Wanted]:
    every = parameters.get("binary_data_output", False)
    names, binary = [], set()
    for number, each in enumerate(_list(document, "outputs", required=False)):
        place = f"outputs[{number}]"
        given = _object(each, place)
        names.append(_text(given.get("name"), f"{place}.name"))
        own = _object(given.get("parameters") or {}, f"{place}.parameters")
        refuse_unsupported(own, place)
        if own.get("binary_data", every):
            binary.add(names[-1])
    return names, Wanted(None if every and not names else frozenset(binary))


def _list(document: Mapping[str, Any], key: str, *, required: bool) -> list[Any]:
    value = document.get(key)
    if value is None and not required:
        return []
    if not isinstance(value, list) or (required and not value):
        raise invalid("malformed", f"{key} is {value!r:.100}, expected a list of tensors")
    limit_tensors(len(value), key)
    return value


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid("malformed", f"{place} is {value!r:.100}, expected a JSON object")
    return value


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise invalid("malformed", f"{place} is {value!r:.100}, expected a string")
    return value
