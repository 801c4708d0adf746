"""Gradients of convolution, pooling and embedding, written in operations that become LiteRT builtins.

PyTorch has one fused backward operation for each of these, which the converter does not know. While a
training step is traced, these functions take their place. The order of the operations below matters:

- A convolution whose weight is *computed*, as every gradient's is, comes out wrong when the converter
  moves channels last and the weight's last steps were 4-D. Kernels are therefore flipped on one merged
  axis of a 3-D view, which also keeps REVERSE_V2 to a single axis; older runtimes return wrong numbers
  for several.
- `tfl.pad` takes at most five axes, so zeros are put between elements one axis at a time.

Shapes: B rows, C channels in, O channels out, H by W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

aten = torch.ops.aten

LOWEST = torch.finfo(torch.float32).min


class NoGradient(ValueError):
    """An operation whose gradient is not written here; the message names it and says what to use instead."""


def convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of a 1-D or 2-D convolution with respect to input, weight and bias, None where not asked for.

    Raises:
        NoGradient: a transposed or a 3-D convolution.
    """
    if transposed:
        raise NoGradient(
            "aten.convolution_backward of a transposed convolution; use upsampling and a convolution"
        )
    if x.dim() == 3:
        return _as_images(
            grad,
            x,
            weight,
            bias_sizes,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            output_mask,
        )
    if x.dim() != 4:
        raise NoGradient("aten.convolution_backward of a 3-D convolution; LiteRT trains 1-D and 2-D ones")
    wants_x, wants_weight, wants_bias = output_mask
    parts = _by_group(grad, x, weight, groups)
    grad_x = grad_weight = None
    if wants_x:
        grad_x = _joined([_conv_grad_x(g, a, w, stride, padding, dilation) for g, a, w in parts], 1)
    if wants_weight and groups == x.shape[1] and weight.shape[0] == groups:
        grad_weight = _depthwise_grad_weight(grad, x, weight, stride, padding, dilation)
    elif wants_weight:
        grad_weight = _joined([_conv_grad_weight(g, a, w, stride, padding, dilation) for g, a, w in parts], 0)
    return grad_x, grad_weight, grad.sum((0, 2, 3)) if wants_bias else None


def max_pool2d_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Gradient of max pooling: each window's goes to its first maximum in reading order, as in PyTorch.

    The window's elements are looked at one place of the kernel at a time. `indices`, which the forward
    operation would have to return, are not used: LiteRT's max pooling has none.
    """
    stride = list(stride) or list(kernel_size)
    windows = _Windows(x, grad, kernel_size, stride, padding, dilation)
    elements = windows.elements(LOWEST)
    highest = elements[0]
    for element in elements[1:]:
        highest = torch.maximum(highest, element)
    open_ = torch.ones_like(grad)
    shares = []
    for element in elements:
        first = (element == highest).to(grad.dtype) * open_
        open_ = open_ - first
        shares.append(first * grad)
    return windows.put_back(shares)


def avg_pool2d_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """Gradient of average pooling: every element of a window gets the same share.

    Raises:
        NoGradient: `ceil_mode`, whose last windows have a divisor of their own.
    """
    if ceil_mode:
        raise NoGradient("aten.avg_pool2d_backward with ceil_mode=True; pad the image instead")
    stride = list(stride) or list(kernel_size)
    windows = _Windows(x, grad, kernel_size, stride, padding, (1, 1))
    if count_include_pad or divisor_override or not any(padding):
        share = grad / (divisor_override or kernel_size[0] * kernel_size[1])
    else:
        counted = F.avg_pool2d(torch.ones(1, 1, *x.shape[2:]), list(kernel_size), stride, list(padding))
        share = grad * (1 / (counted * kernel_size[0] * kernel_size[1]))
    return windows.put_back([share] * (kernel_size[0] * kernel_size[1]))


def embedding_backward(
    grad: torch.Tensor, ids: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """Gradient of a table of embeddings: the compared one-hot of the ids, transposed, times the gradient.

    A scatter would do less work, but LiteRT refuses to prepare the one that the converter makes of it.

    Raises:
        NoGradient: `scale_grad_by_freq`.
    """
    if scale_grad_by_freq:
        raise NoGradient("aten.embedding_dense_backward with scale_grad_by_freq=True; leave it False")
    flat = ids.reshape(-1, 1)
    one_hot = (flat == torch.arange(num_weights, dtype=ids.dtype)).to(grad.dtype)
    if padding_idx >= 0:
        one_hot = one_hot * (flat != padding_idx).to(grad.dtype)
    return one_hot.transpose(0, 1) @ grad.reshape(-1, grad.shape[-1])


def empty_like(x: torch.Tensor, **layout: Any) -> torch.Tensor:
    """Zeros: memory that holds anything, which some gradients fill afterwards, is no operation of LiteRT."""
    return torch.zeros(x.shape, dtype=layout.get("dtype") or x.dtype)


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: convolution_backward,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.empty_like.default: empty_like,
}
"""For `make_fx(…, decomposition_table=REPLACEMENTS)`."""


def _as_images(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *rest: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """A 1-D convolution as one over images of height 1."""
    grad_x, grad_weight, grad_bias = convolution_backward(
        grad.unsqueeze(2), x.unsqueeze(2), weight.unsqueeze(2), bias_sizes, [1, *stride], [0, *padding], [1, *dilation], *rest
    )  # fmt: skip
    return (
        None if grad_x is None else grad_x.squeeze(2),
        None if grad_weight is None else grad_weight.squeeze(2),
        grad_bias,
    )


def _by_group(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, groups: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(grad, x, weight) of each group of channels."""
    if groups == 1:
        return [(grad, x, weight)]
    return list(zip(grad.chunk(groups, 1), x.chunk(groups, 1), weight.chunk(groups, 0), strict=True))


