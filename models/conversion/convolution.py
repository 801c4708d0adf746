"""The gradient of a convolution, as convolutions.

A convolution with a *computed* weight, as in every gradient, is converted wrongly when the converter moves
channels last and the last operations on the weight are 4-D. So kernels are sliced and flipped on one
merged axis of a 3-D view. This also limits REVERSE_V2 to a single axis; older runtimes return wrong
values for several.

Shapes: B rows, C channels in, O channels out, H by W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.conversion.images import Windows, fit, interleave

aten = torch.ops.aten


class NoGradient(ValueError):
    """An operation whose gradient is not implemented; the message names it and an alternative."""


@dataclass(frozen=True)
class _Slide:
    """How the kernel moves over an image, down and across."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]


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
    """Gradients of a 1-D or 2-D convolution with respect to input, weight and bias, None if not requested by `output_mask`.

    Raises:
        NoGradient: a transposed or a 3-D convolution.
    """
    if transposed:
        raise NoGradient(
            "aten.convolution_backward of a transposed convolution; use upsampling and a convolution"
        )
    if x.dim() == 3:  # a 1-D convolution is one over images of height 1
        images = (grad.unsqueeze(2), x.unsqueeze(2), weight.unsqueeze(2))
        sizes = ([1, *stride], [0, *padding], [1, *dilation])
        grad_x, grad_weight, grad_bias = convolution_backward(
            *images, bias_sizes, *sizes, transposed, output_padding, groups, output_mask
        )
        return _without_height(grad_x), _without_height(grad_weight), grad_bias
    if x.dim() != 4:
        raise NoGradient("aten.convolution_backward of a 3-D convolution; LiteRT trains 1-D and 2-D ones")
    wants_x, wants_weight, wants_bias = output_mask
    slide = _Slide(stride, padding, dilation)
    parts = _split_groups(grad, x, weight, groups)
    grad_x = grad_weight = None
    if wants_x:
        grad_x = _concatenate([_conv_grad_x(g, a, w, slide) for g, a, w in parts], 1)
    if wants_weight and groups == x.shape[1] and weight.shape[0] == groups:
        grad_weight = _depthwise_grad_weight(grad, x, weight, slide)
    elif wants_weight:
        grad_weight = _concatenate([_conv_grad_weight(g, a, w, slide) for g, a, w in parts], 0)
    return grad_x, grad_weight, grad.sum((0, 2, 3)) if wants_bias else None


def _without_height(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.squeeze(2)


def _split_groups(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, groups: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    if groups == 1:
        return [(grad, x, weight)]
    return list(zip(grad.chunk(groups, 1), x.chunk(groups, 1), weight.chunk(groups, 0), strict=True))


def _concatenate(parts: list[torch.Tensor], axis: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _conv_grad_x(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, slide: _Slide) -> torch.Tensor:
    """The gradient convolved with the flipped kernel, channels swapped.

    At a stride above 1 the textbook method inserts zeros between the gradient's elements and mostly multiplies by
    them. Instead every s-th pixel, which only some kernel elements reach, is computed by its own small
    convolution, and the results are interleaved (Shi 2016, sub-pixel convolution). This halves the time of a step.
    """
    height, width = (-(-(x.shape[2 + k] + slide.padding[k]) // slide.stride[k]) for k in (0, 1))
    swapped = weight.transpose(0, 1)
    rows = []
    for down in _phases(weight.shape[2], slide.stride[0], slide.dilation[0]):
        columns = [
            _phase_grad_x(grad, swapped, down, across, (height, width))
            for across in _phases(weight.shape[3], slide.stride[1], slide.dilation[1])
        ]
        rows.append(interleave(columns, 3))
    image = interleave(rows, 2)
    return fit(image, [-before for before in slide.padding], x.shape[2:])


@dataclass(frozen=True)
class _Phase:
    """The kernel elements, along one axis, that reach the pixels of one remainder by the stride.

    Pixel v of the phase gets its m-th element times the gradient's element v - shift - m · dilation.
    """

    elements: tuple[int, ...]
    shift: int
    dilation: int


def _phases(kernel: int, stride: int, dilation: int) -> list[_Phase]:
    """One phase for each remainder; some have no elements."""
    phases = []
    for remainder in range(stride):
        elements = tuple(k for k in range(kernel) if k * dilation % stride == remainder)
        shift = (elements[0] * dilation - remainder) // stride if elements else 0
        phases.append(_Phase(elements, shift, dilation // math.gcd(stride, dilation)))
    return phases


def _phase_grad_x(
    grad: torch.Tensor, swapped: torch.Tensor, down: _Phase, across: _Phase, extent: tuple[int, int]
) -> torch.Tensor:
    """[B, C, *extent]: the pixels of one phase of rows and one of columns."""
    if not down.elements or not across.elements:
        return torch.zeros(grad.shape[0], swapped.shape[0], *extent)
    reach = [(len(phase.elements) - 1) * phase.dilation for phase in (down, across)]
    before = [down.shift + reach[0], across.shift + reach[1]]
    grad = fit(grad, before, [extent[0] + reach[0], extent[1] + reach[1]])
    part = _select_and_flip(swapped, down.elements, across.elements)
    return _convolve(grad, part, [1, 1], [down.dilation, across.dilation])


def _conv_grad_weight(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, slide: _Slide
) -> torch.Tensor:
    """The input convolved with the gradient: rows act as channels, stride and dilation are swapped."""
    needed = [
        s * (windows - 1) + d * (kernel - 1) + 1
        for s, d, windows, kernel in zip(
            slide.stride, slide.dilation, grad.shape[2:], weight.shape[2:], strict=True
        )
    ]
    rows = fit(x, slide.padding, needed).transpose(0, 1)
    return _convolve(rows, grad.transpose(0, 1), slide.dilation, slide.stride).transpose(0, 1)


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    answer: torch.Tensor = aten.convolution(
        x, weight, None, list(stride), [0, 0], list(dilation), False, [0, 0], 1
    )
    return answer


def _depthwise_grad_weight(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, slide: _Slide
) -> torch.Tensor:
    """A sum of products for each kernel element: cheaper than a convolution for each channel."""
    windows = Windows(x, grad, weight.shape[2:], slide.stride, slide.padding, slide.dilation)
    sums = [(element * grad).sum((0, 2, 3)) for element in windows.elements(0.0)]
    return torch.stack(sums, -1).reshape(weight.shape)


def _select_and_flip(weight: torch.Tensor, down: Sequence[int], across: Sequence[int]) -> torch.Tensor:
    """The given rows and columns of kernels [O, C, kh, kw], rotated by half a turn.

    The module's docstring explains the merged axis.
    """
    out, depth, height, width = weight.shape
    merged = weight.reshape(out, depth, height * width)
    if list(down) == list(range(height)) and list(across) == list(range(width)):
        rotated = merged.flip(2) if height * width > 1 else merged
    else:
        indices = [i * width + j for i in reversed(down) for j in reversed(across)]
        rotated = torch.cat([merged[:, :, index : index + 1] for index in indices], 2)
    return rotated.reshape(out, depth, len(down), len(across))
