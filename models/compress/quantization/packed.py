"""Models whose matrices stay in memory, and on disk, as 8-bit or 4-bit integers: `packed.safetensors`.

A weight is scale · (code - zero), with one scale and one zero point for each row of its matrix and each group of columns. Activations, biases, norms
and embeddings stay float32, so the products are those of the float model with the same weights, up to rounding.

The file has every tensor of the model. A layer `fc` of 300 inputs and 10 outputs, in 4 bits and groups of 128 columns, has

    fc.codes   uint8 [10, 150]    column j in the low half of byte j, column 150 + j in its high half; 8 bits: [10, 300]
    fc.scales  float32 [10, 3]    the last group has the columns that remain
    fc.zeros   uint8 [10, 3]

in place of `fc.weight`, and in the header's `packed` its columns, bits and group. Other tensors are as in `model.safetensors`.

torch's own kernels for such weights (`_weight_int4pack_mm_for_cpu`, `_weight_int8pack_mm`) compute the same within 1e-6, but with float32
activations they take 1.5 to 80 times the CPU time of widening the weights at each call, the more the more rows, and they accept few shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
from torch import nn

from edge_client.wire import arrays
from edge_client.wire.strict import InvalidDocument, Rules, parse
from models.compress.pruning.structure import fit
from models.pretrain.params import fill, params_of
from models.zoo.spec import ModelSpec

Bits = Literal[4, 8]

_HEADER = "packed"
_TENSORS = ("codes", "scales", "zeros")
_AT_ONCE = 2**18
"""Weights that are widened at a time: a megabyte, which mostly stays in the cache of a core."""


class PackedError(ValueError):
    """The file does not hold a packed model of this architecture; the message says what was expected."""


@dataclass(frozen=True)
class Format:
    """How a matrix is packed. `columns`: its inputs; `group`: columns that share a scale."""

    columns: int
    bits: Bits
    group: int

    @property
    def groups(self) -> int:
        return -(-self.columns // self.group)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a row."""
        return self.columns if self.bits == 8 else -(-self.columns // 2)


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [R, columns] of G groups. `codes`: uint8 [R, code_bytes]; `scales`: float32 [R, G]; `zeros`: uint8 [R, G]."""

    format: Format
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @classmethod
    def of(
        cls, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: Bits, group: int
    ) -> PackedMatrix:
        """`codes`: uint8 [R, columns], from 0 to 2^bits - 1."""
        return cls(Format(codes.shape[1], bits, group), codes if bits == 8 else _halves(codes), scales, zeros)

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.codes, self.scales, self.zeros))

    def values(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows `start` to `stop` as float32."""
        layout = self.format
        codes, scales, zeros = (part[start:stop] for part in (self.codes, self.scales, self.zeros))
        if layout.bits == 8:
            wide = codes.float()
        else:
            wide = torch.empty(len(codes), layout.columns, dtype=torch.float32, device=codes.device)
            wide[:, : layout.code_bytes] = codes & 15
            wide[:, layout.code_bytes :] = (codes >> 4)[:, : layout.columns - layout.code_bytes]
        full = layout.columns // layout.group
        if full:
            grouped = wide[:, : full * layout.group].view(-1, full, layout.group)
            grouped.sub_(zeros[:, :full, None]).mul_(scales[:, :full, None])
        if full < layout.groups:
            wide[:, full * layout.group :].sub_(zeros[:, full:]).mul_(scales[:, full:])
        return wide


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [R, C], two in each byte: [R, ceil(C / 2)]."""
    half = -(-codes.shape[1] // 2)
    packed = codes[:, :half].clone()
    packed[:, : codes.shape[1] - half] |= codes[:, half:] << 4
    return packed


class PackedLinear(nn.Module):
    """x [..., columns] -> x Wᵀ + b [..., R], with W packed: `_AT_ONCE` of its weights are float32 at a time."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def __init__(self, matrix: PackedMatrix, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.format = matrix.format
        for name in _TENSORS:
            self.register_buffer(name, getattr(matrix, name))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.in_features, self.out_features = matrix.format.columns, len(matrix.codes)

    @property
    def matrix(self) -> PackedMatrix:
        return PackedMatrix(self.format, self.codes, self.scales, self.zeros)

    @property
    def weight(self) -> torch.Tensor:
        """The whole matrix as float32, for code that reads it as from `nn.Linear`."""
        return self.matrix.values()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix, rows = self.matrix, self.out_features
        at_once = max(1, _AT_ONCE // self.in_features)
        parts = [x @ matrix.values(start, start + at_once).to(x.dtype).T for start in range(0, rows, at_once)]
        output = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return output if self.bias is None else output + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        """Moves to another device or dtype; scales stay float32, since a rounded scale would change all of its weights."""
        scales = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scales = scales.to(self.scales.device)
        return self

    def extra_repr(self) -> str:
        layout = self.format
        return f"{self.in_features}, {self.out_features}, bits={layout.bits}, group={layout.group}"


def save(module: nn.Module, matrices: Mapping[str, PackedMatrix]) -> bytes:
    """The content of `packed.safetensors`: `module` with the weights of the layers in `matrices`, by name, packed."""
    tensors: dict[str, npt.NDArray[Any]] = {
        name: values for name, values in params_of(module).items() if not _is_weight(name, matrices)
    }
    for layer, matrix in matrices.items():
        tensors |= {f"{layer}.{name}": getattr(matrix, name).numpy() for name in _TENSORS}
    formats = {layer: vars(matrix.format) for layer, matrix in sorted(matrices.items())}
    return arrays.encode(tensors, {_HEADER: formats})


def load_packed(path: Path, spec: ModelSpec) -> nn.Module:
    """The model in `packed.safetensors`, in evaluation mode, its packed layers as `PackedLinear`.

    Params of a float model exist only while `spec` builds its own.

    Raises:
        PackedError: it is not such a file, or of another model than `spec`.
        OSError: it cannot be read.
    """
    return load(path.read_bytes(), spec, str(path))


def load(content: bytes, spec: ModelSpec, name: str) -> nn.Module:
    """As `load_packed`. `name`: of the file, in messages."""
    tensors, formats = _read(content, name)
    matrices = {layer: _matrix(layer, tensors, layout, name) for layer, layout in formats.items()}
    # shapes tell the structure, without memory for the weights themselves
    shapes = tensors | {
        f"{layer}.weight": np.broadcast_to(np.float32(0), (len(matrix.codes), matrix.format.columns))
        for layer, matrix in matrices.items()
    }
    module = spec.build(0)
    try:
        for layer, part in list(module.named_modules()):
            fitted = fit(layer, part, shapes)
            if fitted is not part:
                module.set_submodule(layer, fitted)
        for layer, matrix in matrices.items():
            _pack_layer(module, layer, matrix)
        integers = {f"{layer}.{part}" for layer in matrices for part in ("codes", "zeros")}
        rest = {key: values for key, values in tensors.items() if key not in integers}
        fill(module, rest, f"params of model {spec.name!r}")
    except ValueError as error:
        raise PackedError(f"{name}: {error}") from error
    return module.requires_grad_(False).eval()


def _pack_layer(module: nn.Module, layer: str, matrix: PackedMatrix) -> None:
    linear = dict(module.named_modules()).get(layer)
    if not isinstance(linear, nn.Linear):
        found = "no such layer" if linear is None else f"{type(linear).__name__} there"
        raise PackedError(f"{layer} is packed, but the model has {found}")
    bias = None if linear.bias is None else torch.zeros(linear.out_features)
    module.set_submodule(layer, PackedLinear(matrix, bias))


def _read(content: bytes, name: str) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Format]]:
    try:
        described = arrays.read_header(content).values.get(_HEADER)
        tensors = safetensors.numpy.load(content)
    except (arrays.Malformed, safetensors.SafetensorError) as error:
        raise PackedError(f"{name} is not a safetensors file: {error}") from error
    if not isinstance(described, dict) or not described:
        raise PackedError(
            f"{name}: its header lists no packed layer; expected the packed.safetensors of a `gptq` step"
        )
    try:
        return tensors, {
            layer: parse(Format, table, f"{name}: {_HEADER}.{layer}", Rules(low=1))
            for layer, table in described.items()
        }
    except InvalidDocument as error:
        raise PackedError(str(error)) from error


def _matrix(layer: str, tensors: Mapping[str, npt.NDArray[Any]], layout: Format, name: str) -> PackedMatrix:
    """The packed matrix of `layer`, its shapes and dtypes checked."""
    found = {part: tensors.get(f"{layer}.{part}") for part in _TENSORS}
    rows = len(found["codes"]) if found["codes"] is not None and found["codes"].ndim else 0
    expected = {
        "codes": ("uint8", (rows, layout.code_bytes)),
        "scales": ("float32", (rows, layout.groups)),
        "zeros": ("uint8", (rows, layout.groups)),
    }
    for part, (dtype, shape) in expected.items():
        tensor = found[part]
        actual = "missing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
        if actual != f"{dtype} {shape}":
            raise PackedError(f"{name}: {layer}.{part} is {actual}, expected {dtype} {shape}")
    return PackedMatrix(layout, *(torch.from_numpy(np.array(tensor)) for tensor in found.values()))


def _is_weight(name: str, matrices: Mapping[str, PackedMatrix]) -> bool:
    layer, _, tensor = name.rpartition(".")
    return tensor == "weight" and layer in matrices
