"""The inputs and the result of a compression step: a model, and the data that the step may use.

A step is a pure function `(StepModel, Data, options, Context) -> StepModel` that may raise StepRefused, registered in `models.compress.pipeline.STEPS` under its
`kind` with a dataclass of options (`models.options`). Steps that change float params give a `StepModel` with a `module`;
quantization adds a `tflite` with its precision. A module whose layers changed in size or
number is still described by its spec and params alone: `models.compress.pruning.structure.rebuild`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import nn

from models.zoo.spec import ModelSpec

Precision = Literal[
    "float32",
    "float16",
    "weight-int8",
    "dynamic-int8",
    "static-int8",
    "mixed",
    "int4",
    "codebook",
    "weight-int4",
]
OnProgress = Callable[[Mapping[str, Any]], None]
"""Receives progress, any JSON."""
OnEpoch = Callable[[int, float], None]
"""Called with the number of an epoch, from 1, and its mean loss."""


class StepRefused(ValueError):
    """The step is impossible for this model, or its result misses a requirement; the message says why and what to do."""


@dataclass(frozen=True)
class StepModel:
    """A model between two steps. Never changed in place.

    Attributes:
        spec: as in the zoo; names, shapes of input and output, loss.
        module: float, in evaluation mode; may have fewer channels or more layers than `spec.module()`.
        tflite: the file for devices, once there is one: `infer(x[1, …]) -> logits[1, …]`.
        precision: of `tflite`, without one of `packed`, otherwise float32.
        packed: the content of `packed.safetensors`, the module with matrices of few bits, for servers.
        facts: details of the step, as JSON, for the report.
    """

    spec: ModelSpec
    module: nn.Module
    tflite: bytes | None = None
    precision: Precision = "float32"
    facts: Mapping[str, Any] = field(default_factory=dict)
    packed: bytes | None = None


@dataclass(frozen=True)
class Data:
    """Rows to train and calibrate with, and rows to score on. Labels are int32, `PADDING` if unlabelled; or float32 quantities.

    Attributes:
        x_train: [N, …]; x_test: [M, …], never trained or calibrated on.
        x_extra: rows without labels, for a teacher.
    """

    x_train: npt.NDArray[Any]
    y_train: npt.NDArray[Any]
    x_test: npt.NDArray[Any]
    y_test: npt.NDArray[Any]
    x_extra: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class Context:
    """The context of a step.

    Attributes:
        seed: of the step's own generator, so that a step resumed alone draws the same numbers.
        original: the source of the pipeline: the teacher, unless the step names others.
        teachers: further ones by name.
    """

    seed: int
    original: StepModel
    teachers: Mapping[str, StepModel] = field(default_factory=dict)
    on_progress: OnProgress = lambda line: None

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def report_epochs(self, **line: object) -> OnEpoch:
        """Reports every epoch as progress, with the further keys of `line`."""
        return lambda epoch, loss: self.on_progress({**line, "epoch": epoch, "loss": loss})
