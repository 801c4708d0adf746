"""Finds the runtimes and models that this device can train with, and builds the runtime for a job.

Runtimes are found by package metadata and models by entry points, so that the daemon imports no framework. In the
training process `runtime_for` builds a job's runtime: LiteRT from the artifact and its manifest, once the artifact's
golden outputs are right here; torch and TensorFlow from a builder of the entry-point group `fedloop.models`. Only
names of that group are accepted: nothing that a coordinator sends is ever imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.wire.device import DeclineCode, ModelRef

if TYPE_CHECKING:
    # The daemon looks up what is installed without importing numpy.
    from torch import nn

    from edge_client.data.examples import Examples
    from edge_client.train.litert_trainer import LiteRTRuntime
    from edge_client.train.torch_trainer import Loss
    from edge_client.train.trainer import Runtime, Trainer
    from edge_client.wire.privacy import NoiseTask

INSTALL_OPACUS = "pip install 'fedloop[privacy]'"

MODELS_GROUP = "fedloop.models"

# Runtime -> its modules, preferred first, each with the distributions that provide it.
_PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "litert": {"ai_edge_litert": ("ai-edge-litert",), "tflite_runtime": ("tflite-runtime",)},
    "torch": {"torch": ("torch",)},
    "tensorflow": {"tensorflow": ("tensorflow", "tensorflow-cpu")},
}


class CannotRun(Exception):
    """This device cannot do the job; `code` is that of a `Decline`."""

    def __init__(self, code: DeclineCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def installed_runtimes() -> dict[str, str]:
    """Runtime name -> version, without importing any of them."""
    versions: dict[str, str] = {}
    for runtime, modules in _PACKAGES.items():
        for module, distributions in modules.items():
            if runtime not in versions and find_spec(module) is not None:
                versions[runtime] = _version(distributions)
    return versions


def installed_models() -> tuple[str, ...]:
    """Names of the model builders installed here, without importing any of them."""
    return tuple(sorted({entry.name for entry in metadata.entry_points(group=MODELS_GROUP)}))


def runtime_for(name: str, model: ModelRef, tflite: Path | None, manifest: Path | None) -> Runtime:
    """The runtime for a job.

    Raises:
        CannotRun: `bad_artifact`, `no_model` or `wrong_runtime`.
    """
    if name not in installed_runtimes():
        known = ", ".join(installed_runtimes()) or "none"
        raise CannotRun("wrong_runtime", f"the runtime {name} is not installed here; installed: {known}")
    if name == "litert":
        if tflite is None or manifest is None:
            raise CannotRun("bad_artifact", "a LiteRT task came without artifact or manifest")
        return _litert(tflite, manifest)
    return _from_builder(name, model)


def require_compatible(data: Examples, model: ModelRef) -> None:
    """Checks that the local examples fit the model.

    Raises:
        CannotRun: `no_data`, naming the difference.
    """
    label_shape = model.input_shape if model.task == "next_token" else ()
    checks = (
        ("examples of shape", data.x.shape[1:], tuple(model.input_shape), "option `shape`"),
        ("examples of", str(data.x.dtype), model.input_dtype, "option `dtype`"),
        ("labels of shape", data.y.shape[1:], tuple(label_shape), "data of the experiment's task"),
    )
    for what, actual, expected, remedy in checks:
        if actual != expected:
            raise CannotRun(
                "no_data",
                f"the local data has {what} {_text(actual)}, the model {model.name!r} takes {_text(expected)}; "
                f"see the {remedy} in this device's configuration",
            )
    _require_labels(data, model)
    if model.task == "regression":
        return
    largest = int(data.y.max(initial=-1))
    if largest >= model.classes:
        raise CannotRun(
            "no_data",
            f"the local data has a label {largest}, the model {model.name!r} has {model.classes} classes, "
            f"0 to {model.classes - 1}; see the option `classes` in this device's configuration",
        )


def _require_labels(data: Examples, model: ModelRef) -> None:
    """Quantities are floats, classes integers."""
    is_quantity, wanted = data.y.dtype.kind == "f", model.task == "regression"
    if is_quantity != wanted:
        kinds = {True: "quantities", False: "classes"}
        raise CannotRun(
            "no_data",
            f"the local data has labels that are {kinds[is_quantity]}, the model {model.name!r} predicts {kinds[wanted]}; "
            "see the option `label_scale` in this device's configuration",
        )


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _litert(tflite: Path, manifest: Path) -> LiteRTRuntime:
    from edge_client.train.golden import SelfTestFailed
    from edge_client.train.litert_trainer import LiteRTRuntime
    from edge_client.wire import manifest as manifests

    try:
        runtime = LiteRTRuntime(tflite, manifests.from_json(manifest.read_bytes()))
        runtime.self_test()
    except (manifests.ManifestError, SelfTestFailed) as error:
        raise CannotRun("bad_artifact", str(error)) from None
    except (RuntimeError, ValueError) as error:
        # The interpreter loads the file but cannot prepare or invoke it.
        raise CannotRun("bad_artifact", f"this runtime cannot run the artifact: {error}") from None
    return runtime


def private_trainer_for(model: ModelRef, noise: NoiseTask, data: Examples, batch_size: int) -> Trainer:
    """A PyTorch trainer whose steps hide single rows of `data`.

    Raises:
        CannotRun: `no_model`.
    """
    from edge_client.train.private_trainer import find_refusal, make_private_trainer

    module, loss, _ = _build_module(model)
    if reason := find_refusal(module):
        raise CannotRun("no_model", f"DP-SGD cannot train the model {model.name!r}: {reason}")
    return make_private_trainer(module, loss, noise, data, batch_size)


def _from_builder(name: str, model: ModelRef) -> Runtime:
    from edge_client.train.torch_trainer import TorchRuntime

    module, loss, twin = _build_module(model)
    torch_runtime = TorchRuntime(module, loss)
    if name == "torch":
        return torch_runtime
    if twin is None or model.divisors:
        raise CannotRun("no_model", f"the model {model.name!r} has no TensorFlow twin of this width")
    from edge_client.train.tensorflow_trainer import TensorFlowRuntime

    return TensorFlowRuntime(twin(), trainable=torch_runtime.trainable)


def _build_module(model: ModelRef) -> tuple[nn.Module, Loss, Callable[[], Any] | None]:
    """The module that the installed builder makes, its loss, and what makes its TensorFlow twin, if it has one."""
    import torch

    from edge_client.train.torch_trainer import divide_outputs

    torch.set_num_threads(1)
    built = _build(model)
    if model.task == "regression" and hasattr(built, "of_quantity"):
        built = built.of_quantity()
    loss: Loss
    if isinstance(built, torch.nn.Module):
        loss = squared_error if model.task == "regression" else masked_cross_entropy
        module, twin = built, None
    else:
        module, loss, twin = built.build(0), built.loss, built.tensorflow_twin
    try:
        return divide_outputs(module, model.divisors), loss, twin
    except AttributeError as error:
        raise CannotRun("no_model", f"the model {model.name!r} lacks a layer of the task: {error}") from None


def _build(model: ModelRef) -> Any:
    """The installed builder's result: a model spec, or a bare module.

    A spec is recognized by its attributes (`build`, `loss`, `tensorflow_twin`), because the device does not know the
    package that defines it.
    """
    try:
        built = _builder(model.name)(
            input_shape=tuple(model.input_shape), classes=model.classes, **model.options
        )
    except CannotRun:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise CannotRun("no_model", f"the model {model.name!r} cannot be built here: {reason}") from error
    is_module = hasattr(built, "named_parameters")
    if not is_module and not all(hasattr(built, part) for part in ("build", "loss", "tensorflow_twin")):
        raise CannotRun(
            "no_model",
            f"the builder of {model.name!r} returns {type(built).__name__}, expected a torch.nn.Module or a ModelSpec",
        )
    return built


def _builder(name: str) -> Callable[..., Any]:
    for entry in metadata.entry_points(group=MODELS_GROUP):
        if entry.name == name:
            builder: Callable[..., Any] = entry.load()
            return builder
    known = ", ".join(installed_models()) or "none"
    raise CannotRun("no_model", f"the model {name!r} is not installed here; installed: {known}")


def masked_cross_entropy(logits: Any, y: Any) -> Any:
    """Mean cross-entropy over the labels that are not `PADDING`, for a builder without a loss."""
    import torch

    from edge_client.data.examples import PADDING

    flat = logits.reshape(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(flat, y.reshape(-1).long(), ignore_index=PADDING)


def squared_error(outputs: Any, y: Any) -> Any:
    """Mean squared error of outputs [B, 1] and quantities [B] (none is padding), for a builder without a loss."""
    import torch

    return torch.nn.functional.mse_loss(outputs.squeeze(-1), y)


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
