"""How well a whole module does on all rows of a set."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from models.job import JobError
from models.zoo import ModelSpec

ROWS = 256


def evaluate(
    module: nn.Module, spec: ModelSpec, x: npt.NDArray[Any], y: npt.NDArray[np.int32], device: torch.device
) -> dict[str, float]:
    """`test_loss` and `test_accuracy` on all rows."""
    logits = logits_of(module, x, device)
    metrics = spec.metrics(logits, torch.from_numpy(y))
    return {"test_loss": metrics["loss"], "test_accuracy": metrics["accuracy"]}


def logits_of(module: nn.Module, x: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """[N, (T,) classes] on the CPU; the module is left in evaluation mode."""
    module.eval()
    with torch.inference_mode():
        return torch.cat(
            [
                module(torch.from_numpy(np.ascontiguousarray(x[start : start + ROWS])).to(device)).cpu()
                for start in range(0, len(x), ROWS)
            ]
        )


def require_images(x: npt.NDArray[Any], shift: int, where: object) -> None:
    """Checks that shifting makes sense for `x`.

    Raises:
        JobError: the examples are no images of float32 pixels.
    """
    if shift and (x.ndim not in (3, 4) or x.dtype != np.float32):
        raise JobError(
            f"{where}: options.shift is {shift}, but examples of shape {x.shape[1:]} are no images; use 0"
        )
