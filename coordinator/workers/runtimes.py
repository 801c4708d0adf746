"""The runtimes that train and evaluate a model, made from its description.

A description has the model's `name`, its `options` and the `MODEL_KEYS` of its data; for LiteRT also the artifact's files
`tflite` and `manifest`. A framework is imported only with the first runtime that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from edge_client.train.trainer import Runtime


def find_spec(model: Mapping[str, Any]) -> Any:
    """The `ModelSpec` or `KerasSpec` of a description."""
    from models import zoo

    return zoo.find(
        model["name"],
        input_shape=tuple(model["input_shape"]),
        classes=model["classes"],
        input_dtype=model["input_dtype"],
        task=model["task"],
        **model["options"],
    )


def find_framework(model: Mapping[str, Any], name: str) -> str:
    """The runtime to make for a client's runtime `name`; "evaluation" is the model's own, or `litert` without its code."""
    if name != "evaluation":
        return name
    if model.get("evaluation") == "litert":
        return "litert"
    from models.zoo import KerasSpec

    return "tensorflow" if isinstance(find_spec(model), KerasSpec) else "torch"


def make_runtime(model: Mapping[str, Any], name: str) -> Runtime:
    """A runtime by name: `litert`, `torch` or `tensorflow`.

    Raises:
        UserError: the model has no TensorFlow twin.
    """
    if name == "litert":
        return make_litert(model)
    from models.zoo import KerasSpec

    spec = find_spec(model)
    if isinstance(spec, KerasSpec):
        from edge_client.train.tensorflow_trainer import TensorFlowRuntime

        keras = spec.build(0)
        return TensorFlowRuntime(keras, trainable=keras.trainable)
    from edge_client.train.torch_trainer import TorchRuntime

    torch_runtime = TorchRuntime(spec.build(0), spec.loss)
    if name == "torch":
        return torch_runtime
    from edge_client.train.tensorflow_trainer import TensorFlowRuntime

    if spec.tensorflow_twin is None:
        raise UserError(f"model {model['name']!r} has no TensorFlow twin")
    return TensorFlowRuntime(spec.tensorflow_twin(), trainable=torch_runtime.trainable)


def make_litert(model: Mapping[str, Any]) -> Runtime:
    """The LiteRT runtime of the files `tflite` and `manifest`, once its golden outputs are right here."""
    from edge_client.train.litert_trainer import LiteRTRuntime
    from edge_client.wire import manifest

    path = model["manifest"]
    runtime = LiteRTRuntime(Path(model["tflite"]), manifest.from_json(Path(path).read_bytes(), path))
    runtime.self_test()
    return runtime
