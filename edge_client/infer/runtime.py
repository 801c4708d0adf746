"""A release folder as something that predicts: numpy and the interpreter alone, one thread.

A release is `manifest.json` and `model.tflite` (`edge_client.wire.inference`). Its file takes one row at a time; where its
operations allow other batch sizes, many rows are run at once. Rows are float32 (ids int32) and logits float32 on the
outside, whatever the file computes in.

Loading says that the file is the manifest's and has its shapes. Whether this runtime computes the right answers with it, is
for `edge_client.infer.selftest`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.infer.installed import installed_kind
from edge_client.wire import inference
from edge_client.wire.inference import MANIFEST_NAME, MODEL_NAME, InferenceManifest, RuntimeKind
from edge_client.wire.manifest import ManifestError, require_file

RUNTIME: RuntimeKind = installed_kind() or "tflite-runtime"
"""Where none is installed, opening a file says so."""

_SAME = 1e-4
"""By how much, in units of the largest logit, rows may differ by being run together; quantized ones by 2 %."""
_SAME_QUANTIZED = 0.02


class NoRuntime(ManifestError):
    """No runtime is installed on this machine."""


class WrongRows(ValueError):
    """The rows are not what this model takes; the message says what came and what was expected."""


@dataclass(frozen=True)
class Loaded:
    """A model that can be asked; `load` makes it. Not for two threads at once."""

    manifest: InferenceManifest
    model: Model
    runtime: RuntimeKind = RUNTIME

    def predict(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Logits of rows `x` [N, …]: [N, classes], of sequences [N, T, classes].

        Raises:
            WrongRows: another shape or dtype, or ids out of range.
        """
        return self.model.predict(checked_rows(x, self.manifest))


def load(folder: Path) -> Loaded:
    """The release in `folder`, opened on this machine's runtime.

    Raises:
        ManifestError: a file is missing or cannot be read, the manifest is not one, the model is not the one it describes,
            or the runtime cannot open it. NoRuntime: there is none.
    """
    try:
        described = (folder / MANIFEST_NAME).read_bytes()
        content = (folder / MODEL_NAME).read_bytes()
    except OSError as error:
        raise ManifestError(
            f"{error.filename}: {error.strerror}; a release has {MANIFEST_NAME} and {MODEL_NAME}"
        ) from None
    manifest = inference.from_json(described, str(folder / MANIFEST_NAME))
    place = str(folder / MODEL_NAME)
    require_file(manifest, content, place)
    return Loaded(manifest, Model(content, manifest, place))


