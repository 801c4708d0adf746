"""Local training in TensorFlow.

The device defines no architectures, so the model is passed in as a `Twin`: a forward pass, and the conversion between
canonical params and TensorFlow's layout. One traced function takes a step of any client rule on a batch of any size:
a plain step has `mu` and `offset` zero, which costs two additions and saves a second graph. Momentum and clipping, which cost more,
have a graph of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edge_client.data.examples import PADDING, QUANTITY_PADDING, Examples
from edge_client.train.tensorflow_import import tf
from strategies.client_rules import CLIP_EPSILON, Correction
from strategies.params import Params, zeros_like
from strategies.params import Tensors as NamedArrays

Tensors = dict[str, tf.Tensor]


class Twin(Protocol):
    """A model for this runtime, with the names of the canonical params."""

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors of the model."""

    @property
    def logits(self) -> Callable[[Mapping[str, tf.Tensor], tf.Tensor], tf.Tensor]:
        """(weights in TensorFlow layout, x [B, …]) -> [B, (T,) classes]; without randomness."""

    def to_tensorflow(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A canonical tensor in TensorFlow's layout."""

    def from_tensorflow(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The exact inverse of `to_tensorflow`."""


class TensorFlowRuntime:
    """Runs one twin repeatedly, with params from outside."""

    name = "tensorflow"

    def __init__(self, twin: Twin, trainable: Sequence[str] | None = None) -> None:
        """`trainable`: names of the tensors to train; default: all."""
        use_one_cpu_thread()
        self._twin = twin
        self.trainable: tuple[str, ...] = twin.names if trainable is None else tuple(trainable)
        self._steps: dict[bool, Callable[..., tuple[Tensors, Tensors, tf.Tensor]]] = {}
        self._infer = tf.function(twin.logits, reduce_retracing=True)

    def take_steps(
        self, params: NamedArrays, batches: Iterable[Examples], lr: float, correction: Correction, seed: int
    ) -> tuple[Params, list[float]]:
        correction.require_sgd(self.name)
        tensors = self._to_tensors({name: params[name] for name in self._twin.names})
        learned = {name: tensors.pop(name) for name in self.trainable}
        frozen, start = tensors, learned
        offset = self._to_tensors(correction.offset or zeros_like({n: params[n] for n in self.trainable}))
        rate, mu = tf.constant(lr, tf.float32), tf.constant(correction.mu, tf.float32)
        is_plain = correction.is_stepwise
        velocity = {} if is_plain else {name: tf.zeros_like(weight) for name, weight in learned.items()}
        momentum = tf.constant(correction.momentum, tf.float32)
        largest = tf.constant(correction.clip_grad_norm or np.inf, tf.float32)
        losses = []
        for batch in batches:
            x, y = tf.convert_to_tensor(batch.x), tf.convert_to_tensor(batch.y)
            if is_plain not in self._steps:
                self._steps[is_plain] = _traced_step(self._twin, learned, frozen, velocity, x, y)
            learned, velocity, loss = self._steps[is_plain](
                learned, frozen, start, offset, velocity, x, y, rate, mu, momentum, largest
            )
            learned = {**learned, **{name: start[name] for name in correction.fixed}}
            losses.append(float(loss))
        return {
            n: self._twin.from_tensorflow(n, value.numpy()).copy() for n, value in learned.items()
        }, losses

    def logits(self, params: NamedArrays, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        weights = self._to_tensors({name: params[name] for name in self._twin.names})
        answer: npt.NDArray[np.float32] = self._infer(weights, tf.convert_to_tensor(x)).numpy()
        return answer

    def _to_tensors(self, params: Params) -> Tensors:
        return {n: tf.convert_to_tensor(self._twin.to_tensorflow(n, value)) for n, value in params.items()}


def masked_cross_entropy(logits: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Mean cross-entropy over the labels that are not `PADDING`. `logits`: [B, (T,) C], `y`: int32 [B, (T)]."""
    counted = tf.cast(tf.not_equal(y, PADDING), logits.dtype)
    labels = tf.maximum(y, 0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_sum(losses * counted) / tf.reduce_sum(counted)


def squared_error(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Mean squared error over the labels that are not `QUANTITY_PADDING`. `outputs`: [B, 1], `y`: float32 [B]."""
    counted = tf.cast(y > QUANTITY_PADDING / 2, outputs.dtype)
    errors = (tf.squeeze(outputs, -1) - y * counted) * counted
    return tf.reduce_sum(tf.square(errors)) / tf.reduce_sum(counted)


def use_one_cpu_thread() -> None:
    """Restricts TensorFlow to one thread and no GPU: devices are shared with their user, and workers share cores.

    If TensorFlow is already initialized in this process, its settings stay.
    """
    try:
        tf.config.set_visible_devices([], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:
        return


def _traced_step(
    twin: Twin, learned: Tensors, frozen: Tensors, velocity: Tensors, x: tf.Tensor, y: tf.Tensor
) -> Callable[..., tuple[Tensors, Tensors, tf.Tensor]]:
    """One step (`strategies.client_rules`) as a graph, for batches of any size. `velocity`: empty for plain steps."""

    def step(
        learned: Tensors,
        frozen: Tensors,
        start: Tensors,
        offset: Tensors,
        velocity: Tensors,
        x: tf.Tensor,
        y: tf.Tensor,
        lr: tf.Tensor,
        mu: tf.Tensor,
        momentum: tf.Tensor,
        largest: tf.Tensor,
    ) -> tuple[Tensors, Tensors, tf.Tensor]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(learned)
            loss_of = squared_error if y.dtype.is_floating else masked_cross_entropy
            loss = loss_of(twin.logits({**frozen, **learned}, x), y)
        gradients = tape.gradient(loss, learned, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        moves = {
            name: gradients[name] + mu * (weight - start[name]) + offset[name]
            for name, weight in learned.items()
        }
        if velocity:
            norm = tf.linalg.global_norm(list(moves.values()))
            factor = tf.minimum(1.0, largest / (norm + CLIP_EPSILON))
            moves = velocity = {
                name: momentum * velocity[name] + factor * move for name, move in moves.items()
            }
        return {name: weight - lr * moves[name] for name, weight in learned.items()}, velocity, loss

    scalar = tf.TensorSpec([], tf.float32)
    weights = _specs(learned)
    batch = [_any_size(x), _any_size(y)]
    signature = [weights, _specs(frozen), weights, weights, _specs(velocity), *batch, *[scalar] * 4]
    traced: Callable[..., tuple[Tensors, Tensors, tf.Tensor]] = tf.function(step, input_signature=signature)
    return traced


def _specs(tensors: Tensors) -> dict[str, tf.TensorSpec]:
    return {name: tf.TensorSpec(value.shape, value.dtype) for name, value in tensors.items()}


def _any_size(batch: tf.Tensor) -> tf.TensorSpec:
    """The shape of a batch with an unknown first axis, so that a shorter last batch needs no new graph."""
    return tf.TensorSpec([None, *batch.shape[1:]], batch.dtype)
