"""Our gradients against PyTorch's own, over many shapes, strides, paddings, dilations and groups.

Inputs are small whole numbers, so sums are exact in any order and results must be equal; maxima tie often.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from models.conversion import convolution, gradients
from models.conversion.convolution import NoGradient

pytestmark = pytest.mark.slow

one_to_three = st.integers(1, 3)


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, Any]:
    groups, rows = draw(one_to_three), draw(one_to_three)
    kernel, stride, dilation = (
        [draw(one_to_three), draw(one_to_three)] for _ in ("kernel", "stride", "dilation")
    )
    padding = [draw(st.integers(0, 4)), draw(st.integers(0, 2))]
    smallest = [max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in zip(dilation, kernel, padding, strict=True)]
    depth, out = groups * draw(one_to_three), groups * draw(one_to_three)
    return {
        "x": (rows, depth, *(low + draw(st.integers(0, 5)) for low in smallest)),
        "weight": (out, depth // groups, *kernel),
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
    }


@settings(deadline=None, max_examples=150)
@given(convolutions(), st.integers(0, 2**31))
def test_convolution_has_pytorchs_gradients(shape: dict[str, Any], seed: int) -> None:
    x, weight = whole(shape["x"], seed), whole(shape["weight"], seed + 1)
    how = (shape["stride"], shape["padding"], shape["dilation"])
    grad = whole(F.conv2d(x, weight, None, *how, shape["groups"]).shape, seed + 2)
    rest = ([weight.shape[0]], *how, False, [0, 0], shape["groups"], [True, True, True])

    got = convolution.convolution_backward(grad, x, weight, *rest)

    for ours, theirs in zip(got, torch.ops.aten.convolution_backward(grad, x, weight, *rest), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@settings(deadline=None, max_examples=40)
@given(one_to_three, st.integers(1, 4), one_to_three, st.integers(0, 2), st.integers(1, 2), st.integers(0, 6))
def test_one_dimensional_convolution_has_pytorchs_gradients(
    channels: int, kernel: int, stride: int, padding: int, dilation: int, more: int
) -> None:
    x = whole((2, channels, max(1, dilation * (kernel - 1) + 1 - 2 * padding) + more), 1)
    weight = whole((3, channels, kernel), 2)
    grad = whole(F.conv1d(x, weight, None, stride, padding, dilation).shape, 3)
    rest = ([3], [stride], [padding], [dilation], False, [0], 1, [True, True, False])

    got = convolution.convolution_backward(grad, x, weight, *rest)

    theirs = torch.ops.aten.convolution_backward(grad, x, weight, *rest)
    torch.testing.assert_close(got[0], theirs[0], rtol=0, atol=0)
    torch.testing.assert_close(got[1], theirs[1], rtol=0, atol=0)
    assert got[2] is None


@st.composite
def poolings(draw: st.DrawFn) -> dict[str, Any]:
    kernel = [draw(st.integers(1, 4)), draw(st.integers(1, 4))]
    dilation = [draw(st.integers(1, 2)), draw(st.integers(1, 2))]
    return {
        "kernel": kernel,
        "dilation": dilation,
        "stride": draw(st.sampled_from([[], [1, 1], [2, 3], [3, 1]])),
        "padding": [draw(st.integers(0, k // 2)) for k in kernel],
        "ceil": draw(st.booleans()),
        "x": (
            2,
            2,
            *(d * (k - 1) + 1 + draw(st.integers(0, 6)) for d, k in zip(dilation, kernel, strict=True)),
        ),
    }


@settings(deadline=None, max_examples=150)
@given(poolings(), st.integers(0, 2**31))
def test_max_pooling_gives_each_gradient_to_the_first_maximum_as_pytorch_does(
    shape: dict[str, Any], seed: int
) -> None:
    x = whole(shape["x"], seed, high=2)
    how = (shape["kernel"], shape["stride"], shape["padding"], shape["dilation"], shape["ceil"])
    pooled, indices = torch.ops.aten.max_pool2d_with_indices(x, *how)
    grad = whole(pooled.shape, seed + 1)

    got = gradients.max_pool2d_backward(grad, x, *how, indices)

    theirs = torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *how, indices)
    torch.testing.assert_close(got, theirs, rtol=0, atol=0)


@settings(deadline=None, max_examples=80)
@given(poolings(), st.booleans(), st.sampled_from([None, 3]))
def test_average_pooling_has_pytorchs_gradient(
    shape: dict[str, Any], count_padding: bool, divisor: int | None
) -> None:
    x = whole(shape["x"], 1)
    how = (shape["kernel"], shape["stride"], shape["padding"], False, count_padding, divisor)
    grad = whole(torch.ops.aten.avg_pool2d(x, *how).shape, 2)

    got = gradients.avg_pool2d_backward(grad, x, *how)

    torch.testing.assert_close(got, torch.ops.aten.avg_pool2d_backward(grad, x, *how), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("padding_idx", [-1, 0, 4])
def test_embedding_has_pytorchs_gradient(padding_idx: int) -> None:
    ids = torch.tensor([[0, 4, 4], [2, 0, 1]], dtype=torch.int32)
    grad = whole((2, 3, 5), 1)

    got = gradients.embedding_backward(grad, ids, 6, padding_idx, False)

    theirs = torch.ops.aten.embedding_dense_backward(grad, ids, 6, padding_idx, False)
    torch.testing.assert_close(got, theirs, rtol=0, atol=0)


def test_gradients_that_are_not_written_are_refused_by_name() -> None:
    x, weight, grad = whole((1, 2, 4, 4), 1), whole((2, 2, 3, 3), 2), whole((1, 2, 6, 6), 3)
    with pytest.raises(NoGradient, match="transposed convolution"):
        convolution.convolution_backward(
            grad, x, weight, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1, [True, True, False]
        )
    with pytest.raises(NoGradient, match=r"avg_pool2d_backward with ceil_mode"):
        gradients.avg_pool2d_backward(grad, x, [2, 2], [], [0, 0], True, True, None)
    with pytest.raises(NoGradient, match="scale_grad_by_freq"):
        gradients.embedding_backward(grad, torch.zeros(1, dtype=torch.int32), 3, -1, True)


def whole(shape: tuple[int, ...] | torch.Size, seed: int, high: int = 5) -> torch.Tensor:
    """Whole numbers from -high to high."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, tuple(shape), generator=generator).float()
