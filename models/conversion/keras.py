"""From a Keras model to a training artifact: the same two signatures, through TensorFlow and its own converter.

    1. build the model, and refuse layers that some runtime cannot train (`models.zoo.tensorflow.keras`)
    2. a training step and the logits as pure functions of the batch and all float tensors (`stateless_call`);
       gradients of single operations are replaced by builtin ones (`models.conversion.keras_gradients`)
    3. both as signatures of one `.tflite`, with builtin operations only

The rest of an export is the same for all models (`models.conversion.convert`). The golden answers come from TensorFlow's own gradients
of the model as the user wrote it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.train.tensorflow_import import tf
from edge_client.train.tensorflow_trainer import TensorFlowRuntime, squared_error
from edge_client.wire.manifest import TensorSpec, signature_name
from models.conversion.convolution import NoGradient
from models.conversion.keras_gradients import OVERRIDES
from models.conversion.trace import NotConvertible, NotTraceable, not_convertible
from models.zoo.tensorflow.keras import KerasSpec, KerasUnfit


class KerasProgram:
    """Both signatures of a Keras model for batches of exactly `batch_size` rows, as `models.conversion.convert.TorchProgram`.

    Raises:
        NotTraceable: it has a layer that some runtime cannot train, or one without a gradient in builtin operations.
    """

    framework = "TensorFlow"
    makers: tuple[str, ...] = ("tensorflow", "tensorflow-cpu", "keras", "ai-edge-litert")

    def __init__(self, spec: KerasSpec, batch_size: int) -> None:
        try:
            self._model = spec.require_trainable()
        except KerasUnfit as error:
            raise NotTraceable(str(error)) from error
        self._spec, self._batch_size = spec, batch_size
        self.values: Mapping[str, npt.NDArray[np.float32]] = self._model.params()
        self.tensors = tuple(
            TensorSpec(name, signature_name(name), value.shape, name in self._model.trainable)
            for name, value in self.values.items()
        )
        if len({tensor.signature_name for tensor in self.tensors}) < len(self.tensors):
            raise NotTraceable("two weights would have one name in the signatures; rename their layers")

    @property
    def content(self) -> Sequence[bytes]:
        """The configuration of the layers, which determines the graphs of built-in layers."""
        return [self._model.model.to_json().encode(), str(self._batch_size).encode()]

    def reference(self) -> TensorFlowRuntime:
        """The original model with TensorFlow's own gradients."""
        return TensorFlowRuntime(self._model, trainable=self._model.trainable)

    def tflite(self) -> bytes:
        """Both signatures as one file.

        Raises:
            NotConvertible: an operation has no builtin equivalent.
        """
        try:
            train, infer = self._trace(self._train, ("x", "y", "lr")), self._trace(self._infer, ("x",))
        except (NoGradient, LookupError) as error:
            raise NotConvertible(f"no LiteRT gradient for {error}") from error
        return convert_functions(train=train, infer=infer)

    def _trace(self, function: Callable[..., dict[str, tf.Tensor]], first: Sequence[str]) -> Any:
        spec, rows = self._spec, self._batch_size
        label_shape = spec.input_shape if spec.task == "next_token" else ()
        label_dtype = tf.float32 if spec.task == "regression" else tf.int32
        known = {
            "x": tf.TensorSpec((rows, *spec.input_shape), spec.input_dtype, "x"),
            "y": tf.TensorSpec((rows, *label_shape), label_dtype, "y"),
            "lr": tf.TensorSpec((), tf.float32, "lr"),
        }
        weights = [tf.TensorSpec(t.shape, tf.float32, t.signature_name) for t in self.tensors]
        signature = [*(known[name] for name in first), *weights]
        return tf.function(function, input_signature=signature, autograph=False)

    def _train(self, x: tf.Tensor, y: tf.Tensor, lr: tf.Tensor, *tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        learned = {t.signature_name: w for t, w in zip(self.tensors, tensors, strict=True) if t.trainable}
        with tf.compat.v1.get_default_graph().gradient_override_map(OVERRIDES):
            loss_of = squared_error if self._spec.task == "regression" else masked_cross_entropy
            loss = loss_of(self._logits(x, tensors), y)
        gradients = tf.gradients(loss, list(learned.values()), unconnected_gradients="zero")
        moved = {
            name: weight - lr * gradient
            for (name, weight), gradient in zip(learned.items(), gradients, strict=True)
        }
        return {"loss": loss, **moved}

    def _infer(self, x: tf.Tensor, *tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"logits": self._logits(x, tensors)}

    def _logits(self, x: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        return self._model.logits(dict(zip(self._model.names, tensors, strict=True)), x)


def masked_cross_entropy(logits: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Mean cross-entropy over the labels that are not -1, which no class equals. `logits`: [B, (T,) C], `y`: int32 [B, (T)]."""
    one_hot = tf.cast(tf.equal(y[..., None], tf.range(logits.shape[-1])), logits.dtype)
    return -tf.reduce_sum(one_hot * tf.nn.log_softmax(logits)) / tf.reduce_sum(one_hot)


def convert_functions(**functions: Any) -> bytes:
    """A `.tflite` with these `tf.function`s, each with one input signature, as signatures, and builtin operations only.

    Raises:
        NotConvertible: an operation has no builtin equivalent.
    """
    module = tf.Module()
    for name, function in functions.items():
        setattr(module, name, function)
    signatures = {name: function.get_concrete_function() for name, function in functions.items()}
    with tempfile.TemporaryDirectory() as folder:
        # A training graph already contains the replaced gradients.
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        tf.saved_model.save(module, folder, signatures=signatures, options=options)
        try:
            converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=list(signatures))
            return bytes(converter.convert())
        except Exception as error:
            raise not_convertible(error) from error