def _joined(parts: list[torch.Tensor], axis: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _conv_grad_x(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """The gradient, with zeros between its elements, convolved with the flipped kernel, channels swapped."""
    spread = _spread(grad, stride)
    for axis in (0, 1):
        reach = dilation[axis] * (weight.shape[2 + axis] - 1)
        before = reach - padding[axis]
        after = x.shape[2 + axis] + reach - before - spread.shape[2 + axis]
        spread = _padded(spread, axis, before, after, 0.0)
    flipped = _flipped(weight.transpose(0, 1))
    answer: torch.Tensor = aten.convolution(
        spread, flipped, None, [1, 1], [0, 0], list(dilation), False, [0, 0], 1
    )
    return answer


def _conv_grad_weight(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """The input convolved with the gradient: rows act as channels, stride and dilation change places."""
    for axis in (0, 1):
        needed = stride[axis] * (grad.shape[2 + axis] - 1) + dilation[axis] * (weight.shape[2 + axis] - 1) + 1
        x = _padded(x, axis, padding[axis], needed - padding[axis] - x.shape[2 + axis], 0.0)
    answer: torch.Tensor = aten.convolution(
        x.transpose(0, 1), grad.transpose(0, 1), None, list(dilation), [0, 0], list(stride), False, [0, 0], 1
    )
    return answer.transpose(0, 1)


def _depthwise_grad_weight(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """Each kernel element's gradient is a sum of products: cheaper than a convolution per channel."""
    windows = _Windows(x, grad, weight.shape[2:], stride, padding, dilation)
    sums = [(element * grad).sum((0, 2, 3)) for element in windows.elements(0.0)]
    return torch.stack(sums, -1).reshape(weight.shape)


class _Windows:
    """The windows that a kernel sees, as one strided slice of the padded image per kernel element."""

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
        x = self._x
        for axis in (0, 1):
            before = self._padding[axis]
            x = _padded(x, axis, before, self._extent[axis] - before - x.shape[2 + axis], fill)
        (down, across), (high, wide) = self._stride, self._spread
        return [x[:, :, i : i + high : down, j : j + wide : across] for i, j in self._starts]

    def put_back(self, shares: list[torch.Tensor]) -> torch.Tensor:
        """The image in which each kernel element's share, shaped as `elements`, is added where it came from."""
        total: torch.Tensor | None = None
        for share, start in zip(shares, self._starts, strict=True):
            placed = _spread(share, self._stride)
            for axis in (0, 1):
                after = self._extent[axis] - start[axis] - placed.shape[2 + axis]
                placed = _padded(placed, axis, start[axis], after, 0.0)
            total = placed if total is None else total + placed
        assert total is not None
        for axis in (0, 1):
            before = self._padding[axis]
            total = _padded(
                total, axis, -before, self._x.shape[2 + axis] + before - total.shape[2 + axis], 0.0
            )
        return total


def _spread(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """`stride` - 1 zeros between neighbouring pixels; one axis at a time, of rank 3 and 4 only."""
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


def _padded(x: torch.Tensor, axis: int, before: int, after: int, fill: float) -> torch.Tensor:
    """Rows (axis 0) or columns (axis 1) of an image added at either end, or cut off where negative."""
    cut_before, cut_after = max(0, -before), max(0, -after)
    if cut_before or cut_after:
        x = x.narrow(2 + axis, cut_before, x.shape[2 + axis] - cut_before - cut_after)
    before, after = max(0, before), max(0, after)
    if before or after:
        x = F.pad(x, [0, 0, before, after] if axis == 0 else [before, after, 0, 0], value=fill)
    return x


def _flipped(weight: torch.Tensor) -> torch.Tensor:
    """Kernels [O, C, kh, kw] turned by half a turn; see the module's story for why on a merged axis."""
    out, depth, height, width = weight.shape
    if height * width == 1:
        return weight
    return weight.reshape(out, depth, height * width).flip(2).reshape(out, depth, height, width)
