"""The manifest of an inference artifact: everything that a device must know before it trusts and runs a released model.

A release is a folder of two files, `manifest.json` and `model.tflite`. The file has one signature,

    infer(x) -> {logits}

with params inside, in one of several precisions; x and logits are float32 (ids int32), or integers whose scale the file
states. The golden rows are stream 0 of `edge_client.train.golden`; in addition there may be real rows with known classes.
The manifest is JSON with sorted keys; `format` changes with its meaning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from edge_client.wire import schema as schemas
from edge_client.wire.manifest import (
    Check,
    FileSpec,
    Fill,
    InputSpec,
    Lineage,
    Operator,
    Tolerance,
    input_checks,
    one_output,
    parse_manifest,
)
from edge_client.wire.schema import DataSchema

FORMAT = 1

RuntimeKind = Literal["litert", "tflite-runtime", "tflite-micro"]
"""ai-edge-litert; tflite-runtime 2.14, its predecessor; tflite-micro, for microcontrollers."""


@dataclass(frozen=True)
class GoldenRows:
    """Golden rows and right answers.

    Attributes:
        x: fill of the synthetic rows; ids follow from the vocabulary.
        logits: the float model's logits of each row in float32, [classes]; for sequences those of the last position.
        tolerance: of logits; derived from this file's own error, so wider for integers.
        real_x: real held-out rows, flattened, or empty; real_y: their classes.
        least_accuracy: on the real rows; the artifact is refused below it.
    """

    x: Fill
    logits: tuple[tuple[float, ...], ...]
    tolerance: Tolerance
    real_x: tuple[tuple[float, ...], ...] = ()
    real_y: tuple[int, ...] = ()
    least_accuracy: float = 0.0


@dataclass(frozen=True)
class InferenceManifest:
    """See the module's docstring.

    Attributes:
        model: name in the registry; architecture: name in the model zoo, with its options.
        version: in the registry.
        precision: as in `models.compress.step.Precision`.
        runtimes: those whose golden answers were right at release; no other may run it.
        arena_bytes: memory arena for tflite-micro, None if it does not run there.
        memory_bytes: peak resident memory of loading and one inference.
        device_classes: intended device classes; empty: any.
        dataset: logical name of the data that a device may evaluate it on; empty: none.
        params_sha256: of the float params it was made from.
        schema: how rows in natural form become inputs; None of releases without one.
    """

    model: str
    version: int
    architecture: str
    options: Mapping[str, Any]
    task: Literal["classification", "next_token", "regression"]
    classes: int
    input: InputSpec
    precision: str
    operators: tuple[Operator, ...]
    minimum_runtime: str
    runtimes: tuple[RuntimeKind, ...]
    memory_bytes: int
    file: FileSpec
    golden: GoldenRows
    arena_bytes: int | None = None
    device_classes: tuple[str, ...] = ()
    dataset: str = ""
    params_sha256: str = ""
    lineage: Lineage = field(default_factory=Lineage)
    schema: DataSchema | None = None
    format: int = FORMAT

    @property
    def data_schema(self) -> DataSchema:
        """The schema; of a release without one, the form of the model's input."""
        return self.schema or DataSchema("array", self.input.shape, self.input.dtype)

    def to_json(self) -> str:
        document = asdict(self)
        del document["schema"]
        if self.schema is not None:  # daemons of before know no such key
            document["schema"] = self.schema.to_document()
        return json.dumps(document, indent=1, sort_keys=True) + "\n"


def from_json(text: str | bytes, place: str = "manifest") -> InferenceManifest:
    """The manifest in `text`. `place`, such as a file name, begins every error.

    Raises:
        ManifestError: not JSON, another format, or a key missing, unknown or of the wrong type.
    """
    return parse_manifest(InferenceManifest, text, FORMAT, place, _checks)


def _checks(manifest: InferenceManifest) -> tuple[Check, ...]:
    golden, size = manifest.golden, math.prod(manifest.input.shape)
    schema = manifest.data_schema
    fits = (schema.input_shape, schema.input_dtype) == (manifest.input.shape, manifest.input.dtype)
    return (
        *((holds, f"schema: {problem}") for holds, problem in schemas.checks(schema)),
        (fits, "schema is of rows of another form than the model's input"),
        (len(schema.classes) in (0, manifest.classes), f"schema has not {manifest.classes} classes"),
        *input_checks(manifest.classes, manifest.input),
        one_output(manifest.task, manifest.classes),
        (
            (manifest.task == "regression") == (schema.label_scale is not None),
            f"schema: label_scale is {schema.label_scale}, the task is {manifest.task}",
        ),
        (bool(golden.logits), "golden.logits is empty"),
        (
            all(len(row) == manifest.classes for row in golden.logits),
            f"golden.logits: a row has not {manifest.classes} numbers",
        ),
        (len(golden.real_x) == len(golden.real_y), "golden.real_x has not one row for each of real_y"),
        (all(len(row) == size for row in golden.real_x), f"golden.real_x: a row has not {size} numbers"),
        (min(golden.tolerance.absolute, golden.tolerance.relative) >= 0, "golden.tolerance is negative"),
    )
