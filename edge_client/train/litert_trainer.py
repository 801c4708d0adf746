"""Local training in LiteRT, for small devices: numpy and the interpreter only.

The artifact's `train` signature is one plain SGD step on a batch of fixed size,

    train(x, y, lr, w…) -> {loss, w − lr · ∇f(w)}.

That is enough for every client rule. A rule's step is w ← w − lr · (∇f(w) + mu · (w − w₀) + offset), and
the two added terms do not depend on the gradient, so subtracting lr · (mu · (w − w₀) + offset) from what
`train` returns is exactly that step. A second signature that returns gradients would double the file to
compute the same thing. With momentum or clipping the step needs the gradient itself: it is what a step of rate 1 subtracts.

A shorter batch is padded with zero rows labelled `PADDING` (quantities: `QUANTITY_PADDING`), which the artifact's loss excludes from its mean, so the
step is that of the real rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.examples import PADDING, QUANTITY_PADDING, Examples
from edge_client.train import golden
from edge_client.train.interpreter import interpreter
from edge_client.train.trainer import BatchTooLarge
from edge_client.wire.manifest import Manifest, ManifestError, require_file
from strategies.client_rules import Correction
from strategies.params import Params, Tensors, l2_norm

Feeds = dict[str, npt.NDArray[Any]]


class LiteRTRuntime:
    """Runs one artifact repeatedly, with params from outside. One thread.

    Raises:
        ManifestError: the file is not the manifest's, or its signatures differ from the manifest.
    """

    name = "litert"

    def __init__(self, tflite: Path | bytes, manifest: Manifest) -> None:
        content = tflite if isinstance(tflite, bytes) else tflite.read_bytes()
        require_file(manifest.file, content, "artifact" if isinstance(tflite, bytes) else str(tflite))
        self._manifest = manifest
        self._bound = {tensor.name: tensor.signature_name for tensor in manifest.tensors}
        self.trainable: tuple[str, ...] = manifest.trainable
        interpreter_class = interpreter()
        try:
            self._interpreter = interpreter_class(model_content=content, num_threads=1)
        except ValueError as error:
            raise ManifestError(f"LiteRT cannot load the artifact: {error}") from None
        self._train = self._runner("train")
        self._infer = self._runner("infer")

    def take_steps(
        self, params: Tensors, batches: Iterable[Examples], lr: float, correction: Correction, seed: int
    ) -> tuple[Params, list[float]]:
        """As the protocol; `seed` is unused, because an artifact has no randomness.

        Raises:
            BatchTooLarge: a batch has more rows than the artifact accepts.
            UnknownOptimizer: the steps are AdamW's. It divides by the size of a gradient, and the small ones are lost in the rounding of
                the weights that the artifact returns.
        """
        correction.require_sgd(self.name)
        frozen = {name: _float32(params[name]) for name in self._bound if name not in self.trainable}
        start = {name: _float32(params[name]) for name in self.trainable}
        rate = np.float32(lr)
        weights, losses = start, []
        velocity: Params = {}
        for batch in batches:
            if not correction.is_stepwise:
                loss, stepped = self._step(weights | frozen, batch, np.float32(1))
                gradient: Params = {name: weights[name] - value for name, value in stepped.items()}
                velocity = _velocity(gradient, velocity, correction, weights, start)
                weights = {name: weights[name] - rate * value for name, value in velocity.items()}
                weights |= {name: start[name] for name in correction.fixed}
                losses.append(loss)
                continue
            loss, trained = self._step(weights | frozen, batch, rate)
            trained |= {name: start[name] for name in correction.fixed}  # the artifact moves all
            for name, value in trained.items():
                if name in correction.fixed:
                    continue
                if correction.offset is not None:
                    value -= rate * correction.offset[name]
                if correction.mu:
                    value -= rate * np.float32(correction.mu) * (weights[name] - start[name])
            weights = trained
            losses.append(loss)
        return {
            name: value.copy() if value is start[name] else value for name, value in weights.items()
        }, losses

    def logits(self, params: Tensors, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        rows = self._manifest.batch_size
        tensors = {bound: _float32(params[name]) for name, bound in self._bound.items()}
        answer = np.empty((len(x), *self._manifest.label_shape, self._manifest.classes), np.float32)
        for start in range(0, len(x), rows):
            part = x[start : start + rows]
            answer[start : start + rows] = self._infer(x=self._padded(part), **tensors)["logits"][: len(part)]
        return answer

    def self_test(self) -> None:
        """Checks the golden outputs of both signatures on this runtime.

        Raises:
            SelfTestFailed: naming the signature, the tensor, the actual and the expected number.
        """
        golden.compare(golden.run(self, self._manifest), self._manifest.golden)

    def _step(self, weights: Params, batch: Examples, lr: np.float32) -> tuple[float, Params]:
        """Loss and trained tensors, in new arrays: the interpreter reuses its own memory."""
        feeds: Feeds = {bound: weights[name] for name, bound in self._bound.items()}
        padding = QUANTITY_PADDING if self._manifest.task == "regression" else PADDING
        feeds |= {"x": self._padded(batch.x), "y": self._padded(batch.y, padding), "lr": np.asarray(lr)}
        answer = self._train(**feeds)
        trained = {
            name: np.array(answer[self._bound[name]], np.float32, order="C") for name in self.trainable
        }
        return float(answer["loss"]), trained

    def _padded(self, values: npt.NDArray[Any], padding: float = 0) -> npt.NDArray[Any]:
        """The rows, padded with `padding` up to the artifact's batch size."""
        missing = self._manifest.batch_size - len(values)
        if missing < 0:
            raise BatchTooLarge(
                f"a batch of {len(values)} rows does not fit this artifact, made for {self._manifest.batch_size}; "
                "set local.batch_size to at most that, or export the model for larger batches"
            )
        if not missing:
            return np.ascontiguousarray(values)
        return np.concatenate([values, np.full((missing, *values.shape[1:]), padding, values.dtype)])

    def _runner(self, name: str) -> Any:
        """The runner of a signature whose inputs match the manifest.

        The interpreter would silently resize an input of another shape, so shapes are checked here.
        """
        known = self._interpreter.get_signature_list()
        spec = self._manifest.signatures[name]
        if name not in known or set(known[name]["outputs"]) != set(spec.outputs):
            raise ManifestError(
                f"the artifact has no signature {name} that returns {', '.join(spec.outputs)}"
            )
        runner = self._interpreter.get_signature_runner(name)
        actual = {
            key: (tuple(int(n) for n in d["shape"]), d["dtype"])
            for key, d in runner.get_input_details().items()
        }
        expected = self._inputs(spec.inputs)
        for key in sorted(set(actual) | set(expected)):
            if actual.get(key) != expected.get(key):
                raise ManifestError(
                    f"signature {name}: the artifact's input {key} is {_describe(actual.get(key))}, "
                    f"the manifest says {_describe(expected.get(key))}"
                )
        return runner

    def _inputs(self, names: tuple[str, ...]) -> dict[str, tuple[tuple[int, ...], type]]:
        """(shape, dtype) of a signature's inputs, by the manifest."""
        manifest, rows = self._manifest, self._manifest.batch_size
        x_dtype = np.float32 if manifest.input.dtype == "float32" else np.int32
        known: dict[str, tuple[tuple[int, ...], type]] = {
            "x": ((rows, *manifest.input.shape), x_dtype),
            "y": ((rows, *manifest.label_shape), np.float32 if manifest.task == "regression" else np.int32),
            "lr": ((), np.float32),
        }
        known |= {tensor.signature_name: (tensor.shape, np.float32) for tensor in manifest.tensors}
        return {name: known[name] for name in names}


def _velocity(
    gradient: Params, velocity: Params, correction: Correction, weights: Params, start: Params
) -> Params:
    """The velocity after a step. `velocity`: before it, empty at the start; `gradient`: of the loss, changed in place."""
    for name, value in gradient.items():
        if correction.offset is not None:
            value += correction.offset[name]
        if correction.mu:
            value += np.float32(correction.mu) * (weights[name] - start[name])
    factor = np.float32(correction.clip_factor(l2_norm(gradient)))
    momentum = np.float32(correction.momentum)
    return {
        name: factor * value + (momentum * velocity[name] if velocity else np.float32(0))
        for name, value in gradient.items()
    }


def _float32(value: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(value, np.float32).reshape(value.shape)


def _describe(tensor: tuple[tuple[int, ...], type] | None) -> str:
    return "absent" if tensor is None else f"{tensor[1].__name__} {list(tensor[0])}"
