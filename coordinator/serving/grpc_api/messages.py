"""Messages of gRPC to requests and answers of the service, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from coordinator.serving.grpc_api import open_inference_grpc_pb2 as pb
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

_M = TypeVar("_M")

_CONTENTS = {
    "BOOL": ("bool_contents", np.bool_),
    "INT8": ("int_contents", np.int32),
    "INT16": ("int_contents", np.int32),
    "INT32": ("int_contents", np.int32),
    "INT64": ("int64_contents", np.int64),
    "UINT8": ("uint_contents", np.uint32),
    "UINT16": ("uint_contents", np.uint32),
    "UINT32": ("uint_contents", np.uint32),
    "UINT64": ("uint64_contents", np.uint64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
    "BYTES": ("bytes_contents", np.object_),
}
"""The field of typed contents of each datatype, and what its elements are; FP16 has none."""


def parse(kind: type[_M], data: bytes) -> _M:
    """The message that `data` holds. Raises: Refusal: 400: it holds none."""
    message = kind()
    try:
        message.ParseFromString(data)  # type: ignore[attr-defined]
    except DecodeError:
        raise invalid("malformed", f"the request is no message inference.{kind.__name__}") from None
    return message


def infer_request(message: pb.ModelInferRequest, *, deadline_seconds: float | None) -> InferRequest:
    """`deadline_seconds`: until the call's deadline; the parameter `timeout` may end it sooner.

    Raises: Refusal: 400: a tensor cannot be read, or a parameter is not supported.
    """
    timeout = read_timeout(_parameter(message, "timeout"))
    limits = [each for each in (deadline_seconds, timeout) if each is not None]
    refuse_unsupported(message.parameters, "the request", "timeout", "priority")
    limit_tensors(len(message.inputs), "inputs")
    limit_tensors(len(message.outputs), "outputs")
    for number, output in enumerate(message.outputs):
        refuse_unsupported(output.parameters, f"outputs[{number}]")
    return InferRequest(
        model=message.model_name,
        inputs=_inputs(message),
        version=message.model_version,
        id=message.id,
        outputs=[each.name for each in message.outputs],
        timeout_seconds=min(limits, default=None),
        priority=read_priority(_parameter(message, "priority")),
    )


def infer_response(answer: InferAnswer) -> pb.ModelInferResponse:
    """The answer, with raw contents."""
    response = pb.ModelInferResponse(model_name=answer.model, model_version=answer.version, id=answer.id)
    for tensor in answer.outputs:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        response.raw_output_contents.append(encode_values(tensor))
    return response


def _inputs(message: pb.ModelInferRequest) -> Sequence[Tensor]:
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise invalid(
            "malformed",
            f"there are {len(message.inputs)} inputs and {len(raw)} raw_input_contents; each input needs one, or none does",
        )
    inputs = []
    for number, each in enumerate(message.inputs):
        place = f"inputs[{number}]"
        refuse_unsupported(each.parameters, place)
        datatype, shape = require_datatype(each.datatype, place), read_shape(list(each.shape), place)
        if not raw:
            array = _typed(each.contents, datatype, shape, place)
        elif each.contents.ListFields():
            raise invalid("malformed", f"{place}: has raw and typed contents; send one of them")
        else:
            array = decode_values(raw[number], datatype, shape, place)
        inputs.append(Tensor(each.name, datatype, array))
    return inputs


def _typed(
    contents: pb.InferTensorContents, datatype: str, shape: tuple[int, ...], place: str
) -> npt.NDArray[Any]:
    """The array of typed contents."""
    if datatype not in _CONTENTS:
        raise invalid("wrong_datatype", f"{place}: {datatype} has no typed contents; send raw_input_contents")
    field, kind = _CONTENTS[datatype]
    others = [each.name for each, _ in contents.ListFields() if each.name != field]
    if others:
        raise invalid("wrong_datatype", f"{place}: {datatype} belongs into {field}, not into {others[0]}")
    values = getattr(contents, field)
    if len(values) != math.prod(shape):
        raise invalid(
            "wrong_size",
            f"{place}.contents: has {len(values)} values, expected {math.prod(shape)} for {list(shape)}",
        )
    if datatype == "BYTES":
        limit_texts(len(values), place)
        return array_of_texts(values).reshape(shape)
    wide: npt.NDArray[Any] = np.array(values, kind)
    array = wide.astype(DATATYPES[datatype], copy=False)
    if array.dtype.itemsize < wide.dtype.itemsize and not np.array_equal(array, wide):
        raise invalid("wrong_value", f"{place}.contents: holds a value out of the range of {datatype}")
    return array.reshape(shape)


def _parameter(message: pb.ModelInferRequest, name: str) -> object:
    """The value of a parameter, None if it is absent; one without a value is an empty text."""
    if name not in message.parameters:
        return None
    parameter = message.parameters[name]
    field = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, field) if field else ""
