"""TensorFlow gradients that the converter does not support, in operations that become LiteRT builtins.

TensorFlow has fused gradient operations (`ReluGrad`, `Conv2DBackpropFilter`, `MaxPoolGrad`), which no LiteRT runtime has.
While a training step is traced, the forward pass of a Keras model does not change; only the gradients that `tf.gradients` uses
for operations in `OVERRIDES` are ours.

Shapes: B rows, H by W pixels, C channels in, O channels out; kernels are [kh, kw, C, O]. All sizes are known during tracing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_client.train.tensorflow_import import tf
from models.conversion.convolution import NoGradient

LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Windows:
    """The windows [B, oh, ow, …] of a kernel in an image [B, H, W, C].

    Attributes:
        size: (H, W).
        count: (oh, ow).
        before: pixels of padding above and to the left.
    """

    size: tuple[int, int]
    count: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]

    @classmethod
    def of(
        cls, x: tf.Tensor, y: tf.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: bytes
    ) -> Windows:
        size, count = (tuple(map(int, each.shape[1:3])) for each in (x, y))
        reach = [(n - 1) * s + k for n, s, k in zip(count, stride, kernel, strict=True)]
        missing = [max(r - n, 0) // 2 if padding == b"SAME" else 0 for r, n in zip(reach, size, strict=True)]
        return cls(size, count, tuple(kernel), tuple(stride), tuple(missing))  # type: ignore[arg-type]

    @property
    def positions(self) -> list[tuple[int, int]]:
        """The position of each kernel element in a window, in reading order."""
        return list(itertools.product(range(self.kernel[0]), range(self.kernel[1])))

    @property
    def reach(self) -> tuple[int, int]:
        """The pixels that all windows together span, including padding."""
        high, wide = ((n - 1) * s + k for n, s, k in zip(self.count, self.stride, self.kernel, strict=True))
        return high, wide

    def pad(self, x: tf.Tensor, fill: float) -> tf.Tensor:
        """The padded image [B, *reach, C]."""
        high, wide = self.reach
        (top, left), (height, width) = self.before, self.size
        edges = [[0, 0], [top, max(high - top - height, 0)], [left, max(wide - left - width, 0)], [0, 0]]
        if any(map(any, edges)):
            x = tf.pad(x, edges, constant_values=fill)
        return x[:, :high, :wide]

    def elements(self, x: tf.Tensor, fill: float) -> list[tf.Tensor]:
        """The elements of all windows at each kernel position, [B, oh, ow, C] each."""
        image, (down, across) = self.pad(x, fill), self.stride
        high, wide = ((n - 1) * s + 1 for n, s in zip(self.count, self.stride, strict=True))
        return [image[:, i : i + high : down, j : j + wide : across] for i, j in self.positions]

    def scatter_add(self, shares: Sequence[tf.Tensor]) -> tf.Tensor:
        """The image [B, H, W, C] in which every pixel is the sum of its shares, one [B, oh, ow, C] for each kernel position."""
        high, wide = self.reach
        (top, left), (height, width) = self.before, self.size
        image = functools.reduce(
            tf.add,
            (
                tf.pad(
                    spread, [[0, 0], [i, high - i - spread.shape[1]], [j, wide - j - spread.shape[2]], [0, 0]]
                )
                for (i, j), spread in zip(self.positions, map(self._dilate, shares), strict=True)
            ),
        )
        below, right = max(height + top - high, 0), max(width + left - wide, 0)
        if below or right:
            image = tf.pad(image, [[0, 0], [0, below], [0, right], [0, 0]])
        return image[:, top : top + height, left : left + width]

    def _dilate(self, share: tf.Tensor) -> tf.Tensor:
        """Inserts zeros between neighbours for a stride; `tfl.pad` supports few axes, so one at a time."""
        rows, high, wide, channels = share.shape
        down, across = self.stride
        if across > 1:
            share = tf.pad(
                tf.reshape(share, [-1, wide, 1, channels]), [[0, 0], [0, 0], [0, across - 1], [0, 0]]
            )
            share = tf.reshape(share, [rows, high, wide * across, channels])[:, :, : (wide - 1) * across + 1]
        if down > 1:
            flat = share.shape[2] * channels
            share = tf.pad(tf.reshape(share, [rows, high, 1, flat]), [[0, 0], [0, 0], [0, down - 1], [0, 0]])
            share = tf.reshape(share, [rows, high * down, -1, channels])[:, : (high - 1) * down + 1]
        return share


def convolution(op: Any, dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The image's gradient is a transposed convolution; the kernel's is a convolution in which rows act as channels."""
    x, kernel = op.inputs
    _require_plain(op)
    stride, padding = op.get_attr("strides")[1:3], op.get_attr("padding")
    windows = Windows.of(x, dy, kernel.shape[:2], stride, padding)
    dx = tf.nn.conv2d_transpose(dy, kernel, x.shape, stride, padding.decode())
    rows_last = tf.transpose(windows.pad(x, 0.0), [3, 1, 2, 0])
    dw = tf.nn.conv2d(rows_last, tf.transpose(dy, [1, 2, 0, 3]), 1, "VALID", dilations=stride)
    return dx, tf.transpose(dw, [1, 2, 0, 3])


