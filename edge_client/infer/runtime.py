"""Loads a release folder and predicts with it: numpy and the interpreter only, one thread.

A release is `manifest.json` and `model.tflite` (`edge_client.wire.inference`). Its file takes one row at a time; if its
operations allow other batch sizes, rows are run in batches. Callers see float32 rows (int32 ids) and float32 logits,
whatever type the file computes in.

Loading checks that the file is the manifest's and has its shapes. `edge_client.infer.golden_check` checks the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edge_client.train.interpreter import installed_kind, interpreter
from edge_client.wire import inference
from edge_client.wire.inference import InferenceManifest, RuntimeKind
from edge_client.wire.manifest import InputSpec, ManifestError, require_file
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME
from edge_client.wire.schema import DataSchema

RUNTIME: RuntimeKind = installed_kind() or "tflite-runtime"
"""If none is installed, opening a file raises NoRuntime."""

_SAME = 1e-4
"""How much the logits of a batch may differ from single rows, relative to the largest logit; quantized ones by 2 %."""
_SAME_QUANTIZED = 0.02


class Described(Protocol):
    """What a model that predicts is: a release, by its manifest, or the device's own (`serving.own_model`)."""

    @property
    def model(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def classes(self) -> int: ...
    @property
    def input(self) -> InputSpec: ...
    @property
    def schema(self) -> DataSchema | None: ...
    @property
    def data_schema(self) -> DataSchema: ...


class Predictor(Protocol):
    """A model that is ready to predict."""

    @property
    def manifest(self) -> Described: ...

    def predict(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """As `LoadedRelease.predict`."""


class InvalidRows(ValueError):
    """The rows are not valid for this model; the message says what arrived and what was expected."""


@dataclass(frozen=True)
class LoadedRelease:
    """A model that is ready to predict; `load` creates it. Not thread-safe."""

    manifest: InferenceManifest
    model: Model
    runtime: RuntimeKind = RUNTIME

    def predict(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Logits of rows `x` [N, …]: [N, classes], for sequences [N, T, classes].

        Raises:
            InvalidRows: another shape or dtype, or ids out of range.
        """
        return self.model.predict(check_rows(x, self.manifest))


def load(folder: Path, threads: int = 1) -> LoadedRelease:
    """Opens the release in `folder` with this machine's runtime. `threads`: that compute one batch.

    Raises:
        ManifestError: a file is missing or unreadable, the manifest is invalid, the model is not the one it describes,
            or the runtime cannot open it. NoRuntime: none is installed.
    """
    try:
        manifest_json = (folder / MANIFEST_NAME).read_bytes()
        content = (folder / MODEL_NAME).read_bytes()
    except OSError as error:
        raise ManifestError(
            f"{error.filename}: {error.strerror}; a release has {MANIFEST_NAME} and {MODEL_NAME}"
        ) from None
    manifest = inference.from_json(manifest_json, str(folder / MANIFEST_NAME))
    place = str(folder / MODEL_NAME)
    require_file(manifest.file, content, place)
    return LoadedRelease(manifest, Model(content, manifest, place, threads))


class Model:
    """An interpreter with one file loaded. `options`: further arguments of the interpreter.

    Raises:
        ManifestError: the runtime cannot open the file, or its input and output differ from the manifest.
        NoRuntime: none is installed.
    """

    def __init__(
        self,
        content: bytes,
        manifest: InferenceManifest,
        place: str = "model",
        threads: int = 1,
        **options: Any,
    ) -> None:
        self._manifest = manifest
        interpreter_class = interpreter()
        try:
            self._interpreter: Any = interpreter_class(model_content=content, num_threads=threads, **options)
            self._interpreter.allocate_tensors()
        # RuntimeError: it can read the file but lacks an operation, or a version of one.
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ManifestError(f"{place}: {RUNTIME} cannot open it: {reason}") from None
        inputs, outputs = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        if len(inputs) != 1 or len(outputs) != 1:
            raise ManifestError(
                f"{place} has {len(inputs)} inputs and {len(outputs)} outputs, expected infer(x) -> {{logits}}"
            )
        self._rows = 1
        self._batches: bool | None = None
        self._require("input x", inputs[0], (1, *manifest.input.shape), place)
        self._require("output logits", outputs[0], (1, *logits_shape(manifest)), place)

    @property
    def batches(self) -> bool:
        """Whether rows can be run in batches; determined at the first access.

        Some files have the batch size in the shapes they reshape to: the runtime then refuses other sizes, or would mix
        rows. tflite-runtime 2.14 crashes on such a file instead, so it always runs rows one by one.
        """
        if self._batches is None:
            self._batches = RUNTIME == "litert" and self._can_batch()
        return self._batches

    def predict(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Logits of checked rows."""
        if len(x) > 1 and self.batches:
            return self._run(x)
        answer = np.empty((len(x), *logits_shape(self._manifest)), np.float32)
        for at in range(len(x)):
            answer[at : at + 1] = self._run(x[at : at + 1])
        return answer

    def _can_batch(self) -> bool:
        spec = self._manifest.input
        size = (2, *spec.shape)
        numbers = np.arange(np.prod(size), dtype=np.float32).reshape(size)
        x = np.sin(numbers) if spec.dtype == "float32" else numbers.astype(np.int32) % (spec.vocab or 2)
        separate = np.concatenate([self._run(x[:1]), self._run(x[1:])])
        try:
            together = self._run(x)
        except (ValueError, RuntimeError):
            self._resize(1)
            return False
        same = _SAME if self._manifest.precision in ("float32", "float16") else _SAME_QUANTIZED
        return together.shape == separate.shape and bool(
            np.abs(together - separate).max() <= same * max(1.0, float(np.abs(separate).max()))
        )

    def _run(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        if len(x) != self._rows:
            self._resize(len(x))
        (source,), (target,) = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        self._interpreter.set_tensor(source["index"], quantize(np.ascontiguousarray(x), source))
        self._interpreter.invoke()
        return dequantize(self._interpreter.get_tensor(target["index"]), target)

    def _resize(self, rows: int) -> None:
        source = self._interpreter.get_input_details()[0]
        self._rows = 0  # until the resize succeeds
        self._interpreter.resize_tensor_input(source["index"], (rows, *self._manifest.input.shape))
        self._interpreter.allocate_tensors()
        self._rows = rows

    def _require(self, what: str, details: dict[str, Any], shape: tuple[int, ...], place: str) -> None:
        actual = tuple(int(extent) for extent in details["shape"])
        if actual != shape:
            raise ManifestError(f"{place}: {what} is {list(actual)}, the manifest says {list(shape)}")
        integer = np.issubdtype(details["dtype"], np.integer) and what != "input x"
        if integer and not details["quantization"][0]:
            raise ManifestError(f"{place}: {what} is {np.dtype(details['dtype']).name} without a scale")


def logits_shape(manifest: InferenceManifest) -> tuple[int, ...]:
    """Shape of one row's logits."""
    places = manifest.input.shape if manifest.task == "next_token" else ()
    return (*places, manifest.classes)


def check_rows(x: npt.NDArray[Any], manifest: Described) -> npt.NDArray[Any]:
    """The rows in the manifest's dtype.

    Raises:
        InvalidRows: the shape or the dtype is wrong, ids are out of range, or a number is not finite in float32.
    """
    shape, ids = manifest.input.shape, manifest.input.dtype == "int32"
    if x.shape[1:] != shape or x.ndim == 0:
        raise InvalidRows(
            f"rows are {list(x.shape)}, {manifest.model} takes [N, {', '.join(map(str, shape))}]"
        )
    kinds = "iu" if ids else "iufb"
    if x.dtype.kind not in kinds:
        raise InvalidRows(f"rows are {x.dtype}, {manifest.model} takes {manifest.input.dtype}")
    if not ids:
        return _finite(x)
    tokens = manifest.input.vocab or manifest.classes
    if x.size and (int(x.min()) < 0 or int(x.max()) >= tokens):
        raise InvalidRows(f"ids are {x.min()} to {x.max()}, {manifest.model} takes 0 to {tokens - 1}")
    return x.astype(np.int32)


def _finite(x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        numbers = x.astype(np.float32)
    finite = np.isfinite(numbers)
    if not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise InvalidRows(f"row {row} holds a number that is not finite, or too large for float32")
    return numbers


def quantize(x: npt.NDArray[Any], tensor: dict[str, Any]) -> npt.NDArray[Any]:
    """Quantizes real numbers for an input tensor described by `get_input_details`; ids are unchanged."""
    scale, zero_point = tensor["quantization"]
    if not scale:
        return x.astype(tensor["dtype"], copy=False)
    limits = np.iinfo(tensor["dtype"])
    steps: npt.NDArray[Any] = np.clip(np.rint(x / scale) + zero_point, limits.min, limits.max)
    return steps.astype(tensor["dtype"])


def dequantize(values: npt.NDArray[Any], tensor: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Dequantizes an output tensor."""
    scale, zero_point = tensor["quantization"]
    return ((values.astype(np.float32) - zero_point) * scale if scale else values).astype(np.float32)
