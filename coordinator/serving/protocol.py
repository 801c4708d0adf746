"""What REST and gRPC share of the Open Inference Protocol: values of tensors as bytes, shapes, datatypes and parameters.

Values are flattened, row-major, without padding, little-endian; of BYTES each value follows its length in four bytes. REST carries
them after its JSON, gRPC in raw contents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.serving.inference import DATATYPES, Tensor, invalid

_MICROSECONDS = 1e6
_MAX_DIMENSIONS = 16
_MAX_TEXTS = 2**20
_MAX_TENSORS = 4096
_WITHOUT_EFFECT = frozenset(
    {
        "binary_data",
        "binary_data_output",
        "binary_data_size",
        "content_type",
        "triton_enable_empty_final_response",
    }
)
"""Parameters of clients that say nothing of the prediction: how values travel, and what a client makes of them."""


def refuse_unsupported(parameters: Iterable[str], place: str, *supported: str) -> None:
    """Raises: Refusal: 400 `bad_parameter`: one would change the meaning of the request, such as a sequence or shared memory."""
    for name in parameters:
        if name not in supported and name not in _WITHOUT_EFFECT:
            raise invalid("bad_parameter", f"{place}: the parameter {name!r:.100} is not supported")


def read_timeout(value: object) -> float | None:
    """Seconds of the parameter `timeout`, which is in microseconds as in Triton; 0: the deployment's own limit.

    Raises:
        Refusal: 400 `bad_parameter`.
    """
    if value is None or value == 0:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise invalid("bad_parameter", f"timeout is {value!r:.100}, expected a whole number of microseconds")
    return value / _MICROSECONDS


def read_priority(value: object) -> int:
    """Raises: Refusal: 400 `bad_parameter`."""
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise invalid("bad_parameter", f"priority is {value!r:.100}, expected a whole number from 0")
    return value


def decode_values(
    content: bytes | memoryview, datatype: str, shape: Sequence[int], place: str
) -> npt.NDArray[Any]:
    """The array of a tensor's bytes.

    Raises:
        Refusal: 400 `wrong_size`: there are more or fewer than the shape needs.
    """
    count = math.prod(shape)
    if datatype == "BYTES":
        limit_texts(count, place)
        return _decode_texts(bytes(content), count, place).reshape(shape)
    dtype = DATATYPES[datatype]
    if len(content) != count * dtype.itemsize:
        raise invalid(
            "wrong_size",
            f"{place}: has {len(content)} bytes, expected {count * dtype.itemsize} for {datatype} {list(shape)}",
        )
    if datatype == "BOOL" and count and np.frombuffer(content, np.uint8).max() > 1:
        raise invalid("wrong_value", f"{place}: has a byte that is neither 0 nor 1, which BOOL are")
    return np.frombuffer(content, dtype).reshape(shape)


def encode_values(tensor: Tensor) -> bytes:
    """A tensor's bytes, as `decode_values` reads them."""
    if tensor.datatype == "BYTES":
        return b"".join(len(each).to_bytes(4, "little") + each for each in tensor.array.ravel().tolist())
    return np.ascontiguousarray(tensor.array, DATATYPES[tensor.datatype]).tobytes()


def read_shape(value: object, place: str) -> tuple[int, ...]:
    """Raises: Refusal: 400 `wrong_shape`."""
    sizes = value if isinstance(value, list) else None
    if sizes is None or not all(type(each) is int and 0 <= each < 2**31 for each in sizes) or not sizes:
        raise invalid(
            "wrong_shape", f"{place}.shape is {value!r:.100}, expected a list of sizes, the rows first"
        )
    # NumPy refuses shapes beyond its own limits, also of arrays without elements.
    if len(sizes) > _MAX_DIMENSIONS or math.prod(each for each in sizes if each) > 2**31:
        raise invalid("wrong_shape", f"{place}.shape is {sizes!r:.100}, which is too large")
    return tuple(sizes)


def require_datatype(value: object, place: str) -> str:
    """Raises: Refusal: 400 `wrong_datatype`."""
    if not isinstance(value, str) or value not in DATATYPES:
        raise invalid(
            "wrong_datatype", f"{place}.datatype is {value!r:.100}, expected one of {', '.join(DATATYPES)}"
        )
    return value


def limit_tensors(count: int, key: str) -> None:
    """Raises: Refusal: 400 `malformed`: there are more inputs, or outputs, than a request may have."""
    if count > _MAX_TENSORS:
        raise invalid("malformed", f"there are {count} {key}, expected at most {_MAX_TENSORS}")


def limit_texts(count: int, place: str) -> None:
    """Each text costs more than a number does. Raises: Refusal: 400 `wrong_shape`: there are too many."""
    if count > _MAX_TEXTS:
        raise invalid("wrong_shape", f"{place}: has {count} values of BYTES, expected at most {_MAX_TEXTS}")


def _decode_texts(content: bytes, count: int, place: str) -> npt.NDArray[Any]:
    texts: list[bytes] = []
    at = 0
    while at < len(content) and len(texts) < count:
        length = int.from_bytes(content[at : at + 4], "little")
        at += 4
        texts.append(content[at : at + length])
        at += length
    if len(texts) != count or at != len(content):
        raise invalid(
            "wrong_size", f"{place}: its bytes are not {count} values, each after its length in 4 bytes"
        )
    return array_of_texts(texts)


def array_of_texts(texts: Sequence[bytes]) -> npt.NDArray[Any]:
    """One axis of BYTES."""
    array = np.empty(len(texts), object)
    array[:] = texts
    return array
