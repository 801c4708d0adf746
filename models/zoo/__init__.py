"""Architectures as plain torch modules without parallelism, and how to find one by name."""

from __future__ import annotations

from models.zoo.resolve import ModelNotFound, find, get
from models.zoo.spec import ModelSpec
from models.zoo.tensorflow.keras import KerasSpec, KerasUnfit

__all__ = ["KerasSpec", "KerasUnfit", "ModelNotFound", "ModelSpec", "find", "get"]
