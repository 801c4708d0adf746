"""Messages of gRPC to requests and answers of the service, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from coordinator.serving import tensors
from coordinator.serving.grpc_api import open_inference_grpc_pb2 as pb
from coordinator.serving.inference import DATATYPES, InferAnswer, InferRequest, Tensor, invalid

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

# Clients that speak both protocols also send what only REST needs; the last one asks to mark the end of a stream's answer.
_WITHOUT_EFFECT = {
    "binary_data",
    "binary_data_output",
    "binary_data_size",
    "triton_enable_empty_final_response",
}
_MICROSECOND = 1e-6


def parse(kind: type[_M], data: bytes) -> _M:
    """The message that `data` holds. Raises: Refusal: 400: it holds none."""
    message = kind()
    try:
        message.ParseFromString(data)  # type: ignore[attr-defined]
    except DecodeError:
        raise invalid("not_a_message", f"the request is no message inference.{kind.__name__}") from None
    return message


def infer_request(message: pb.ModelInferRequest, *, deadline_seconds: float | None) -> InferRequest:
    """`deadline_seconds`: until the call's deadline; the parameter `timeout` may end it sooner.

    Raises: Refusal: 400: a tensor cannot be read, or a parameter is not supported.
    """
    parameters = dict(message.parameters)
    timeout = _natural(parameters, "timeout")
    limits = [
        each for each in (deadline_seconds, timeout * _MICROSECOND if timeout else None) if each is not None
    ]
    priority = _natural(parameters, "priority")
    _refuse_others(parameters, "the request")
    for output in message.outputs:
        _refuse_others(output.parameters, f'output "{output.name}"')
    return InferRequest(
        model=message.model_name,
        inputs=_inputs(message),
        version=message.model_version,
        id=message.id,
        outputs=[each.name for each in message.outputs],
        timeout_seconds=min(limits, default=None),
        priority=priority,
    )


def infer_response(answer: InferAnswer) -> pb.ModelInferResponse:
    """The answer, with raw contents."""
    response = pb.ModelInferResponse(model_name=answer.model, model_version=answer.version, id=answer.id)
    for tensor in answer.outputs:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        response.raw_output_contents.append(tensors.to_bytes(tensor))
    return response


def _inputs(message: pb.ModelInferRequest) -> Sequence[Tensor]:
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise invalid(
            "raw_contents",
            f"there are {len(message.inputs)} inputs and {len(raw)} raw_input_contents; each input needs one, or none does",
        )
    inputs = []
    for at, each in enumerate(message.inputs):
        _refuse_others(each.parameters, f'input "{each.name}"')
        if not raw:
            inputs.append(_typed(each))
        elif each.contents.ListFields():
            raise invalid("raw_contents", f'input "{each.name}" has raw and typed contents; send one of them')
        else:
            inputs.append(tensors.from_bytes(each.name, each.datatype, each.shape, raw[at]))
    return inputs


def _typed(message: pb.ModelInferRequest.InferInputTensor) -> Tensor:
    name, datatype, shape = message.name, message.datatype, list(message.shape)
    count = tensors.element_count(name, datatype, shape)
    if datatype not in _CONTENTS:
        raise invalid(
            "typed_contents",
            f'input "{name}" is {datatype}, which has no typed contents; send raw_input_contents',
        )
    field, kind = _CONTENTS[datatype]
    others = [each.name for each, _ in message.contents.ListFields() if each.name != field]
    if others:
        raise invalid(
            "typed_contents",
            f'input "{name}" is {datatype}, whose elements belong into {field}, not into {others[0]}',
        )
    values = getattr(message.contents, field)
    if datatype == "BYTES":
        return Tensor(name, datatype, tensors.bytes_array(name, shape, count, values))
    if len(values) != count:
        raise invalid(
            "element_count", f'input "{name}" has {len(values)} elements; the shape {shape} needs {count}'
        )
    wide: npt.NDArray[Any] = np.array(values, kind)
    array = wide.astype(DATATYPES[datatype], copy=False)
    if array.dtype.itemsize < wide.dtype.itemsize and not np.array_equal(array, wide):
        raise invalid("tensor_values", f'input "{name}" has an element beyond {datatype}')
    return Tensor(name, datatype, array.reshape(shape))


def _natural(parameters: dict[str, pb.InferParameter], name: str) -> int:
    """Takes out a parameter that is a whole number from 0; 0 if it is absent."""
    parameter = parameters.pop(name, None)
    if parameter is None:
        return 0
    field = parameter.WhichOneof("parameter_choice")
    value: object = getattr(parameter, field) if field else None
    if field not in ("int64_param", "uint64_param") or not isinstance(value, int) or value < 0:
        raise invalid(
            "invalid_parameter",
            f"the parameter {name} is {str(value)[:40]!r}; a whole number from 0 was expected",
        )
    return value


def _refuse_others(parameters: Mapping[str, pb.InferParameter], of: str) -> None:
    for name in parameters:
        if name not in _WITHOUT_EFFECT:
            raise invalid("unsupported_parameter", f'the parameter "{name}" of {of} is not supported')
