"""What computes a model: the backends that it has, known without a framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TORCH_BACKENDS = ("torch", "channels_last", "compiled", "onnx")


def backends(model: Mapping[str, Any]) -> tuple[str, ...]:
    """The backends that a model has, the first of them by default. `model`: as `models.serving.opening.open_model` takes it."""
    if model.get("release"):
        return ("litert",)
    if str(model["description"]["name"]).endswith(".keras"):
        return ("keras",)
    known = TORCH_BACKENDS if len(model["description"]["input_shape"]) >= 2 else ("torch", "compiled", "onnx")
    return ("packed", *known) if model.get("packed") else known
