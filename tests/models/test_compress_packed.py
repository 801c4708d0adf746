"""Packed weights: nothing is lost, whatever the shape, and the products are those of the float layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edge_client.wire import arrays
from models import zoo
from models.compress.quantization import packed
from models.compress.quantization.gptq import nearest
from models.compress.quantization.packed import Bits, PackedError, PackedLinear, PackedMatrix
from models.pretrain.params import params_of

pytestmark = pytest.mark.slow

SIZES = st.integers(1, 40)


@given(SIZES, SIZES, st.sampled_from([4, 8]), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_codes_scales_and_zeros_come_back_bit_for_bit(
    rows: int, columns: int, bits: Bits, group: int, seed: int
) -> None:
    """`values` is scale * (code - zero) of every weight, computed one by one here."""
    rng = np.random.default_rng(seed)
    groups = -(-columns // group)
    codes = rng.integers(0, 2**bits, (rows, columns), dtype=np.uint8)
    scales = rng.uniform(1e-6, 10, (rows, groups)).astype(np.float32)
    zeros = rng.integers(0, 2**bits, (rows, groups), dtype=np.uint8)
    matrix = PackedMatrix.of(*map(torch.from_numpy, (codes, scales, zeros)), bits, group)

    expected = np.array(
        [
            [
                scales[i, j // group] * np.float32(int(codes[i, j]) - int(zeros[i, j // group]))
                for j in range(columns)
            ]
            for i in range(rows)
        ]
    )
    np.testing.assert_array_equal(matrix.values().numpy(), expected)
    np.testing.assert_array_equal(matrix.values(1, 3).numpy(), expected[1:3])
    assert matrix.bytes == rows * (columns if bits == 8 else -(-columns // 2)) + 5 * rows * groups


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(7, 33, 16), (65, 256, 128), (3, 5, 2), (1, 1, 1), (300, 700, 700)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_what_the_float_layer_does(
    rows: int, columns: int, group: int, bits: Bits, bias: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(columns, rows, bias)
    matrix = nearest(layer.weight, bits, group)
    made = PackedLinear(matrix, layer.bias)
    with torch.no_grad():
        layer.weight.copy_(matrix.values())
        assert torch.equal(made.weight, layer.weight)
        for shape in [(columns,), (4, columns), (2, 3, columns), (0, columns)]:
            x = torch.randn(shape)
            torch.testing.assert_close(made(x), layer(x), rtol=1e-5, atol=1e-5)


def test_scales_stay_exact_in_another_dtype() -> None:
    layer = nn.Linear(40, 6)
    matrix = nearest(layer.weight, 4, 16)
    made = PackedLinear(matrix, layer.bias).to(torch.bfloat16)
    assert made.bias is not None
    assert (made.scales.dtype, made.bias.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(made.weight, matrix.values())
    x = torch.randn(3, 40, dtype=torch.bfloat16)
    with torch.no_grad():
        assert made(x).dtype == torch.bfloat16
        torch.testing.assert_close(
            made(x).float(), x.float() @ made.weight.T + layer.bias, rtol=2e-2, atol=2e-2
        )


def test_a_layer_of_many_weights_is_widened_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    widened: list[int] = []
    original = PackedMatrix.values

    def values(self: PackedMatrix, start: int = 0, stop: int | None = None) -> torch.Tensor:
        found = original(self, start, stop)
        widened.append(found.numel())
        return found

    layer = nn.Linear(64, 100)
    made = PackedLinear(nearest(layer.weight, 4, 64), layer.bias)
    x = torch.randn(5, 64)
    with torch.no_grad():
        whole = made(x)
        monkeypatch.setattr(packed, "_AT_ONCE", 640)
        monkeypatch.setattr(PackedMatrix, "values", values)
        torch.testing.assert_close(made(x), whole, rtol=1e-6, atol=1e-6)
    assert widened == [640] * 10


def _file(**changed: np.ndarray | None) -> bytes:
    """A packed `mlp`, with other tensors."""
    spec = zoo.get("mlp", input_shape=(5,), classes=3, hidden=[4])
    module = spec.build(0)
    content = packed.save(module, {"hidden.0": nearest(module.get_parameter("hidden.0.weight"), 4, 2)})
    tensors = safetensors.numpy.load(content) | changed
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return arrays.encode(kept, arrays.read_header(content).values)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 10_000))
def test_a_file_that_lost_or_changed_bytes_loads_or_is_refused_with_a_message(cut: int, at: int) -> None:
    spec = zoo.get("mlp", input_shape=(5,), classes=3, hidden=[4])
    content = bytearray(_file())
    content[at % len(content)] ^= cut % 255 + 1
    for broken in (bytes(content), bytes(content[:-cut])):
        try:
            packed.load(broken, spec, "file")
        except PackedError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nothing", "is not a safetensors file"),
        (safetensors.numpy.save({"a": np.zeros(2, np.float32)}), "its header lists no packed layer"),
        (_file(**{"hidden.0.codes": np.zeros((4, 2), np.uint8)}), r"hidden.0.codes is uint8 \(4, 2\), expected uint8 \(4, 3\)"),
        (_file(**{"hidden.0.codes": np.zeros((4, 3), np.int8)}), "hidden.0.codes is int8"),
        (_file(**{"hidden.0.scales": None}), "hidden.0.scales is missing, expected float32"),
        (_file(**{"hidden.0.zeros": np.zeros(12, np.uint8)}), r"hidden.0.zeros is uint8 \(12,\)"),
        (_file(**{"other": np.zeros(12, np.uint8)}), "'other' is not one of the model's"),
        (_file(**{"fc.weight": None}), "'fc.weight' is missing"),
        (arrays.encode({}, {"packed": {"fc": {"columns": 4, "bits": 3, "group": 2}}}), "packed.fc.bits is 3"),
        (arrays.encode({}, {"packed": {"fc": {"columns": 4, "bits": 4, "group": 0}}}), "packed.fc.group is 0"),
    ],
)  # fmt: skip
def test_another_file_is_refused_and_the_message_says_what_was_expected(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "packed.safetensors").write_bytes(content)
    spec = zoo.get("mlp", input_shape=(5,), classes=3, hidden=[4])
    with pytest.raises(PackedError, match=message):
        packed.load_packed(tmp_path / "packed.safetensors", spec)


def test_a_file_of_another_architecture_is_refused() -> None:
    with pytest.raises(PackedError, match=r"file: hidden\.0 is packed, but the model has no such layer"):
        packed.load(_file(), zoo.get("logreg", input_shape=(5,), classes=3), "file")
    wider = zoo.get("mlp", input_shape=(6,), classes=3, hidden=[4, 4])
    with pytest.raises(PackedError, match="file: params of model 'mlp': tensor 'hidden"):
        packed.load(_file(), wider, "file")


def test_nothing_but_packed_weights_changes_in_the_file() -> None:
    spec = zoo.get("mlp", input_shape=(5,), classes=3, hidden=[4])
    module, loaded = spec.build(0), packed.load(_file(), spec, "file")
    known = params_of(module)
    found = params_of(loaded)
    assert isinstance(loaded.get_submodule("hidden.0"), PackedLinear)
    assert found.keys() - {"hidden.0.scales"} == known.keys() - {"hidden.0.weight"}
    for name in found.keys() & known.keys():
        np.testing.assert_array_equal(found[name], known[name])
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