def depthwise_convolution(op: Any, dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Computed one kernel position at a time. The kernel is [kh, kw, C, M]: M channels out for each one in."""
    x, kernel = op.inputs
    _require_plain(op)
    windows = Windows.of(x, dy, kernel.shape[:2], op.get_attr("strides")[1:3], op.get_attr("padding"))
    grouped = tf.reshape(dy, [*dy.shape[:3], *kernel.shape[2:]])
    sums = [tf.reduce_sum(part[..., None] * grouped, [0, 1, 2]) for part in windows.elements(x, 0.0)]
    shares = [tf.reduce_sum(grouped * kernel[i, j], -1) for i, j in windows.positions]
    return windows.scatter_add(shares), tf.reshape(tf.stack(sums), kernel.shape)


def max_pool(op: Any, dy: tf.Tensor) -> tf.Tensor:
    """Each window's gradient goes to its first maximum in reading order."""
    (x,), (y,), windows = op.inputs, op.outputs, _pool_windows(op, dy)
    open_, shares = tf.ones_like(dy), []
    for part in windows.elements(x, LOWEST):
        first = tf.cast(tf.equal(part, y), dy.dtype) * open_
        open_ -= first
        shares.append(first * dy)
    return windows.scatter_add(shares)


def average_pool(op: Any, dy: tf.Tensor) -> tf.Tensor:
    """Every pixel of a window gets the same share; padding does not count."""
    windows = _pool_windows(op, dy)
    axes = zip(windows.size, windows.count, windows.kernel, windows.stride, windows.before, strict=True)
    counted = np.multiply.outer(*(_inside(*axis) for axis in axes))
    share = dy * tf.constant(1 / counted[None, :, :, None], tf.float32)
    return windows.scatter_add([share] * len(windows.positions))


def _pool_windows(op: Any, dy: tf.Tensor) -> Windows:
    sizes = op.get_attr("ksize")[1:3], op.get_attr("strides")[1:3]
    return Windows.of(op.inputs[0], dy, *sizes, op.get_attr("padding"))


def _inside(size: int, count: int, kernel: int, stride: int, before: int) -> np.ndarray[Any, Any]:
    """Number of pixels of each window along one axis that lie within the image."""
    starts = np.arange(count) * stride - before
    inside: np.ndarray[Any, Any] = np.minimum(starts + kernel, size) - np.maximum(starts, 0)
    return inside


def gather(op: Any, dy: tf.Tensor) -> list[tf.Tensor | None]:
    """Gradient of an embedding [V, D]: the transposed one-hot matrix of the ids times the gradient; LiteRT has no such scatter."""
    table, ids = op.inputs[:2]
    if tf.get_static_value(op.inputs[2]) != 0 or op.get_attr("batch_dims") or len(table.shape) != 2:
        raise NoGradient("a gather that does not select whole rows of a table; use an Embedding layer")
    one_hot = tf.cast(tf.equal(tf.reshape(ids, [-1, 1]), tf.range(table.shape[0], dtype=ids.dtype)), dy.dtype)
    return [tf.matmul(one_hot, tf.reshape(dy, [-1, table.shape[1]]), transpose_a=True), None, None]


def bias(op: Any, dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return dy, tf.reduce_sum(dy, list(range(len(dy.shape) - 1)))


def leaky_relu(op: Any, dy: tf.Tensor) -> tf.Tensor:
    positive = tf.cast(op.inputs[0] > 0, dy.dtype)
    return dy * (positive + op.get_attr("alpha") * (1 - positive))


def _from_output(gradient: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[..., tf.Tensor]:
    """The gradient of an elementwise operation as a function of its output y and of dy."""
    return lambda op, dy: gradient(op.outputs[0], dy)


def _require_plain(op: Any) -> None:
    if any(each != 1 for each in op.get_attr("dilations")) or op.get_attr("data_format") != b"NHWC":
        raise NoGradient(
            "a convolution with a dilation_rate, or with channels_first; use strides, channels_last"
        )


_GRADIENTS: dict[str, Callable[..., Any]] = {
    "AvgPool": average_pool,
    "BiasAdd": bias,
    "Conv2D": convolution,
    "DepthwiseConv2dNative": depthwise_convolution,
    "Elu": _from_output(lambda y, dy: dy * (1 + tf.minimum(y, 0.0))),
    "GatherV2": gather,
    "LeakyRelu": leaky_relu,
    "MaxPool": max_pool,
    "Relu": _from_output(lambda y, dy: dy * tf.cast(y > 0, dy.dtype)),
    "Relu6": _from_output(lambda y, dy: dy * tf.cast(y > 0, dy.dtype) * tf.cast(y < 6, dy.dtype)),
    "Rsqrt": _from_output(lambda y, dy: dy * -0.5 * y * y * y),
    "Sigmoid": _from_output(lambda y, dy: dy * y * (1 - y)),
    "Tanh": _from_output(lambda y, dy: dy * (1 - y * y)),
}

OVERRIDES = {operation: f"Fedloop{operation}" for operation in _GRADIENTS}
"""For `Graph.gradient_override_map`."""

for _operation, _gradient in _GRADIENTS.items():
    tf.RegisterGradient(OVERRIDES[_operation])(_gradient)
