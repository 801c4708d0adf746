"""The wire format: the same bytes for the same arrays, and nothing but Malformed for bytes that are not."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from edge_client.files import file_sha256
from edge_client.wire import arrays
from edge_client.wire.arrays import BytesPayload, FilePayload, Malformed, Payload, StoredArrays, TensorHeader
from edge_client.wire.device import TaskMessage
from edge_client.wire.result_sizes import measure_result
from strategies import params as lazy
from strategies.params import LazyTensors
from strategies.update import Update
from tests.support.payloads import entry, parsed, raw

GOLDEN = bytes.fromhex(
    "a000000000000000"  # 160 bytes of header, little-endian
    "7b225f5f6d657461646174615f5f223a7b226665646c6f6f70223a227b5c22726f756e645c223a20317d227d2c2262223a7b2264"
    "74797065223a22463332222c227368617065223a5b325d2c22646174615f6f666673657473223a5b302c385d7d2c2277223a7b22"
    "6474797065223a22463332222c227368617065223a5b322c335d2c22646174615f6f666673657473223a5b382c33325d7d7d2020"
    "20202020"  # padded to a multiple of 8
    "0000000000000000"  # b
    "000000000000803f0000004000004040000080400000a040"  # w
)
GOLDEN_ARRAYS = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.zeros(2, np.float32),
}

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
tensors = st.dictionaries(
    names,
    npst.arrays(
        st.sampled_from([np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.bool_]),
        npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    max_size=5,
)
json_values = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


def test_these_arrays_and_values_have_had_these_bytes_since_format_one() -> None:
    assert arrays.encode(GOLDEN_ARRAYS, {"round": 1}) == GOLDEN
    header = arrays.read_header(GOLDEN)
    assert header.values == {"round": 1}
    assert header.tensors == {"b": TensorHeader("F32", (2,)), "w": TensorHeader("F32", (2, 3))}
    assert arrays.sha256(GOLDEN) == hashlib.sha256(GOLDEN).hexdigest()


@given(tensors, json_values)
def test_decode_after_encode_is_identity(sent: dict[str, np.ndarray], values: dict[str, Any]) -> None:
    payload = arrays.encode(sent, values)
    got = arrays.decode(payload)
    assert set(got) == set(sent)
    for name, value in sent.items():
        assert (got[name].shape, got[name].dtype) == (value.shape, value.dtype)
        assert got[name].tobytes() == value.tobytes()
    assert arrays.read_header(payload).values == values


@given(tensors, st.randoms(use_true_random=False))
def test_bytes_do_not_depend_on_the_order_of_names(sent: dict[str, np.ndarray], random: Any) -> None:
    shuffled = list(sent)
    random.shuffle(shuffled)
    values = {"a": 1, "b": 2}
    turned = dict(reversed(values.items()))
    assert arrays.encode({name: sent[name] for name in shuffled}, turned) == arrays.encode(sent, values)


def test_tensors_of_one_dtype_lie_in_the_order_of_their_names() -> None:
    payload = arrays.encode({name: np.full(1, i, np.float32) for i, name in enumerate(("z", "a", "m"))})
    header, data = parsed(payload)
    assert list(header) == ["a", "m", "z"]
    assert np.frombuffer(data, np.float32).tolist() == [1.0, 2.0, 0.0]


def test_memory_layout_does_not_show_in_the_bytes() -> None:
    square = np.arange(12, dtype=np.float32).reshape(3, 4)
    turned = np.asfortranarray(square)
    assert arrays.encode({"w": turned}) == arrays.encode({"w": square})
    assert arrays.encode({"w": square.astype(">f4")}) == arrays.encode({"w": square})


def test_a_scalar_keeps_its_shape() -> None:
    assert arrays.decode(arrays.encode({"temperature": np.array(2.0, np.float32)}))["temperature"].shape == ()


def test_decoded_arrays_are_copies_one_may_write_to() -> None:
    arrays.decode(GOLDEN)["w"][...] = 9
    assert arrays.decode(GOLDEN)["w"].max() == 5


def test_a_file_of_another_writer_reads_as_arrays_without_values() -> None:
    payload = safetensors.numpy.save({"w": np.ones(3, np.float32)}, {"format": "pt"})
    assert arrays.read_header(payload).values == {}
    assert arrays.decode(payload)["w"].tolist() == [1.0, 1.0, 1.0]


FOUR = b"\0" * 4
LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "shorter than the length field": (b"\1\0\0", "too short"),
    "header of 2^64 - 1 bytes": (b"\xff" * 8 + b"{}", "does not fit"),
    "header longer than the payload": (raw({}, length=3), "does not fit"),
    "header above the limit": (raw(b" " * (arrays.HEADER_LIMIT + 1)), "does not fit"),
    "not JSON": (raw(b"{w: 1}"), "safetensors header"),
    "not UTF-8": (raw(b'{"\xff\xfe": 1}'), "safetensors header"),
    "a list": (raw([]), "safetensors header"),
    "null": (raw(None), "safetensors header"),
    "nested 200,000 deep": (raw(b"[" * 200_000), "recursion"),
    "values nested 100,000 deep": (raw({"__metadata__": {"fedloop": "[" * 100_000}}), "recursion"),
    "values that are no object": (raw({"__metadata__": {"fedloop": "[1]"}}), "not a JSON object"),
    "values that are no text": (raw({"__metadata__": {"fedloop": 1}}), "safetensors header"),
    "metadata that is a number": (raw({"__metadata__": 1}), "safetensors header"),
    "an entry that is a list": (raw({"w": []}), "safetensors header"),
    "an entry without dtype": (raw({"w": {"shape": [1], "data_offsets": [0, 4]}}, FOUR), "dtype"),
    "an entry without offsets": (raw({"w": {"dtype": "F32", "shape": [1]}}, FOUR), "data_offsets"),
    "an unknown dtype": (raw({"w": entry(0, 4, [1], "F33")}, FOUR), "unknown dtype 'F33'"),
    "a dtype that is a list": (raw({"w": entry(0, 4, [1], [])}, FOUR), "safetensors header"),
    "a dtype wider than its bytes": (raw({"w": entry(0, 4, [1], "F64")}, FOUR), "lies at"),
    "a dtype narrower than its bytes": (raw({"w": entry(0, 4, [1], "F16")}, FOUR), "lies at"),
    "a negative extent": (raw({"w": entry(0, 4, [-1])}, FOUR), "shape (-1,)"),
    "two negative extents": (raw({"w": entry(0, 4, [-1, -1])}, FOUR), "shape (-1, -1)"),
    "a fraction of an extent": (raw({"w": entry(0, 4, [1.0])}, FOUR), "shape (1.0,)"),
    "true as an extent": (raw({"w": entry(0, 4, [True])}, FOUR), "shape (True,)"),
    "a shape that is text": (raw({"w": {**entry(0, 4, []), "shape": "1"}}, FOUR), "shape"),
    "an extent of 2^63": (raw({"w": entry(0, 0, [0, 2**63])}), "shape"),
    "a huge shape": (raw({"w": entry(0, 4, [2**62] * 8)}, FOUR), "lies at"),
    "a thousand axes": (raw({"w": entry(0, 4, [1] * 1000)}, FOUR), "shape (1, 1,"),
    "an extent of 5,000 digits": (raw(b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"), "digits"),
    "overlapping tensors": (raw({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, FOUR * 2), "'b' lies at [0, 4], expected [4, 8]"),
    "a gap between tensors": (raw({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, FOUR * 3), "'b' lies at [8, 12], expected [4, 8]"),
    "data before the first tensor": (raw({"a": entry(4, 8, [1])}, FOUR * 2), "lies at [4, 8]"),
    "offsets turned round": (raw({"a": entry(4, 0, [1])}, FOUR), "lies at [4, 0]"),
    "offsets beyond the data": (raw({"a": entry(0, 2**64, [2**62])}, FOUR), "declare 18446744073709551616 bytes"),
    "three offsets": (raw({"a": {**entry(0, 4, [1]), "data_offsets": [0, 4, 8]}}, FOUR), "safetensors header"),
    "data that nobody declares": (raw({"a": entry(0, 4, [1])}, FOUR * 2), "declare 4 bytes, the payload holds 8"),
    "less data than declared": (raw({"a": entry(0, 8, [2])}, FOUR), "declare 8 bytes, the payload holds 4"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_malformed_and_says_where(lie: str) -> None:
    payload, words = LIES[lie]
    with pytest.raises(Malformed) as caught:
        arrays.read_header(payload)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_only_what_our_loader_takes_is_decoded() -> None:
    """Headers that `read_header` lets pass but that the loader refuses, each for a reason of its own."""
    refused = {
        "larger than the address space": raw({"w": entry(0, 0, [0, 2**62, 2**62])}),
    }
    for payload in refused.values():
        stored = StoredArrays(BytesPayload(payload))
        with pytest.raises(Malformed):
            stored["w"]
        with pytest.raises(Malformed):
            arrays.decode(payload)
    with pytest.raises(Malformed):
        arrays.decode(raw({"w": entry(0, 4, [2], "BF16")}, FOUR))  # numpy lacks it


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=9))
def test_bfloat16_is_read_as_the_float32_that_it_is_the_upper_half_of(values: list[float]) -> None:
    halves = np.array(values, "<f4").view("<u4") >> 16
    payload = raw({"w": entry(0, 2 * len(values), [len(values)], "BF16")}, halves.astype("<u2").tobytes())
    read = StoredArrays(BytesPayload(payload))["w"]
    assert read.dtype == np.float32
    assert read.tobytes() == (halves << 16).astype("<u4").tobytes()


@pytest.mark.parametrize(
    "payload",
    [
        raw("{}".encode("utf-16")),
        raw({"__metadata__": {"other": 3}}),
        raw({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4]}}, FOUR),
        raw({"w": {"dtype": "F32", "shape": [], "data_offsets": []}}, FOUR),
    ],
    ids=["UTF-16", "metadata that is no text", "an offset that is no whole number", "no offsets"],
)
def test_headers_that_the_loader_refuses_are_refused_by_ours(payload: bytes) -> None:
    for read in (arrays.read_header, arrays.decode):
        with pytest.raises(Malformed):
            read(payload)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_malformed_or_read(payload: bytes) -> None:
    _read(payload)


@given(st.data())
def test_a_changed_payload_is_malformed_or_read_alike_by_both_readers(data: st.DataObject) -> None:
    payload = bytearray(GOLDEN)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    _read(bytes(payload))


@given(st.integers(0, len(GOLDEN) - 1))
def test_a_truncated_payload_is_malformed(length: int) -> None:
    with pytest.raises(Malformed):
        arrays.read_header(GOLDEN[:length])
    with pytest.raises(Malformed):
        arrays.decode(GOLDEN[:length])


json_documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["__metadata__", "fedloop", "dtype", "shape", "data_offsets", "w"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
odd_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F64", "BOOL", "BF16"]) | json_documents,
        "shape": st.lists(st.integers(-2, 4) | st.integers(), max_size=3) | json_documents,
        "data_offsets": st.lists(st.integers(-4, 24) | st.integers(), max_size=3) | json_documents,
    }
)


@given(st.dictionaries(st.text(max_size=3), odd_entries | json_documents, max_size=3), st.binary(max_size=24))
def test_any_json_as_header_is_malformed_or_read(header: dict[str, Any], data: bytes) -> None:
    _read(raw(header, data))


def _read(payload: bytes) -> None:
    """Each reader answers or says Malformed; where both answer, they mean the same."""
    answers: list[dict[str, tuple[int, ...]]] = []
    with suppress(Malformed):
        answers.append({name: tensor.shape for name, tensor in arrays.read_header(payload).tensors.items()})
    with suppress(Malformed):
        answers.append({name: value.shape for name, value in arrays.decode(payload).items()})
    with suppress(Malformed):
        answers.append({name: value.shape for name, value in StoredArrays(BytesPayload(payload)).items()})
    assert all(answer == answers[0] for answer in answers)


# Files

floats = st.dictionaries(
    names,
    npst.arrays(np.float32, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)),
    max_size=5,
)


class Computed(LazyTensors):
    """Tensors that are nowhere as a whole."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def piece(self, name: str, start: int, stop: int) -> np.ndarray:
        assert stop - start <= lazy.PIECE
        return self._tensors[name].reshape(-1)[start:stop].copy()


