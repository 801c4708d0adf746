"""Rounding a matrix of weights to a grid of 8 or 4 bits: GPTQ, or to nearest.

Frantar 2022, "GPTQ: Accurate post-training quantization for generative pre-trained transformers", Algorithm 1. Rounding one column of a layer's
weights W [out, in] leaves an error, which the columns not yet rounded make up for as well as they can on the layer's inputs X. The
sum over calibration rows H = XᵀX says how: with U the upper Cholesky factor of H⁻¹, UᵀU = H⁻¹, column by column

    Q_j = round(W_j)        W_k -= (W_j - Q_j) · U_jk / U_jj  for k > j

Columns with large inputs go first, while most others are left to make up for them ("act-order" in the authors' code). Scales and zero
points span the smallest to the largest weight of a row within a group of columns, and are those of the original weights, so that groups stay
groups of neighbours in whatever order the columns go. Weights that are zero stay zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from models.compress.quantization.packed import Bits, PackedMatrix

_BLOCK = 128
"""Columns after which an error reaches all later ones; section 3.3, step 2 of the paper."""


class NotInvertible(ValueError):
    """The inputs' second moments say nothing; the message says why."""


def nearest(weight: torch.Tensor, bits: Bits, group: int) -> PackedMatrix:
    """`weight` [out, in], each rounded to the nearest value of its group's grid. `group`: 0 for whole rows."""
    grid = _Grid.of(weight, bits, group)
    return grid.packed(grid.round(weight.double(), slice(None)))


def gptq(weight: torch.Tensor, squares: torch.Tensor, bits: Bits, group: int, damping: float) -> PackedMatrix:
    """`weight` [out, in], rounded such that the layer's outputs change little. `squares`: XᵀX of its inputs, float64 [in, in].

    Columns go from the largest to the smallest diagonal value.

    Raises:
        NotInvertible: `squares` is not finite, or not positive definite even with `damping`, a share of its diagonal's mean that is added to it.
    """
    grid = _Grid.of(weight, bits, group)
    columns = len(squares)
    order = squares.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(squares[order][:, order], damping)
    remaining = weight.double()[:, order]
    codes = torch.empty_like(grid.zero_mask, dtype=torch.uint8)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        block = remaining[:, start:stop]
        errors = torch.empty_like(block)
        for index in range(stop - start):
            at, column = start + index, order[start + index]
            rounded = grid.round(block[:, index : index + 1], column[None])
            codes[:, column] = rounded[:, 0]
            errors[:, index] = (block[:, index] - grid.values(rounded, column[None])[:, 0]) / factor[at, at]
            block[:, index:] -= errors[:, index, None] * factor[at, at:stop]
        remaining[:, stop:] -= errors @ factor[start:stop, stop:]
    return grid.packed(codes)


def output_error(weight: torch.Tensor, rounded: torch.Tensor, squares: torch.Tensor) -> float:
    """‖WX - QX‖² / ‖WX‖² from `squares` = XᵀX; 0 where the outputs are."""
    difference, original = (rounded - weight).double(), weight.double()
    lost, whole = (float((matrix @ squares * matrix).sum()) for matrix in (difference, original))
    return lost / whole if whole > 0 else 0.0


@dataclass(frozen=True)
class _Grid:
    """The values that each weight may have. `scales`, `zeros`: float64 [out, in], those of each weight's group; `zero_mask`: weights that stay zero."""

    bits: Bits
    group: int
    scales: torch.Tensor
    zeros: torch.Tensor
    zero_mask: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, bits: Bits, group: int) -> _Grid:
        columns = weight.shape[1]
        width = min(group, columns) if group else columns
        parts = torch.split(weight.detach().float(), width, 1)
        low = torch.stack([part.amin(1) for part in parts], 1).clamp(max=0)  # [out, groups]
        high = torch.stack([part.amax(1) for part in parts], 1).clamp(min=0)
        scales = (high - low) / (2**bits - 1)
        scales[scales < torch.finfo(torch.float32).tiny] = 1.0
        zeros = (-low / scales).round()
        wide = [each.double().repeat_interleave(width, 1)[:, :columns] for each in (scales, zeros)]
        return cls(bits, width, wide[0], wide[1], weight == 0)

    def round(self, weights: torch.Tensor, columns: slice | torch.Tensor) -> torch.Tensor:
        """Codes, uint8, of the weights [out, C] of these columns."""
        zeros = self.zeros[:, columns]
        codes = (weights / self.scales[:, columns]).round().add_(zeros).clamp_(0, 2**self.bits - 1)
        return torch.where(self.zero_mask[:, columns], zeros, codes).to(torch.uint8)

    def values(self, codes: torch.Tensor, columns: slice | torch.Tensor) -> torch.Tensor:
        return self.scales[:, columns] * (codes - self.zeros[:, columns])

    def packed(self, codes: torch.Tensor) -> PackedMatrix:
        first = slice(None, None, self.group)  # of each group
        return PackedMatrix.of(
            codes,
            self.scales[:, first].float().contiguous(),
            self.zeros[:, first].to(torch.uint8).contiguous(),
            self.bits,
            self.group,
        )


def _inverse_factor(squares: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of `squares`, damped. An input that is always zero is damped alone: its weights are rounded to nearest."""
    mean = float(squares.diagonal().mean())
    damped = squares + torch.eye(len(squares), dtype=squares.dtype) * (damping * mean if mean > 0 else 1.0)
    factor, failed = torch.linalg.cholesky_ex(damped)
    if not failed:
        upper: torch.Tensor
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        if not failed:
            return upper
    raise NotInvertible("XᵀX of the inputs is not finite or not positive definite")
