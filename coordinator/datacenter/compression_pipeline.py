"""The document of a compression pipeline."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from coordinator.document_checks import Section

PIPELINE_KEYS = ("rows", "test_rows", "seed", "step")
"""Keys of a pipeline's document."""

PRECISIONS = (
    "float32",
    "float16",
    "weight-int8",
    "dynamic-int8",
    "static-int8",
    "mixed",
    "int4",
    "codebook",
    "weight-int4",
)
"""As `models.compress.step.Precision`, which needs torch."""


class Pipeline(Section):
    """A compression pipeline.

    Attributes:
        rows: at most so many rows train and calibrate.
        test_rows: at most so many rows score every step.
        seed: of rows and steps; by default the source's own.
        step: `kind` and the options of that kind, one table a step.
    """

    rows: int = Field(2000, ge=1)
    test_rows: int = Field(500, ge=1)
    seed: int | None = Field(None, ge=0)
    step: list[dict[str, Any]] = Field(default_factory=list)

    @property
    def limits(self) -> dict[str, int]:
        return {"train": self.rows, "test": self.test_rows}
