"""Dataset: examples with labels, a held-out part and, where the data has them, sites."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import DataProblem
from edge_client.wire.preprocessing import ImageSchema, TextSchema
from edge_client.wire.schema import DataSchema
from models.datasets.large_arrays import pieces
from models.tasks import TaskKind

DataError = DataProblem
"""One error for both sides: tables are read by the device's code."""


@dataclass(frozen=True)
class Dataset:
    """All rows of one data set, training and test.

    Attributes:
        name: its name in the experiment file.
        x: [N, …], float32 features or int32 token ids, C order.
        y: int32 class indices, [N] for `classification`, [N, T] for `next_token`; for `regression` float32 quantities [N],
            less `label_scale`'s mean and divided by its deviation.
        test: bool [N]; True rows are held out and never trained on.
        classes: number of labels; for `next_token` also the number of token ids of the inputs; for `regression` 1.
        task: what the labels mean.
        class_names: of length `classes`, or empty.
        site: int32 [N], which natural client a row belongs to, or None where there are none.
        site_names: names of the natural clients, indexed by `site`.
        schema: how rows in natural form become inputs, of a table; `described` gives one for any data.
        image, text: how images or texts became x; None of other data.
        label_scale: for `regression`, mean and deviation of the training labels in their own unit.
        notes: what the loader found and decided, one sentence each, for the preview.
        private_notes: further ones that quote single rows, for whoever may read the data.
    """

    name: str
    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    test: npt.NDArray[np.bool_]
    classes: int
    task: TaskKind = "classification"
    class_names: tuple[str, ...] = ()
    site: npt.NDArray[np.int32] | None = None
    site_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    private_notes: tuple[str, ...] = ()
    schema: DataSchema | None = None
    image: ImageSchema | None = None
    text: TextSchema | None = None
    label_scale: tuple[float, float] | None = None

    @property
    def described(self) -> DataSchema:
        """Its schema; of data that is no table, image or text, the form of its arrays."""
        kind: Literal["image", "text", "array"] = "image" if self.image else "text" if self.text else "array"
        return self.schema or DataSchema(
            kind,
            self.input_shape,
            self.input_dtype,
            self.class_names,
            label_scale=self.label_scale,
            image=self.image,
            text=self.text,
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.x.shape[1:]

    @property
    def input_dtype(self) -> Literal["float32", "int32"]:
        return "int32" if self.x.dtype == np.int32 else "float32"

    def fingerprint(self) -> str:
        """SHA-256 over dtypes, shapes and bytes of every array: equal data, equal fingerprint."""
        digest = hashlib.sha256()
        for array in (self.x, self.y, self.test, self.site):
            if array is not None:
                digest.update(f"{array.dtype.str}{array.shape}".encode())
                for piece in pieces(array):
                    digest.update(np.ascontiguousarray(array[piece]).tobytes())
        return digest.hexdigest()
