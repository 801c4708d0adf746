"""Opens a model for serving, in one of several backends, and checks its answers before anybody gets one.

    litert         the `.tflite` of a release; its golden rows must come out right
    torch          PyTorch as the module is, without gradients
    channels_last  the same with images stored channel by channel, which convolutions prefer
    compiled       the same after `torch.compile`
    onnx           ONNX Runtime, from a file that is exported as the version is opened first
    packed         the same with weights of 8 or 4 bits, as the compression step `gptq` leaves them
    keras          a Keras model in TensorFlow

A release has only the first one. A model of PyTorch has the next three: those besides `torch` are compared with it on rows that
follow from integers (`edge_client.train.golden`), because float params have no golden rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.files import write_durably
from edge_client.infer import golden_check
from edge_client.infer import runtime as releases
from edge_client.train import golden
from edge_client.wire.manifest import Fill
from models.serving.backends import backends

Rows = npt.NDArray[Any]
Compute = Callable[[Rows], npt.NDArray[np.float32]]
"""Rows [N, …] -> logits [N, …]."""

_CHECKED_ROWS = 4
_TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Of logits between two backends of one model, relative to the largest of them, by dtype; sums are taken in another order."""


class CannotOpen(Exception):
    """The model cannot be served; the message says why."""


@dataclass(frozen=True)
class OpenedModel:
    """A model that is ready to compute. Not thread-safe.

    Attributes:
        input_shape, output_shape: of one row.
        vocabulary: token ids are below it; 0 of models that take no ids.
        module, spec: of a model of PyTorch; None of others.
    """

    backend: str
    compute: Compute
    input_shape: tuple[int, ...]
    input_dtype: str
    output_shape: tuple[int, ...]
    vocabulary: int = 0
    module: Any = None
    spec: Any = None

    def example(self, rows: int) -> Rows:
        """Rows to measure and to compare with: the same numbers for every backend and machine."""
        return _example(rows, self.input_shape, self.input_dtype, self.vocabulary)


def open_model(model: Mapping[str, Any], backend: str, threads: int) -> OpenedModel:
    """Opens a model.

    Args:
        model: `onnx`, the file that the backend of this name reads or writes; `device` and `dtype` of models of PyTorch, by default cpu and float32; `folder`, and `release` = true for a release, else `description` as job files describe a model, the file
            `params`, and the file `packed` if its weights are packed too.

    Raises:
        CannotOpen: a file is damaged, the backend is none of the model's, or the answers are wrong.
    """
    known = backends(model)
    if backend not in known:
        raise CannotOpen(f"backend is {backend!r}, expected one of {', '.join(known)} for this model")
    try:
        if backend == "litert":
            return _open_release(Path(model["folder"]), threads)
        if backend == "keras":
            return _open_keras(model)
        return _open_torch(model, backend, threads)
    except CannotOpen:
        raise
    except (
        Exception
    ) as error:  # of a user's code, a damaged file or a library: each is a reason to keep what serves now
        reason = " ".join(str(error).split())[:500]
        raise CannotOpen(f"{type(error).__name__}: {reason}") from error


def _open_release(folder: Path, threads: int) -> OpenedModel:
    loaded = releases.load(folder, threads)
    golden_check.require(loaded)
    manifest = loaded.manifest
    return OpenedModel(
        "litert",
        loaded.model.predict,
        tuple(manifest.input.shape),
        manifest.input.dtype,
        releases.logits_shape(manifest),
        (manifest.input.vocab or manifest.classes) if manifest.input.dtype == "int32" else 0,
    )


