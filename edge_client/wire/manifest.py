"""The manifest of a training artifact: everything that a device must know before it trusts and runs the `.tflite`.

An artifact is two files. The `.tflite` has two signatures, whose tensors are bound by name:

    train(x, y, lr, <tensor>…) -> {loss, <trainable tensor>…}     one SGD step on one batch
    infer(x, <tensor>…)        -> {logits}

Labels y are int32 classes; float32 for the task `regression`, whose `logits` are one quantity a row.

The manifest lists the tensors, the shape of a batch, the operations that the runtime must support, the model's
lineage, and the golden outputs of the signatures for fixed inputs (see `edge_client.train.golden`). It is JSON with
sorted keys; `format` changes with its meaning.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from edge_client.wire.strict import InvalidDocument, parse

T = TypeVar("T")

FORMAT = 1

Check = tuple[bool, str]
"""A condition, and the message after the place if it is false."""


class ManifestError(ValueError):
    """The manifest is invalid, or does not describe the file with it; the message says where."""


@dataclass(frozen=True)
class TensorSpec:
    """One float tensor of the model.

    Attributes:
        name: its key in the state dict and in params.
        signature_name: its name as an input of the signatures, and as an output if it is trainable.
        trainable: `train` returns it; others are frozen, such as running statistics.
    """

    name: str
    signature_name: str
    shape: tuple[int, ...]
    trainable: bool
    dtype: Literal["float32"] = "float32"


@dataclass(frozen=True)
class InputSpec:
    """One example. `shape` is without the batch; ids of an int32 input are 0 to `vocab` - 1."""

    shape: tuple[int, ...]
    dtype: Literal["float32", "int32"]
    vocab: int | None = None


@dataclass(frozen=True)
class SignatureSpec:
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Operator:
    """A builtin operation, its highest version used in the file, and the number of uses."""

    name: str
    version: int
    count: int


@dataclass(frozen=True)
class FileSpec:
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Lineage:
    """The origin of the model; None if unknown or not applicable.

    Attributes:
        parent: SHA-256 of the checkpoint it was made from.
        pipeline_step: the step that made it, such as `export` or `quantize`.
        data_fingerprint: of the parent's training set.
        code_version: of the software that made it.
    """

    parent: str | None = None
    pipeline_step: str | None = None
    data_fingerprint: str | None = None
    code_version: str | None = None


@dataclass(frozen=True)
class Fill:
    """Numbers uniform over `offset` ± `scale`; `edge_client.train.golden` defines them."""

    offset: float
    scale: float


@dataclass(frozen=True)
class ArraySummary:
    """Summary of an array: its L2 norm over all elements and its first few, in C order."""

    norm: float
    first: tuple[float, ...]


@dataclass(frozen=True)
class Tolerance:
    """A number agrees if it differs by at most `absolute` + `relative` · |expected|."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class Golden:
    """Fixed inputs of both signatures, and PyTorch's outputs.

    Attributes:
        fills: for every tensor, by name.
        x: fill of a float32 input; ids of an int32 one follow from its vocabulary.
        padded_rows: number of last rows in the batch whose labels are padding.
        logits: output of `infer`.
        loss: output of `train`.
        changes: trained minus initial tensor, for every trainable tensor by name.
    """

    fills: Mapping[str, Fill]
    x: Fill
    lr: float
    padded_rows: int
    logits: ArraySummary
    loss: float
    changes: Mapping[str, ArraySummary]
    tolerance: Tolerance


@dataclass(frozen=True)
class Manifest:
    """See the module's docstring. `tensors` are in the order of the model's state dict."""

    model: str
    options: Mapping[str, Any]
    task: Literal["classification", "next_token", "regression"]
    classes: int
    input: InputSpec
    batch_size: int
    tensors: tuple[TensorSpec, ...]
    signatures: Mapping[str, SignatureSpec]
    operators: tuple[Operator, ...]
    minimum_runtime: str
    file: FileSpec
    golden: Golden
    lineage: Lineage = field(default_factory=Lineage)
    format: int = FORMAT

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the trainable tensors."""
        return tuple(tensor.name for tensor in self.tensors if tensor.trainable)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of one example's labels."""
        return self.input.shape if self.task == "next_token" else ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def from_json(text: str | bytes, place: str = "manifest") -> Manifest:
    """The manifest in `text`. `place`, such as a file name, begins every error.

    Raises:
        ManifestError: not JSON, another format, or a key missing, unknown or of the wrong type.
    """
    return parse_manifest(Manifest, text, FORMAT, place, _checks)


