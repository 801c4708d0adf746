"""What whoever receives an update expects of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Expected:
    """What a result of this round must contain.

    Attributes:
        shapes: tensor name -> shape.
        max_examples: the most examples it may claim; None: no limit.
        weight_limit: the most examples it counts for, however many it claims; None: no limit.
        dtypes: tensor name -> dtype as in safetensors, such as F16; tensors without an entry are F32.
        code: how its update is written (`strategies.codes`); None: as tensors.
        narrower: model class -> the shapes of all its params, of devices that train a narrower model.
    """

    shapes: Mapping[str, tuple[int, ...]]
    payload_limit_bytes: int
    max_examples: int | None = None
    weight_limit: int | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, Any] | None = None
    narrower: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)

    def dtype(self, name: str) -> str:
        return self.dtypes.get(name, "F32")