class Model:
    """The interpreter with one file in it. `options`: more of the interpreter's own arguments.

    Raises:
        ManifestError: the runtime cannot open the file, or its input and output are not what the manifest says.
        NoRuntime: there is none.
    """

    def __init__(
        self, content: bytes, manifest: InferenceManifest, place: str = "model", **options: Any
    ) -> None:
        self._manifest = manifest
        made = interpreter()
        try:
            self._interpreter: Any = made(model_content=content, num_threads=1, **options)
            self._interpreter.allocate_tensors()
        # RuntimeError: it knows the file but lacks an operation, or a version of one.
        except (ValueError, RuntimeError) as error:
            raise ManifestError(f"{place}: {RUNTIME} cannot open it: {_line(error)}") from None
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
        """Whether rows can be run together; tried the first time that it is asked.

        Some files have the batch in the shapes they reshape to: the runtime then refuses other sizes, or would mix rows.
        tflite-runtime 2.14 crashes on such a file instead, so there rows are always run one by one.
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
        described = self._manifest.input
        size = (2, *described.shape)
        numbers = np.arange(np.prod(size), dtype=np.float32).reshape(size)
        x = (
            np.sin(numbers)
            if described.dtype == "float32"
            else numbers.astype(np.int32) % (described.vocab or 2)
        )
        apart = np.concatenate([self._run(x[:1]), self._run(x[1:])])
        try:
            together = self._run(x)
        except (ValueError, RuntimeError):
            self._resize(1)
            return False
        same = _SAME if self._manifest.precision in ("float32", "float16") else _SAME_QUANTIZED
        return together.shape == apart.shape and bool(
            np.abs(together - apart).max() <= same * max(1.0, float(np.abs(apart).max()))
        )

    def _run(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        if len(x) != self._rows:
            self._resize(len(x))
        (source,), (target,) = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        self._interpreter.set_tensor(source["index"], quantized(np.ascontiguousarray(x), source))
        self._interpreter.invoke()
        return dequantized(self._interpreter.get_tensor(target["index"]), target)

    def _resize(self, rows: int) -> None:
        source = self._interpreter.get_input_details()[0]
        self._rows = 0  # until it has been done
        self._interpreter.resize_tensor_input(source["index"], (rows, *self._manifest.input.shape))
        self._interpreter.allocate_tensors()
        self._rows = rows

    def _require(self, what: str, found: dict[str, Any], shape: tuple[int, ...], place: str) -> None:
        got = tuple(int(extent) for extent in found["shape"])
        if got != shape:
            raise ManifestError(f"{place}: {what} is {list(got)}, the manifest says {list(shape)}")
        integer = np.issubdtype(found["dtype"], np.integer) and what != "input x"
        if integer and not found["quantization"][0]:
            raise ManifestError(f"{place}: {what} is {np.dtype(found['dtype']).name} without a scale")


def interpreter() -> Any:
    """The class that this machine's runtime runs a file with. Raises NoRuntime where there is none."""
    try:
        if RUNTIME == "litert":
            from ai_edge_litert.interpreter import Interpreter
        else:
            from tflite_runtime.interpreter import Interpreter
    except ModuleNotFoundError as missing:
        raise NoRuntime(
            f"no runtime for models is installed here ({missing}); install ai-edge-litert, for instance: "
            f"{sys.executable} -m pip install ai-edge-litert"
        ) from None
    return Interpreter


def logits_shape(manifest: InferenceManifest) -> tuple[int, ...]:
    """Of one row's logits."""
    places = manifest.input.shape if manifest.task == "next_token" else ()
    return (*places, manifest.classes)


def checked_rows(x: npt.NDArray[Any], manifest: InferenceManifest) -> npt.NDArray[Any]:
    """The rows in the manifest's dtype.

    Raises:
        WrongRows: another shape or kind of number, ids out of range, or a number that is not finite in float32.
    """
    shape, ids = manifest.input.shape, manifest.input.dtype == "int32"
    if x.shape[1:] != shape or x.ndim == 0:
        raise WrongRows(f"rows are {list(x.shape)}, {manifest.model} takes [N, {', '.join(map(str, shape))}]")
    kinds = "iu" if ids else "iufb"
    if x.dtype.kind not in kinds:
        raise WrongRows(f"rows are {x.dtype}, {manifest.model} takes {manifest.input.dtype}")
    if not ids:
        return _finite(x)
    tokens = manifest.input.vocab or manifest.classes
    if x.size and (int(x.min()) < 0 or int(x.max()) >= tokens):
        raise WrongRows(f"ids are {x.min()} to {x.max()}, {manifest.model} takes 0 to {tokens - 1}")
    return x.astype(np.int32)


def _finite(x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        numbers = x.astype(np.float32)
    finite = np.isfinite(numbers)
    if not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise WrongRows(f"row {row} holds a number that is not finite, or too large for float32")
    return numbers


def quantized(x: npt.NDArray[Any], tensor: dict[str, Any]) -> npt.NDArray[Any]:
    """Real numbers as the integers of an input tensor, as `get_input_details` describes it; ids as they are."""
    scale, zero_point = tensor["quantization"]
    if not scale:
        return x.astype(tensor["dtype"], copy=False)
    limits = np.iinfo(tensor["dtype"])
    steps: npt.NDArray[Any] = np.clip(np.rint(x / scale) + zero_point, limits.min, limits.max)
    return steps.astype(tensor["dtype"])


def dequantized(values: npt.NDArray[Any], tensor: dict[str, Any]) -> npt.NDArray[np.float32]:
    """An output tensor's numbers as real ones."""
    scale, zero_point = tensor["quantization"]
    return ((values.astype(np.float32) - zero_point) * scale if scale else values).astype(np.float32)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