def parse_manifest(
    kind: type[T], text: str | bytes, current: int, place: str, checks: Callable[[T], Iterable[Check]]
) -> T:
    """Parses a manifest of format `current`. `checks`: of what the types of its values do not express.

    Raises:
        ManifestError: as `from_json`.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{place} is not JSON: {error}") from None
    version = document.get("format") if isinstance(document, dict) else None
    if version != current:
        raise ManifestError(f"{place}: format is {version!r}, this software reads format {current}")
    try:
        manifest = parse(kind, document, place)
    except InvalidDocument as error:
        raise ManifestError(str(error)) from None
    for passed, message in checks(manifest):
        if not passed:
            raise ManifestError(f"{place}.{message}")
    return manifest


def signature_name(name: str) -> str:
    """A tensor's name in the signatures: an identifier, with `__` for each dot.

    Other invalid characters become `_`, and a leading digit gets a `_` prefix.
    """
    bound = re.sub(r"[^A-Za-z0-9_]", "_", name.replace(".", "__"))
    return f"_{bound}" if bound[0].isdigit() else bound


def require_file(file: FileSpec, content: bytes, place: str = "artifact") -> None:
    """Checks that `content` is the `.tflite` that a manifest describes.

    Raises:
        ManifestError: another size or SHA-256.
    """
    if len(content) != file.size_bytes:
        raise ManifestError(
            f"{place} has {len(content)} bytes, its manifest says {file.size_bytes}; fetch it again"
        )
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise ManifestError(f"{place} has SHA-256 {digest}, its manifest says {file.sha256}; fetch it again")


def _checks(manifest: Manifest) -> tuple[Check, ...]:
    names = [tensor.name for tensor in manifest.tensors]
    bound = [tensor.signature_name for tensor in manifest.tensors]
    changed = [tensor.signature_name for tensor in manifest.tensors if tensor.trainable]
    expected = {
        "train": SignatureSpec(("x", "y", "lr", *bound), ("loss", *changed)),
        "infer": SignatureSpec(("x", *bound), ("logits",)),
    }
    return (
        (len(set(names)) == len(names) == len(set(bound)), "tensors: a name occurs twice"),
        (bool(changed), "tensors: none is trainable"),
        (all(n > 0 for t in manifest.tensors for n in t.shape), "tensors: an extent is not positive"),
        (manifest.batch_size > 0, "batch_size is not positive"),
        *input_checks(manifest.classes, manifest.input),
        one_output(manifest.task, manifest.classes),
        (dict(manifest.signatures) == expected, f"signatures: expected {expected}"),
        (set(manifest.golden.fills) == set(names), "golden.fills: not one for every tensor"),
        (
            set(manifest.golden.changes) == set(manifest.trainable),
            "golden.changes: not one for every trainable",
        ),
        (
            0 <= manifest.golden.padded_rows < manifest.batch_size,
            "golden.padded_rows is not within the batch",
        ),
    )


def one_output(task: str, classes: int) -> Check:
    """Check of the outputs of a model that predicts a quantity."""
    return task != "regression" or classes == 1, f"classes is {classes}, expected 1 for the task regression"


def input_checks(classes: int, spec: InputSpec) -> tuple[Check, ...]:
    """Checks of input and output."""
    ids = spec.dtype == "int32"
    return (
        (classes > 0, "classes is not positive"),
        (all(n > 0 for n in spec.shape), "input.shape: an extent is not positive"),
        ((spec.vocab or 0) > 0 or not ids, "input.vocab is needed for int32"),
    )
