"""Architectures: plain torch modules that know no parallelism, and the one way to get at them."""

from __future__ import annotations

from models.zoo.keras import KerasSpec, KerasUnfit
from models.zoo.resolve import ModelNotFound, find, get
from models.zoo.spec import ModelSpec

__all__ = ["KerasSpec", "KerasUnfit", "ModelNotFound", "ModelSpec", "find", "get"]
