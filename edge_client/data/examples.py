"""Examples: local data as arrays, from a connector to a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PADDING = -1
"""A label that the loss and the accuracy ignore."""

QUANTITY_PADDING = -1e30
"""As `PADDING`, of labels that are quantities: the loss ignores those below half of it."""


class NoExamples(ValueError):
    """A client has no data to train on."""


@dataclass(frozen=True)
class Examples:
    """Local data. `x`: [N, …] float32 or int32. `y`: int32 class indices, [N] or [N, T] for sequences; or float32 quantities [N]."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, indices: npt.NDArray[np.int64] | slice) -> Examples:
        return Examples(self.x[indices], self.y[indices])
