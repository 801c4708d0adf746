"""Values of tensors as bytes: what is encoded decodes to itself, and nothing else decodes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import Refusal
from coordinator.serving.grpc_api import open_inference_grpc_pb2 as pb
from coordinator.serving.grpc_api.messages import infer_request
from coordinator.serving.inference import DATATYPES, Tensor
from coordinator.serving.protocol import decode_values, encode_values, read_shape
from coordinator.serving.rest import parse_request

SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    datatype, shape = draw(st.sampled_from(sorted(DATATYPES))), draw(SHAPES)
    count = math.prod(shape)
    array: Any
    if datatype == "BYTES":
        array = np.empty(count, object)
        array[:] = draw(st.lists(st.binary(max_size=9), min_size=count, max_size=count))
    elif datatype == "BOOL":
        array = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    else:
        size = count * DATATYPES[datatype].itemsize
        array = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), DATATYPES[datatype])
    return Tensor("x", datatype, array.reshape(shape))


@given(tensors())
def test_decoding_undoes_encoding(tensor: Tensor) -> None:
    content = encode_values(tensor)
    found = decode_values(content, tensor.datatype, tensor.array.shape, "x")
    assert found.shape == tensor.array.shape and found.dtype == tensor.array.dtype
    assert encode_values(Tensor("x", tensor.datatype, found)) == content


@given(tensors(), st.binary(min_size=1, max_size=9), st.integers(0, 99))
def test_more_or_fewer_bytes_are_refused(tensor: Tensor, more: bytes, fewer: int) -> None:
    content = encode_values(tensor)
    wrong = [content + more] + ([content[: fewer % len(content)]] if content else [])
    for each in wrong:
        with pytest.raises(Refusal) as caught:
            decode_values(each, tensor.datatype, tensor.array.shape, "x")
        assert (caught.value.status, caught.value.code) == (400, "wrong_size")


@given(st.binary(max_size=60), SHAPES)
def test_bytes_never_decode_to_texts_that_they_are_not(content: bytes, shape: tuple[int, ...]) -> None:
    try:
        found = decode_values(content, "BYTES", shape, "x")
    except Refusal as refusal:
        assert refusal.status == 400
    else:
        assert encode_values(Tensor("x", "BYTES", found)) == content


@pytest.mark.parametrize(
    "shape", [None, [], [-1], [1.0], [True], ["1"], [2**31], [1] * 17, [2**20, 2**20], [0, 2**30, 2**30]]
)
def test_shapes_that_no_array_has_are_refused(shape: Any) -> None:
    with pytest.raises(Refusal) as caught:
        read_shape(shape, "x")
    assert caught.value.code == "wrong_shape"


def test_the_largest_shapes_are_taken() -> None:
    assert read_shape([0, 2**31 - 1], "x") == (0, 2**31 - 1)
    assert decode_values(b"", "FP32", read_shape([0, 2**30], "x"), "x").shape == (0, 2**30)


@pytest.mark.parametrize("key", ["inputs", "outputs"])
def test_more_tensors_than_any_model_has_are_refused(key: str) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
    document = {"inputs": [tensor], key: [tensor] * 4097}
    with pytest.raises(Refusal) as caught:
        parse_request(json.dumps(document).encode(), None, "digits", "")
    assert (caught.value.status, caught.value.code) == (400, "malformed")
    message = pb.ModelInferRequest(model_name="digits")
    getattr(message, key).extend([getattr(message, key).add(name="x")] * 4096)
    with pytest.raises(Refusal) as caught:
        infer_request(message, deadline_seconds=None)
    assert (caught.value.status, caught.value.code) == (400, "malformed")
