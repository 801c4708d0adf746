"""Loss and accuracy of a whole module on all rows of a set."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from models.job import JobError
from models.labels import PADDING
from models.pretrain.data.batches import BatchRandom, Source
from models.pretrain.objective import objective_of
from models.zoo.spec import ModelSpec

ROWS = 256


def evaluate(module: nn.Module, spec: ModelSpec, source: Source, device: torch.device) -> dict[str, float]:
    """`test_loss` and `test_accuracy` over all labels that count; leaves the module on `device`, in evaluation mode.

    Holds the logits of `ROWS` rows. Randomness of the source is the same in every evaluation.
    """
    module.to(device).eval()
    objective = objective_of(spec)
    loss, hits, counted = 0.0, 0, 0
    with torch.inference_mode():
        for start in range(0, len(source), ROWS):
            rows = np.arange(start, min(start + ROWS, len(source)))
            x, y = source.read(rows, BatchRandom(np.random.default_rng([start]), len(rows), rows - start))
            labels = torch.from_numpy(np.ascontiguousarray(y)).long().to(device)
            logits = module(torch.from_numpy(np.ascontiguousarray(x)).to(device))
            loss += float(objective(logits, labels))
            hits += int(((logits.argmax(-1) == labels) & (labels != PADDING)).sum())
            counted += int((labels != PADDING).sum())
    return {"test_loss": loss / max(1, counted), "test_accuracy": hits / max(1, counted)}


def logits_of(module: nn.Module, x: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """[N, (T,) classes] on the CPU; leaves the module in evaluation mode."""
    module.eval()
    with torch.inference_mode():
        return torch.cat(
            [
                module(torch.from_numpy(np.ascontiguousarray(x[start : start + ROWS])).to(device)).cpu()
                for start in range(0, len(x), ROWS)
            ]
        )


def require_images(x: npt.NDArray[Any], setting: str, where: object) -> None:
    """Checks that `x` holds images, as `setting` requires.

    Raises:
        JobError: the examples are no images of float32 pixels.
    """
    if x.ndim not in (3, 4) or x.dtype != np.float32:
        raise JobError(f"{where}: {setting}, but examples of shape {x.shape[1:]} are no images")
