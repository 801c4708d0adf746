"""Values of tensors as bytes, as REST's binary tensor extension and gRPC's raw contents carry them.

Elements are flattened, row-major, without padding, little-endian. An element of BYTES is its length, 4 bytes,
little-endian, and then its bytes (Triton, "Binary Tensor Data Extension").
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.serving.inference import DATATYPES, Tensor, invalid

MAX_DIMENSIONS = 16
MAX_DIMENSION = 2**31 - 1

_LENGTH = struct.Struct("<I")


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Tensor:
    """The tensor in `data`; except for BYTES its array is a read-only view of it.

    Raises: Refusal: 400: the datatype is unknown, the shape impossible, or `data` of another size than they need.
    """
    count = element_count(name, datatype, shape)
    if datatype == "BYTES":
        return Tensor(name, datatype, _elements(name, shape, count, memoryview(data)))
    dtype = DATATYPES[datatype]
    if len(data) != count * dtype.itemsize:
        raise invalid(
            "byte_count",
            f'input "{name}" has {len(data)} bytes; {datatype} of shape {list(shape)} needs {count * dtype.itemsize}',
        )
    if datatype == "BOOL" and count and np.frombuffer(data, np.uint8).max() > 1:
        raise invalid("tensor_values", f'input "{name}" is BOOL, whose bytes are 0 or 1; one is larger')
    return Tensor(name, datatype, np.frombuffer(data, dtype).reshape(shape))


def to_bytes(tensor: Tensor) -> bytes:
    """The values of a tensor; `from_bytes` reads them."""
    if tensor.datatype != "BYTES":
        return tensor.array.astype(DATATYPES[tensor.datatype], copy=False).tobytes()
    return b"".join(
        part for element in tensor.array.ravel() for part in (_LENGTH.pack(len(element)), element)
    )


def element_count(name: str, datatype: str, shape: Sequence[int]) -> int:
    """How many elements an input has. Raises: Refusal: 400: a tensor cannot be of this datatype or shape."""
    if datatype not in DATATYPES:
        raise invalid(
            "unknown_datatype",
            f'input "{name}" has the unknown datatype "{datatype}"; known: {", ".join(DATATYPES)}',
        )
    if len(shape) > MAX_DIMENSIONS or any(not 0 <= each <= MAX_DIMENSION for each in shape):
        raise invalid(
            "tensor_shape",
            f'input "{name}" has the shape {list(shape[: MAX_DIMENSIONS + 1])}; at most {MAX_DIMENSIONS} dimensions of 0 to {MAX_DIMENSION} were expected',
        )
    return math.prod(shape)


def _elements(name: str, shape: Sequence[int], count: int, data: memoryview) -> npt.NDArray[Any]:
    """Elements of BYTES. No more than `data` has room for are looked for, whatever `shape` says."""
    found: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + _LENGTH.size
        if end <= len(data):
            end += _LENGTH.unpack_from(data, at)[0]
        if end > len(data) or end < at + _LENGTH.size:
            raise invalid("byte_count", f'input "{name}": the bytes end within element {len(found)}')
        found.append(bytes(data[at + _LENGTH.size : end]))
        at = end
    return bytes_array(name, shape, count, found)


def bytes_array(name: str, shape: Sequence[int], count: int, elements: Sequence[bytes]) -> npt.NDArray[Any]:
    """The array of a tensor of BYTES. Raises: Refusal: 400: there are not `count` elements."""
    if len(elements) != count:
        raise invalid(
            "element_count",
            f'input "{name}" has {len(elements)} elements; the shape {list(shape)} needs {count}',
        )
    array = np.empty(count, object)
    array[:] = elements
    return array.reshape(shape)
