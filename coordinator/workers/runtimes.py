"""A run's model in the runtimes of one worker, each made when the first job needs it.

A framework is imported then, so a worker that only trains LiteRT clients never loads TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.workers.training import ClientTrainer, OneByOne, OnSlices
from edge_client.train.trainer import Runtime
from strategies.params import Params, Tensors
from strategies.slices import Shapes, take


class Runtimes:
    """One runtime of each kind for the model that `model` describes (`ModelSection.describe`).

    It may also name the `engine` of torch clients with their `batch_size`, the `row_noise` of DP-SGD, files of the artifact, and, where the model's code is
    missing, `evaluation` = "litert". `narrower` describes the models of device classes that train a part of this one, or another one, each
    with the `shapes` of its params.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._model = model
        self._runtimes: dict[str, Runtime] = {}
        self._torch_trainer: ClientTrainer | None = None
        self._narrower: dict[str, Runtimes] = {
            name: Runtimes(each) for name, each in model.get("narrower", {}).items()
        }

    def trainer(self, runtime: str, device_class: str | None = None) -> ClientTrainer:
        """How clients of a runtime train: torch clients as the engine says, others one after the other.

        `device_class`: whose clients they are; None: they train the whole model.
        """
        if device_class in self._narrower:
            narrower = self._narrower[device_class]
            return OnSlices(narrower.trainer(runtime), narrower.shapes)
        engine = self._model.get("engine", "pool") if runtime == "torch" else "pool"
        if (noise := self._model.get("row_noise")) is not None:
            return self._private_trainer(noise)
        if engine == "pool":
            return OneByOne(self.get(runtime))
        if self._torch_trainer is None:
            from coordinator.workers.kernels.engine import make_trainer

            self._torch_trainer = make_trainer(engine, find_spec(self._model), self._model["batch_size"])
        return self._torch_trainer

    def _private_trainer(self, noise: dict[str, Any]) -> ClientTrainer:
        if self._torch_trainer is None:
            from coordinator.workers.kernels.row_gradients import make_private_trainer

            self._torch_trainer = make_private_trainer(find_spec(self._model), noise)
        return self._torch_trainer

    def spec(self) -> Any:
        """The model's spec (`find_spec`)."""
        return find_spec(self._model)

    @property
    def shapes(self) -> Shapes:
        """Of the params of a narrower model."""
        return {name: tuple(shape) for name, shape in self._model["shapes"].items()}

    def narrower(self, device_class: str | None, params: Params) -> tuple[Runtimes, Tensors]:
        """The runtimes of the model of a device class, and its part of `params`: those of the whole model, or its own."""
        if device_class not in self._narrower:
            return self, params
        found = self._narrower[device_class]
        return found, take(params, found.shapes)

    def get(self, name: str) -> Runtime:
        """The runtime of this name; "evaluation" is the model's own framework, whatever the clients run."""
        if name not in self._runtimes:
            self._runtimes[name] = self._make(name)
        return self._runtimes[name]

    def _make(self, name: str) -> Runtime:
        if name == "litert":
            return load_litert(self._model)
        if name == "evaluation" and self._model.get("evaluation") == "litert":
            return self.get("litert")
        from models.zoo import KerasSpec

        spec = find_spec(self._model)
        if name == "evaluation" and self._model.get("engine") == "cuda":
            from coordinator.workers.kernels.vmapped import DeviceEvaluation, open_device

            return DeviceEvaluation(spec, open_device())
        if name == "evaluation":
            return self.get("tensorflow" if isinstance(spec, KerasSpec) else "torch")
        if isinstance(spec, KerasSpec):
            from edge_client.train.tensorflow_trainer import TensorFlowRuntime

            model = spec.build(0)
            return TensorFlowRuntime(model, trainable=model.trainable)
        from edge_client.train.torch_trainer import TorchRuntime

        torch_runtime = TorchRuntime(spec.build(0), spec.loss)
        if name == "torch":
            return torch_runtime
        from edge_client.train.tensorflow_trainer import TensorFlowRuntime

        if spec.tensorflow_twin is None:
            raise UserError(f"model {self._model['name']!r} has no TensorFlow twin")
        return TensorFlowRuntime(spec.tensorflow_twin(), trainable=torch_runtime.trainable)


def find_spec(model: Mapping[str, Any]) -> Any:
    """The model's spec: a `ModelSpec` or a `KerasSpec`."""
    from models import zoo

    return zoo.find(
        model["name"],
        input_shape=tuple(model["input_shape"]),
        classes=model["classes"],
        input_dtype=model["input_dtype"],
        task=model["task"],
        **model["options"],
    )


def load_litert(model: Mapping[str, Any]) -> Runtime:
    """The LiteRT runtime of the files `tflite` and `manifest`, once its golden outputs are right here."""
    from edge_client.train.litert_trainer import LiteRTRuntime
    from edge_client.wire import manifest

    path = model["manifest"]
    runtime = LiteRTRuntime(Path(model["tflite"]), manifest.from_json(Path(path).read_bytes(), path))
    runtime.self_test()
    return runtime
