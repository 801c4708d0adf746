"""Gradients that the converter does not support, in operations that become LiteRT builtins.

PyTorch has fused backward operations for convolution, pooling and embedding. While a training
step is traced, the functions in `REPLACEMENTS` replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from models.conversion.convolution import NoGradient, convolution_backward
from models.conversion.images import Windows

aten = torch.ops.aten

LOWEST = torch.finfo(torch.float32).min


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
    """Gradient of max pooling: each window's gradient goes to its first maximum in reading order, as in PyTorch.

    The windows' elements are processed one kernel position at a time. `indices` of the forward
    operation are not used: LiteRT's max pooling does not return them.
    """
    stride = list(stride) or list(kernel_size)
    windows = Windows(x, grad, kernel_size, stride, padding, dilation)
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
    return windows.scatter_add(shares)


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
        NoGradient: `ceil_mode`, whose last windows have another divisor.
    """
    if ceil_mode:
        raise NoGradient("aten.avg_pool2d_backward with ceil_mode=True; pad the image instead")
    stride = list(stride) or list(kernel_size)
    windows = Windows(x, grad, kernel_size, stride, padding, (1, 1))
    if count_include_pad or divisor_override or not any(padding):
        share = grad / (divisor_override or kernel_size[0] * kernel_size[1])
    else:
        counted = F.avg_pool2d(torch.ones(1, 1, *x.shape[2:]), list(kernel_size), stride, list(padding))
        share = grad * (1 / (counted * kernel_size[0] * kernel_size[1]))
    return windows.scatter_add([share] * (kernel_size[0] * kernel_size[1]))


def embedding_backward(
    grad: torch.Tensor, ids: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """Gradient of an embedding table: the transposed one-hot matrix of the ids times the gradient.

    A scatter would be cheaper, but LiteRT cannot prepare the converter's version of it.

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
    """Zeros: LiteRT has no operation for uninitialized memory, which some gradients fill afterwards."""
    return torch.zeros(x.shape, dtype=layout.get("dtype") or x.dtype)


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: convolution_backward,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.empty_like.default: empty_like,
}
"""For `make_fx(…, decomposition_table=REPLACEMENTS)`."""
