"""A user's Keras model, as the rest of the code handles models: a description, params by name, a pure function of them.

    spec = zoo.find("mine:build", input_shape=(8, 8), classes=10)      a KerasSpec: mine.build returned a keras.Model
    model = spec.build(seed=7)                                         a FunctionalModel
    model.params(), model.logits(weights, x)

Tensors are named by layer and weight, `conv2d.kernel`, in the order of `model.weights`, and keep TensorFlow's layout. The
model keeps no state between calls, so that one of its clients can be LiteRT.

Keras is imported only when a model is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.tasks import TaskKind
from models.zoo.spec import InputDtype, Spec
from models.zoo.trial import are_probabilities, format_shape

LAYERS = (
    "Activation", "Add", "Average", "AveragePooling2D", "BatchNormalization", "Concatenate", "Conv1D",
    "Conv2D", "Cropping2D", "Dense", "DepthwiseConv2D", "Dropout", "ELU", "Embedding", "Flatten",
    "Functional", "GlobalAveragePooling1D", "GlobalAveragePooling2D", "GroupNormalization", "Identity",
    "InputLayer", "LayerNormalization", "LeakyReLU", "MaxPooling2D", "Multiply", "Permute", "ReLU",
    "Rescaling", "Reshape", "SeparableConv2D", "Sequential", "Softmax", "Subtract", "ZeroPadding2D",
)  # fmt: skip
"""The Keras layers that train on every runtime."""

ACTIVATIONS = (
    "elu", "exponential", "hard_sigmoid", "hard_silu", "leaky_relu", "linear", "relu", "relu6", "sigmoid",
    "silu", "softmax", "tanh",
)  # fmt: skip
"""Others need operations that LiteRT does not have."""

_PROBABILITIES = ("softmax", "sigmoid")


class KerasUnfit(ValueError):
    """The Keras model cannot be trained here; the message says why and what to do."""


@dataclass(frozen=True)
class KerasSpec(Spec):
    """A Keras model; random weights come from Python's and TensorFlow's global generators. The loss is masked cross-entropy,
    or squared error for the task `regression`."""

    def build(self, seed: int) -> FunctionalModel:
        """A fresh model; the same seed gives the same weights, except those from a file. Clears Keras' session.

        Raises:
            KerasUnfit: its inputs or outputs do not fit the data, for instance probabilities.
        """
        import keras

        if keras.backend.backend() != "tensorflow":
            raise KerasUnfit(
                f"model {self.name!r} is a Keras model on {keras.backend.backend()}; artifacts are made through TensorFlow: "
                "unset KERAS_BACKEND"
            )
        keras.utils.clear_session()  # so that unnamed layers are numbered from the start
        keras.utils.set_random_seed(seed)
        model = self.module()
        if not isinstance(model, keras.Sequential) and not type(model).__name__ == "Functional":
            raise KerasUnfit(
                f"model {self.name!r} is a subclass of keras.Model with code of its own; make it of layers with "
                "keras.Sequential or keras.Model(inputs, outputs)"
            )
        if not model.built:
            model.build((None, *self.input_shape))
        self._refuse(self._misfits(model))
        return FunctionalModel(self, model)

    def require_trainable(self) -> FunctionalModel:
        """The model with seed 0, checked to train alike on every runtime.

        Raises:
            KerasUnfit: a layer is not in `LAYERS` or is random, or the model cannot be built.
        """
        model = self.build(0)
        for layer in _layers(model.model):
            self._refuse(f": layer {layer.name!r} {fault}" for fault in _faults(layer))
        if model.model.losses:
            self._refuse(
                [" adds to the loss (a regularizer, add_loss), which clients do not train with; leave it out"]
            )
        if not model.trainable:
            self._refuse([" has no trainable weight"])
        return model

    def _refuse(self, faults: Iterable[str]) -> None:
        """Raises KerasUnfit with the first of `faults`, if there is one."""
        for fault in faults:
            raise KerasUnfit(f"model {self.name!r}{fault}")

    @property
    def vocab(self) -> int | None:
        """Rows of the smallest embedding of token ids; None without one."""
        if self.input_dtype != "int32":
            return None
        sizes = [
            layer.input_dim for layer in _layers(self.build(0).model) if type(layer).__name__ == "Embedding"
        ]
        return min(sizes, default=None)

    def _misfits(self, model: Any) -> Iterator[str]:
        """Why the model does not fit the data. A second softmax trains slowly, to another optimum."""
        if len(model.inputs) != 1 or len(model.outputs) != 1:
            yield f" has {len(model.inputs)} inputs and {len(model.outputs)} outputs, expected one of each"
        takes, returns = (tuple(each[0].shape[1:]) for each in (model.inputs, model.outputs))
        if takes != self.input_shape:
            yield (
                f" takes examples of shape {takes}, the data has {self.input_shape}; begin with "
                f"keras.Input({self.input_shape}), and keras.layers.Reshape where the next layer needs another shape"
            )
        if returns != self.logits_shape:
            yield (
                f" returns logits of shape {format_shape(returns)} for examples of shape {self.input_shape}, "
                f"expected {format_shape(self.logits_shape)}: {self.classes} classes"
            )
        for weight in model.weights:
            if "float" in weight.dtype and weight.dtype != "float32":
                yield f": {weight.path} is {weight.dtype}; params are float32"
        last = _last_layer(model)
        if type(last).__name__ == "Softmax" or _activation(last) in _PROBABILITIES:
            yield (
                f": the last layer {last.name!r} gives probabilities, expected logits; leave its activation out (the "
                "loss has the softmax)"
            )
        x = np.arange(2 * math.prod(self.input_shape)).reshape(2, *self.input_shape)
        ids = self.input_dtype == "int32"
        answers = model(x % 2 if ids else (np.sin(x) * 0.5 + 0.5).astype(np.float32), training=False)
        if are_probabilities(np.asarray(answers)):
            yield (
                " answers with probabilities, expected logits; leave the softmax before its end out (the loss has one)"
            )


def _faults(layer: Any) -> Iterator[str]:
    """Why some runtime cannot train the layer."""
    kind = type(layer).__name__
    if kind not in LAYERS or not type(layer).__module__.startswith("keras."):
        yield f"is a {kind}, which not every runtime can train; layers that can be: {', '.join(LAYERS)}"
    if kind == "Dropout" and layer.rate:
        yield "is random, and a LiteRT step has no random numbers; leave dropout out (rate=0)"
    if kind == "BatchNormalization" and layer.trainable:
        yield (
            "is a BatchNormalization that trains, whose statistics of one device's rows cannot be averaged; "
            "freeze it (trainable = False), or take GroupNormalization or LayerNormalization"
        )
    if layer.compute_dtype != "float32" and kind != "Embedding":
        yield f"computes in {layer.compute_dtype}, expected float32; leave its dtype out"
    if getattr(layer, "groups", 1) != 1 and kind.startswith("Conv"):
        yield f"has groups = {layer.groups}; take a DepthwiseConv2D and a Conv2D"
    dilation = getattr(layer, "dilation_rate", 1)
    if any(each != 1 for each in np.atleast_1d(dilation)):
        yield f"has dilation_rate = {dilation}; take strides or a larger kernel"
    if getattr(layer, "data_format", "channels_last") != "channels_last":
        yield "is channels_first; TensorFlow trains channels_last on a CPU"
    if (activation := _activation(layer)) not in ACTIVATIONS:
        yield (
            f"has the activation {activation}, for which LiteRT has no operation; take one of: {', '.join(ACTIVATIONS)}"
        )
    for weight in layer.weights:
        if getattr(weight, "constraint", None) is not None:
            yield f"has a constraint on {weight.name}, which an average would not keep"


def _last_layer(model: Any) -> Any:
    """The layer that computes the output, also of a nested model."""
    last = model.outputs[0]._keras_history.operation
    return _last_layer(last) if _is_model(last) else last


class FunctionalModel:
    """A Keras model as a pure function of params; also a `Twin` for a TensorFlow client.

    Attributes:
        names: of all its float tensors, in the order of `model.weights`.
        trainable: names of the trained ones.
    """

    def __init__(self, spec: KerasSpec, model: Any) -> None:
        self.spec, self.model = spec, model
        names = dict(_named(model, ""))
        self._variables = {names[id(each)]: each for each in model.weights if "float" in each.dtype}
        if len(self._variables) != sum("float" in each.dtype for each in model.weights):
            raise KerasUnfit(
                f"model {spec.name!r} has two weights of one name; give its layers names of their own"
            )
        own = {id(each) for each in model.trainable_variables}
        self.names = tuple(self._variables)
        self.trainable = tuple(name for name, each in self._variables.items() if id(each) in own)

    def params(self) -> dict[str, npt.NDArray[np.float32]]:
        """A copy of its current weights."""
        return {name: np.array(each.numpy(), np.float32) for name, each in self._variables.items()}

    def logits(self, weights: Mapping[str, Any], x: Any) -> Any:
        """[B, …] -> [B, (T,) classes], with `weights`; its own are unchanged."""
        by_id = {id(each): weights[name] for name, each in self._variables.items()}
        learned = [by_id[id(each)] for each in self.model.trainable_variables]
        fixed = [by_id.get(id(each), each) for each in self.model.non_trainable_variables]
        answer, _ = self.model.stateless_call(learned, fixed, x, training=False)
        return answer

    def to_tensorflow(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`array` itself: params are already in TensorFlow's layout."""
        return array

    def from_tensorflow(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array


def from_file(
    name: str, input_shape: tuple[int, ...], classes: int, input_dtype: InputDtype, task: TaskKind
) -> KerasSpec:
    """The model in a `.keras` file, loaded without running code from it.

    Raises:
        KerasUnfit: the file or Keras is missing; on building: it cannot be read, or contains code.
    """
    path = Path(name)
    if not path.is_file():
        raise KerasUnfit(f"model {name!r}: there is no such file in {Path.cwd()}")

    if find_spec("keras") is None:
        raise KerasUnfit(f"model {name!r} needs keras, not installed here; pip install 'fedloop[tensorflow]'")

    def load() -> Any:
        import keras

        try:
            return keras.saving.load_model(path, compile=False, safe_mode=True)
        except Exception as error:  # damaged files raise all kinds
            raise KerasUnfit(
                f"model {name!r} cannot be read without running code from it: {_first_line(error)}; "
                "layers of one's own are given as package.module:build"
            ) from error

    return KerasSpec(name, load, input_shape, classes, input_dtype, task)


def _layers(model: Any) -> Iterator[Any]:
    """All its layers, including those of nested models."""
    for layer in model.layers:
        yield layer
        if _is_model(layer):
            yield from _layers(layer)


def _is_model(layer: Any) -> bool:
    return hasattr(layer, "layers") and hasattr(layer, "outputs")


def _activation(layer: Any) -> str:
    function = getattr(layer, "activation", None)
    return "linear" if function is None else str(getattr(function, "__name__", type(function).__name__))


def _named(model: Any, within: str) -> Iterator[tuple[int, str]]:
    """id of every weight, and its name: `dense.kernel`, `encoder.dense.kernel` in a nested model.

    Keras' own paths are not used: for nested models they change when a file is read back. Where several weights of a layer
    share a name, such as the kernels of query and key, the rest of the path within the layer distinguishes them.
    """
    for layer in model.layers:
        if _is_model(layer):
            yield from _named(layer, f"{within}{layer.name}.")
            continue
        names = [each.name for each in layer.weights]
        for each in layer.weights:
            inner = each.path.rpartition(f"{layer.name}/")[2].replace("/", ".")
            own = each.name if names.count(each.name) == 1 else inner
            yield id(each), f"{within}{layer.name}.{own}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0][:200]
