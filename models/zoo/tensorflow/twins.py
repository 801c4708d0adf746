"""The same architectures in TensorFlow, for clients that train there.

A twin has two parts: the axis order of every tensor, and the forward pass. Tensor names stay the PyTorch `state_dict`
keys, so a TensorFlow client takes and returns canonical params; only the layout of each tensor changes. Convolution
kernels are OIHW in PyTorch and HWIO in TensorFlow, dense kernels are transposed, and a dense layer after a flatten sees
its inputs in another order, C·H·W against H·W·C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.train.tensorflow_import import tf

Array = npt.NDArray[Any]
Weights = Mapping[str, tf.Tensor]


@dataclass(frozen=True)
class Layout:
    """The axis order of one tensor in both frameworks.

    Attributes:
        axes: axis i in TensorFlow is axis `axes[i]` in PyTorch.
        image: (C, H, W) for a dense kernel after a flatten. `axes` then refers to its four-axis form, [out, C, H, W]
            in PyTorch.
    """

    axes: tuple[int, ...]
    image: tuple[int, int, int] | None = None


BIAS = Layout((0,))
DENSE = Layout((1, 0))
CONVOLUTION = Layout((2, 3, 1, 0))


@dataclass(frozen=True)
class Twin:
    """One architecture in TensorFlow.

    Attributes:
        layouts: of every tensor, by its `state_dict` key, in the order of the PyTorch module.
        logits: (weights in TensorFlow layout, x [B, …]) -> [B, classes]; pure and deterministic.
    """

    layouts: Mapping[str, Layout]
    logits: Callable[[Weights, tf.Tensor], tf.Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.layouts)

    def to_tensorflow(self, name: str, array: Array) -> Array:
        """A canonical tensor in TensorFlow's layout, C order."""
        layout = self.layouts[name]
        if layout.image is None:
            return np.ascontiguousarray(array.transpose(layout.axes))
        turned = array.reshape(-1, *layout.image).transpose(layout.axes)
        return np.ascontiguousarray(turned.reshape(-1, len(array)))

    def from_tensorflow(self, name: str, array: Array) -> Array:
        """The exact inverse of `to_tensorflow`."""
        layout = self.layouts[name]
        inverse = np.argsort(layout.axes)
        if layout.image is None:
            return np.ascontiguousarray(array.transpose(inverse))
        depth, height, width = layout.image
        turned = array.reshape(height, width, depth, -1).transpose(inverse)
        return np.ascontiguousarray(turned.reshape(len(turned), -1))


def dense_stack(layers: Sequence[str]) -> Twin:
    """Dense layers with ReLU between them, over the flattened input. `layers`: their names, in order."""
    layouts = {name: layout for layer in layers for name, layout in _named(layer, DENSE).items()}
    return Twin(layouts, lambda weights, x: _dense_layers(weights, layers, _flat(weights, layers[0], x)))


def small_cnn(image_shape: tuple[int, int, int], channels: Sequence[int], hidden: int) -> Twin:
    """`models.zoo.cnn.CNN` in TensorFlow. `image_shape` is (C, H, W), `channels` those of its two convolutions."""
    depth, height, width = image_shape
    halved = (channels[1], -(-height // 2), -(-width // 2))
    head = ["hidden", "fc"] if hidden else ["fc"]
    layouts = _named("conv1", CONVOLUTION) | _named("conv2", CONVOLUTION)
    layouts |= _named(head[0], Layout((2, 3, 1, 0), image=halved))
    for layer in head[1:]:
        layouts |= _named(layer, DENSE)

    def logits(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        x = tf.transpose(tf.reshape(x, [-1, depth, height, width]), [0, 2, 3, 1])
        x = tf.nn.relu(_convolution(weights, "conv1", x, stride=1))
        x = tf.nn.relu(_convolution(weights, "conv2", x, stride=2))
        return _dense_layers(weights, head, _flat(weights, head[0], x))

    return Twin(layouts, logits)


def _named(layer: str, kernel: Layout) -> dict[str, Layout]:
    return {f"{layer}.weight": kernel, f"{layer}.bias": BIAS}


def _convolution(weights: Weights, layer: str, x: tf.Tensor, stride: int) -> tf.Tensor:
    # PyTorch pads a 3x3 kernel by one on every side. "SAME" pads only on the far side at stride 2.
    padded = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
    return tf.nn.conv2d(padded, weights[f"{layer}.weight"], stride, "VALID") + weights[f"{layer}.bias"]


def _dense_layers(weights: Weights, layers: Sequence[str], x: tf.Tensor) -> tf.Tensor:
    for position, layer in enumerate(layers):
        x = tf.matmul(x, weights[f"{layer}.weight"]) + weights[f"{layer}.bias"]
        x = tf.nn.relu(x) if position + 1 < len(layers) else x
    return x


def _flat(weights: Weights, layer: str, x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, [-1, weights[f"{layer}.weight"].shape[0]])
