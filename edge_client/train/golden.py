"""Golden inputs and outputs: a test that every runtime can run on itself, and the comparison of its outputs.

Old or broken runtimes may run a file without an error and compute something else (wrong kernels for some
operations, garbage from quantized ones). So a manifest holds PyTorch's outputs for fixed inputs, and a device
refuses a file whose outputs differ on its own runtime. The inputs are megabytes of params, so the manifest does not
hold them; they follow from shapes by integer arithmetic that any language can repeat:

    mix(n):  n ^= n >> 16;  n *= 0x7feb352d;  n ^= n >> 15;  n *= 0x846ca68b;  n ^= n >> 16     (mod 2³²)
    word(stream, i) = mix(mix(stream + 1) + i)        i counts elements in C order
    float element   = offset + scale · (word / 2³¹ − 1), in float64, then rounded to float32
    id or label     = word mod (vocabulary or classes); a label that is a quantity is a float, offset 0 and scale 1

Streams: 0 is x, 1 is y, 2 and on are the tensors in the manifest's order. The labels of the last
`padded_rows` rows are then padding. (The mixer is Wellons' lowbias32.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edge_client.data.examples import PADDING, QUANTITY_PADDING, Examples
from edge_client.wire.manifest import ArraySummary, Fill, Golden, Manifest, Tolerance
from strategies.client_rules import Correction
from strategies.params import Params

if TYPE_CHECKING:
    from edge_client.train.trainer import Runtime

FIRST = 8
"""Elements of an array that an `ArraySummary` holds."""


QUANTITIES = Fill(0.0, 1.0)
"""Fill of labels that are quantities."""


class SelfTestFailed(RuntimeError):
    """This runtime does not compute the golden outputs; the artifact must not be used.

    Attributes:
        signature: `train` or `infer`.
        tensor: the output that differs.
        what: the number that differs, such as `norm` or `element 3`.
    """

    def __init__(self, signature: str, tensor: str, what: str, got: float, expected: float) -> None:
        super().__init__(
            f"self-test failed: {signature} gave {tensor} with {what} {got:.9g}, expected {expected:.9g}; "
            "this runtime does not run this artifact correctly"
        )
        self.signature, self.tensor, self.what = signature, tensor, what
        self.got, self.expected = got, expected


@dataclass(frozen=True)
class GoldenOutputs:
    """The outputs of one runtime; fields as in `Golden`."""

    logits: ArraySummary
    loss: float
    changes: dict[str, ArraySummary]


@dataclass(frozen=True)
class GoldenInputs:
    """One batch and the params, shaped as in the manifest."""

    params: Params
    x: npt.NDArray[Any]
    y: npt.NDArray[Any]


def golden_inputs(manifest: Manifest) -> GoldenInputs:
    """The golden inputs, from the shapes and fills in the manifest."""
    rows, golden = manifest.batch_size, manifest.golden
    x_shape, spec = (rows, *manifest.input.shape), manifest.input
    y: npt.NDArray[Any]
    if manifest.task == "regression":
        y = floats((rows,), 1, QUANTITIES)
        y[rows - golden.padded_rows :] = QUANTITY_PADDING
    else:
        y = ids((rows, *manifest.label_shape), 1, manifest.classes)
        y[rows - golden.padded_rows :] = PADDING
    return GoldenInputs(
        params={t.name: floats(t.shape, 2 + k, golden.fills[t.name]) for k, t in enumerate(manifest.tensors)},
        x=floats(x_shape, 0, golden.x)
        if spec.dtype == "float32"
        else ids(x_shape, 0, spec.vocab or manifest.classes),
        y=y,
    )


def run(runtime: Runtime, manifest: Manifest) -> GoldenOutputs:
    """The outputs of `runtime` for the manifest's golden inputs."""
    inputs = golden_inputs(manifest)
    logits = runtime.logits(inputs.params, inputs.x)
    batch = Examples(inputs.x, inputs.y)
    trained, (loss,) = runtime.take_steps(inputs.params, [batch], manifest.golden.lr, Correction(), seed=0)
    changes = {name: summarize(trained[name] - inputs.params[name]) for name in manifest.trainable}
    return GoldenOutputs(summarize(logits), loss, changes)


def compare(got: GoldenOutputs, expected: Golden) -> None:
    """Raises SelfTestFailed if an output is off by more than the tolerance."""
    loss_got, loss = (
        ArraySummary(abs(got.loss), (got.loss,)),
        ArraySummary(abs(expected.loss), (expected.loss,)),
    )
    _compare("infer", "logits", got.logits, expected.logits, expected.tolerance)
    _compare("train", "loss", loss_got, loss, expected.tolerance)
    for name, change in expected.changes.items():
        _compare("train", f"change of {name}", got.changes[name], change, expected.tolerance)


def summarize(array: npt.NDArray[Any]) -> ArraySummary:
    """Norm in float64 and the first elements."""
    flat = np.asarray(array, np.float64).reshape(-1)
    return ArraySummary(float(np.sqrt(np.sum(flat**2))), tuple(float(value) for value in flat[:FIRST]))


def _compare(
    signature: str, tensor: str, got: ArraySummary, expected: ArraySummary, tolerance: Tolerance
) -> None:
    numbers = [("norm", got.norm, expected.norm)]
    numbers += [
        (f"element {i}", a, b) for i, (a, b) in enumerate(zip(got.first, expected.first, strict=True))
    ]
    for what, a, b in numbers:
        # Written so that a NaN, whose comparisons are all false, fails.
        if not abs(a - b) <= tolerance.absolute + tolerance.relative * abs(b):
            raise SelfTestFailed(signature, tensor, what, a, b)


def pseudo_random(shape: tuple[int, ...], stream: int) -> npt.NDArray[np.uint32]:
    """The words of a stream, as defined above, in this shape."""
    start = mix(np.asarray([stream + 1], dtype=np.uint32))
    count: npt.NDArray[np.uint32] = np.arange(math.prod(shape), dtype=np.uint32)
    return mix(start + count).reshape(shape)


def mix(n: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Wellons' lowbias32."""
    n = n ^ (n >> np.uint32(16))
    n = n * np.uint32(0x7FEB352D)
    n = n ^ (n >> np.uint32(15))
    n = n * np.uint32(0x846CA68B)
    return n ^ (n >> np.uint32(16))


def floats(shape: tuple[int, ...], stream: int, fill: Fill) -> npt.NDArray[np.float32]:
    """Float elements of a stream."""
    unit = pseudo_random(shape, stream).astype(np.float64) / 2**31 - 1
    return (fill.offset + fill.scale * unit).astype(np.float32)


def ids(shape: tuple[int, ...], stream: int, count: int) -> npt.NDArray[np.int32]:
    """Ids or labels of a stream, 0 to `count` - 1."""
    return (pseudo_random(shape, stream) % np.uint32(count)).astype(np.int32)
