"""What this device can train, and the runtime for one job.

Runtimes are found by their packages' metadata and models by their entry points, so that the daemon knows both
without importing a framework. In the training process `runtime_for` builds what a job asks for: LiteRT from the
artifact and its manifest, once the artifact answered its golden question rightly here; torch and TensorFlow from
a builder of the entry-point group `fedloop.models`. Only names of that group are taken: what a coordinator sends
is never imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.wire.device import ModelRef

if TYPE_CHECKING:
    # The daemon asks what is installed, and imports no numpy for it.
    from edge_client.train.litert_trainer import LiteRTRuntime
    from edge_client.train.process import Code
    from edge_client.train.trainer import Examples, Runtime

MODELS_GROUP = "fedloop.models"

# Runtime -> its modules, the preferred first, each with the distributions that may bring it.
_PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "litert": {"ai_edge_litert": ("ai-edge-litert",), "tflite_runtime": ("tflite-runtime",)},
    "torch": {"torch": ("torch",)},
    "tensorflow": {"tensorflow": ("tensorflow", "tensorflow-cpu")},
}


class CannotRun(Exception):
    """This device cannot do the job; `code` is that of a `Decline`."""

    def __init__(self, code: Code, words: str) -> None:
        super().__init__(words)
        self.code, self.words = code, words


def installed_runtimes() -> dict[str, str]:
    """Runtime name -> version, without importing any of them."""
    found: dict[str, str] = {}
    for runtime, modules in _PACKAGES.items():
        for module, distributions in modules.items():
            if runtime not in found and find_spec(module) is not None:
                found[runtime] = _version(distributions)
    return found


def installed_models() -> tuple[str, ...]:
    """Names of the model builders installed here, without importing any of them."""
    return tuple(sorted({entry.name for entry in metadata.entry_points(group=MODELS_GROUP)}))


def runtime_for(name: str, model: ModelRef, tflite: Path | None, manifest: Path | None) -> Runtime:
    """The runtime for a job.

    Raises:
        CannotRun: `bad_artifact`, `no_model` or `wrong_runtime`, in words.
    """
    if name not in installed_runtimes():
        known = ", ".join(installed_runtimes()) or "none"
        raise CannotRun("wrong_runtime", f"the runtime {name} is not installed here; installed: {known}")
    if name == "litert":
        if tflite is None or manifest is None:
            raise CannotRun("bad_artifact", "a LiteRT task came without artifact or manifest")
        return _litert(tflite, manifest)
    return _from_builder(name, model)


def require_fitting(data: Examples, model: ModelRef) -> None:
    """Checks that local examples are what the model takes.

    Raises:
        CannotRun: `no_data`, naming what the data has and what the model expects.
    """
    label_shape = model.input_shape if model.task == "next_token" else ()
    checks = (
        ("examples of shape", data.x.shape[1:], tuple(model.input_shape), "option `shape`"),
        ("examples of", str(data.x.dtype), model.input_dtype, "option `dtype`"),
        ("labels of shape", data.y.shape[1:], tuple(label_shape), "data of the experiment's task"),
    )
    for what, found, expected, remedy in checks:
        if found != expected:
            raise CannotRun(
                "no_data",
                f"the local data has {what} {_text(found)}, the model {model.name!r} takes {_text(expected)}; "
                f"see the {remedy} in this device's configuration",
            )
    largest = int(data.y.max(initial=-1))
    if largest >= model.classes:
        raise CannotRun(
            "no_data",
            f"the local data has a label {largest}, the model {model.name!r} has {model.classes} classes, "
            f"0 to {model.classes - 1}; see the option `classes` in this device's configuration",
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
        # What an interpreter says of a file that it loads and cannot prepare or invoke.
        raise CannotRun("bad_artifact", f"this runtime cannot run the artifact: {error}") from None
    return runtime


def _from_builder(name: str, model: ModelRef) -> Runtime:
    import torch

    from edge_client.train.torch_trainer import TorchRuntime

    torch.set_num_threads(1)
    built = _built(model)
    if isinstance(built, torch.nn.Module):
        module, loss, twin = built, masked_cross_entropy, None
    else:
        module, loss, twin = built.build(0), built.loss, built.tensorflow_twin
    torch_runtime = TorchRuntime(module, loss)
    if name == "torch":
        return torch_runtime
    if twin is None:
        raise CannotRun("no_model", f"the model {model.name!r} has no TensorFlow twin")
    from edge_client.train.tensorflow_trainer import TensorFlowRuntime

    return TensorFlowRuntime(twin(), trainable=torch_runtime.trainable)


def _built(model: ModelRef) -> Any:
    """What the installed builder returns: a model spec, or a bare module.

    A spec is known by what it has (`build`, `loss`, `tensorflow_twin`), because the device does not know the package
    that defines it.
    """
    try:
        built = _builder(model.name)(
            input_shape=tuple(model.input_shape), classes=model.classes, **model.options
        )
    except CannotRun:
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise CannotRun("no_model", f"the model {model.name!r} cannot be built here: {words}") from error
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
    """Mean cross-entropy over the labels that are not `PADDING`, for a builder that brings no loss of its own."""
    import torch

    from edge_client.train.trainer import PADDING

    flat = logits.reshape(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(flat, y.reshape(-1).long(), ignore_index=PADDING)


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
