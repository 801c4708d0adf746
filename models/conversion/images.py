"""Image operations that become LiteRT builtins: padding, dilating, interleaving, windows.

Images are [B, C, H, W]. `tfl.pad` supports at most five axes and reshapes are free, so every operation works on one
axis at a time, on views of rank 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F


class Windows:
    """The windows of a kernel, as one strided slice of the padded image for each kernel element."""

    def __init__(
        self,
        x: torch.Tensor,
        grad: torch.Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        self._x = x
        self._count = grad.shape[2:]
        self._stride = stride
        self._padding = padding
        self._starts = [
            (i * dilation[0], j * dilation[1]) for i in range(kernel[0]) for j in range(kernel[1])
        ]
        reach = [(n - 1) * s + 1 for n, s in zip(self._count, stride, strict=True)]
        self._spread = reach
        self._extent = [r + d * (k - 1) for r, d, k in zip(reach, dilation, kernel, strict=True)]

    def elements(self, fill: float) -> list[torch.Tensor]:
        """The image's value at each kernel element, [B, C, windows down, windows across] each."""
        x = fit(self._x, self._padding, self._extent, fill)
        (down, across), (high, wide) = self._stride, self._spread
        return [x[:, :, i : i + high : down, j : j + wide : across] for i, j in self._starts]

    def scatter_add(self, shares: list[torch.Tensor]) -> torch.Tensor:
        """The image that sums each kernel element's share, shaped as in `elements`, at its original position."""
        total: torch.Tensor | None = None
        for share, start in zip(shares, self._starts, strict=True):
            placed = fit(dilate(share, self._stride), start, self._extent)
            total = placed if total is None else total + placed
        assert total is not None
        return fit(total, [-before for before in self._padding], self._x.shape[2:])


def dilate(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Inserts `stride` - 1 zeros between neighbouring pixels."""
    rows, channels, height, width = x.shape
    down, across = stride
    if across > 1:
        x = F.pad(x.reshape(rows * channels * height, width, 1), [0, across - 1])
        x = x.reshape(rows, channels, height, width * across)[:, :, :, : (width - 1) * across + 1]
        width = x.shape[3]
    if down > 1:
        x = F.pad(x.reshape(rows * channels, height, 1, width), [0, 0, 0, down - 1])
        x = x.reshape(rows, channels, height * down, width)[:, :, : (height - 1) * down + 1]
    return x


def interleave(parts: list[torch.Tensor], axis: int) -> torch.Tensor:
    """Interleaves images pixel by pixel along `axis`."""
    if len(parts) == 1:
        return parts[0]
    rows, channels, height, width = parts[0].shape
    flat = torch.stack([part.reshape(rows * channels, height, width) for part in parts], axis)
    if axis == 2:
        return flat.reshape(rows, channels, height * len(parts), width)
    return flat.reshape(rows, channels, height, width * len(parts))


def fit(x: torch.Tensor, before: Sequence[int], size: Sequence[int], fill: float = 0.0) -> torch.Tensor:
    """The image with `before` (rows, columns) added at its beginning, removed if negative, and padded or cut to `size`."""
    for axis in (0, 1):
        x = pad(x, axis, before[axis], size[axis] - before[axis] - x.shape[2 + axis], fill)
    return x


def pad(x: torch.Tensor, axis: int, before: int, after: int, fill: float) -> torch.Tensor:
    """Adds rows (axis 0) or columns (axis 1) at both ends of an image, or removes them if negative."""
    cut_before, cut_after = max(0, -before), max(0, -after)
    if cut_before or cut_after:
        x = x.narrow(2 + axis, cut_before, x.shape[2 + axis] - cut_before - cut_after)
    before, after = max(0, before), max(0, after)
    if before or after:
        x = F.pad(x, [0, 0, before, after] if axis == 0 else [before, after, 0, 0], value=fill)
    return x