def _open_torch(model: Mapping[str, Any], backend: str, threads: int) -> OpenedModel:
    import torch

    from models.compress.pruning.structure import rebuild
    from models.job import read_params
    from models.zoo.spec import ModelSpec

    torch.set_num_threads(threads)
    spec = _find(model["description"])
    assert isinstance(spec, ModelSpec)
    device, dtype = _require_device(model.get("device", "cpu")), getattr(torch, model.get("dtype", "float32"))
    module = rebuild(spec, read_params(Path(model["params"]))).eval()
    vocabulary = spec.tokens if spec.input_dtype == "int32" else 0
    x = _example(_CHECKED_ROWS, tuple(spec.input_shape), spec.input_dtype, vocabulary)
    expected = _torch_compute(module, "cpu")(x)
    if not np.isfinite(expected).all():
        raise CannotOpen("its answers to the example rows are not finite")
    if backend == "channels_last":
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif backend == "packed":
        from models.compress.quantization.packed import load_packed

        module = load_packed(Path(model["packed"]), spec)
    if backend == "onnx":
        if (device, dtype) != ("cpu", torch.float32):
            raise CannotOpen('backend = "onnx" computes on the CPU in float32; leave out device and dtype')
        compute = _onnx_compute(module, spec, Path(model["onnx"]), threads)
    else:
        module = module.to(device=device, dtype=dtype)
        compiled = torch.compile(module, dynamic=True) if backend == "compiled" else module
        compute = _torch_compute(compiled, device)
    _require_same(compute(x), expected, backend, _TOLERANCES[model.get("dtype", "float32")])
    return OpenedModel(
        backend,
        compute,
        tuple(spec.input_shape),
        spec.input_dtype,
        expected.shape[1:],
        vocabulary,
        module,
        spec,
    )


def _onnx_compute(module: Any, spec: Any, path: Path, threads: int) -> Compute:
    """`path`: the exported file, written if it is not there; its name has the hash of the params."""
    try:
        import onnxruntime

        from models.onnx.export import INPUT, OUTPUT, to_onnx
    except ModuleNotFoundError as error:
        raise CannotOpen(f"backend = \"onnx\" needs {error.name}: pip install 'fedloop[onnx]'") from None
    if not path.is_file():
        content = to_onnx(module, spec).SerializeToString()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])

    def compute(x: Rows) -> npt.NDArray[np.float32]:
        (logits,) = session.run([OUTPUT], {INPUT: x})
        answer: npt.NDArray[np.float32] = logits
        return answer

    return compute


def _require_device(device: str) -> str:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise CannotOpen('device is "cuda", and PyTorch finds no GPU here; take device = "cpu"')
    return device


def _torch_compute(module: Any, device: str) -> Compute:
    import torch

    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)

    def compute(x: Rows) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            given = torch.from_numpy(x).to(device)
            logits = module(given.to(dtype) if given.is_floating_point() else given)
            answer: npt.NDArray[np.float32] = logits.float().cpu().numpy()
        return answer

    return compute


def _open_keras(model: Mapping[str, Any]) -> OpenedModel:
    import torch

    from models.job import read_params
    from models.release.keras_inference import FloatModel, require_params

    spec = _find(model["description"])
    built = spec.build(0)
    path = Path(model["params"])
    params = require_params(built, read_params(path), path)
    module = FloatModel(built, params)

    def compute(x: Rows) -> npt.NDArray[np.float32]:
        logits: npt.NDArray[np.float32] = module(torch.from_numpy(x)).numpy()
        return logits

    vocabulary = spec.tokens if spec.input_dtype == "int32" else 0
    x = _example(_CHECKED_ROWS, tuple(spec.input_shape), spec.input_dtype, vocabulary)
    expected = compute(x)
    if not np.isfinite(expected).all():
        raise CannotOpen("its answers to the example rows are not finite")
    return OpenedModel(
        "keras", compute, tuple(spec.input_shape), spec.input_dtype, expected.shape[1:], vocabulary
    )


def _find(description: Mapping[str, Any]) -> Any:
    from models import zoo

    known = dict(description)
    return zoo.find(
        known["name"],
        input_shape=tuple(known["input_shape"]),
        classes=known["classes"],
        input_dtype=known["input_dtype"],
        task=known["task"],
        **known["options"],
    )


def _example(rows: int, shape: tuple[int, ...], dtype: str, vocabulary: int) -> Rows:
    if dtype == "float32":
        return golden.floats((rows, *shape), 0, Fill(0.5, 0.5))
    return golden.ids((rows, *shape), 0, max(vocabulary, 1))


def _require_same(actual: Rows, expected: Rows, backend: str, tolerance: float) -> None:
    limit = tolerance * max(1.0, float(np.abs(expected).max()))
    error = float(np.abs(actual - expected).max())
    if not error <= limit:
        raise CannotOpen(
            f"{backend} computes other answers than torch: a logit is off by {error:.3g}, the limit is {limit:.3g}"
        )