@given(floats, st.none() | json_values, st.booleans(), st.integers(1, 7))
def test_a_file_holds_the_bytes_that_encode_makes(
    sent: dict[str, np.ndarray], values: dict[str, Any] | None, computed: bool, piece: int
) -> None:
    """Whatever the names, and however small the pieces."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy, "PIECE", piece)
        path = Path(folder) / "arrays"
        digest = arrays.write(path, Computed(sent) if computed else sent, values)
        payload = arrays.encode(sent, values)
        assert path.read_bytes() == payload
        assert digest == arrays.sha256(payload) == file_sha256(path)


def test_tensors_of_another_layout_are_written_in_c_order(tmp_path: Path) -> None:
    turned = {"w": np.arange(6, dtype=np.float32).reshape(3, 2).T, "v": np.arange(9, dtype=np.float32)[::2]}
    arrays.write(tmp_path / "arrays", turned)
    assert (tmp_path / "arrays").read_bytes() == arrays.encode(turned)


@pytest.mark.parametrize("on_disk", [True, False])
def test_stored_arrays_are_those_that_were_encoded(on_disk: bool, tmp_path: Path) -> None:
    @given(tensors, json_values, st.data())
    def holds(sent: dict[str, np.ndarray], values: dict[str, Any], data: st.DataObject) -> None:
        stored = StoredArrays(_payload(arrays.encode(sent, values), tmp_path if on_disk else None))
        assert (list(stored), stored.header.values) == (sorted(sent), values)
        for name, value in sent.items():
            got = stored[name]
            assert (stored.shape(name), got.shape, got.dtype) == (value.shape, value.shape, value.dtype)
            assert got.tobytes() == value.tobytes()
            start, stop = sorted(data.draw(st.integers(0, value.size)) for _ in range(2))
            assert stored.piece(name, start, stop).tobytes() == value.reshape(-1)[start:stop].tobytes()

    holds()


def test_a_file_that_was_cut_after_its_header_was_read_is_malformed(tmp_path: Path) -> None:
    path = tmp_path / "arrays"
    arrays.write(path, {"w": np.zeros(4, np.float32)})
    stored = StoredArrays(FilePayload(path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Malformed, match="the payload ends within tensor 'w'"):
        stored["w"]


def _payload(content: bytes, folder: Path | None) -> Payload:
    if folder is None:
        return BytesPayload(content)
    (folder / "payload").write_bytes(content)
    return FilePayload(folder / "payload")


@given(
    st.text(max_size=20), st.floats(), st.integers(1, 2**53), st.integers(1, 10**6), st.integers(0, 10**4),
    st.dictionaries(st.text(min_size=1, max_size=9), st.lists(st.integers(0, 3), max_size=3), max_size=4),
)  # fmt: skip
def test_a_result_has_the_bytes_that_are_measured_without_encoding_it(
    client: str, loss: float, examples: int, steps: int, number: int, shapes: dict[str, list[int]]
) -> None:
    message = TaskMessage(number, client, "ab" * 32, 5, 4, 0.1, 1, None, {"name": "plain"})
    update = Update({n: np.zeros(s, np.float32) for n, s in shapes.items()}, examples, steps, loss)
    assert measure_result(message, update) == len(arrays.encode_result(message, update))
