"""Loss and accuracy, or R2 of quantities, of a whole module on all rows of a set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from edge_client.train.evaluation import Evaluation, figures_of, merge, score
from models.job import JobError
from models.labels import are_quantities, counting
from models.pretrain.data.batches import BatchRandom, Source
from models.pretrain.objective import as_targets, objective_of
from models.tasks import OF_QUANTITIES
from models.zoo.spec import ModelSpec

ROWS = 256


@dataclass(frozen=True)
class Scores:
    """Figures over all labels that count. `quantities`: R2, MAE and RMSE of labels that are quantities, in the labels' scale."""

    loss: float
    accuracy: float | None
    quantities: Mapping[str, float | None] | None = None

    @property
    def quality(self) -> float:
        """The figure that models of the task are compared by (`models.tasks`); R2 of equal labels counts as 0."""
        if self.quantities is not None:
            return self.quantities[OF_QUANTITIES.figure] or 0.0
        return self.accuracy or 0.0

    def document(self) -> dict[str, Any]:
        """As in the result of a training."""
        metrics = {} if self.quantities is None else {"metrics": dict(self.quantities)}
        return {"test_loss": self.loss, "test_accuracy": self.accuracy, **metrics}


def evaluate(module: nn.Module, spec: ModelSpec, source: Source, device: torch.device) -> Scores:
    """The module's scores on all rows; leaves the module on `device`, in evaluation mode.

    Holds the logits of `ROWS` rows. Randomness of the source is the same in every evaluation.
    """
    module.to(device).eval()
    objective = objective_of(spec)
    loss, hits, counted = 0.0, 0, 0
    parts: list[Evaluation] = []
    with torch.inference_mode():
        for start in range(0, len(source), ROWS):
            rows = np.arange(start, min(start + ROWS, len(source)))
            x, y = source.read(rows, BatchRandom(np.random.default_rng([start]), len(rows), rows - start))
            labels = as_targets(torch.from_numpy(np.ascontiguousarray(y))).to(device)
            logits = module(torch.from_numpy(np.ascontiguousarray(x)).to(device))
            loss += float(objective(logits, labels))
            counted += int(counting(labels).sum())
            if are_quantities(labels):
                parts.append(score(logits.float().cpu().numpy(), np.asarray(y)))
            else:
                hits += int(((logits.argmax(-1) == labels) & counting(labels)).sum())
    mean_loss = loss / max(1, counted)
    if parts:
        return Scores(mean_loss, None, figures_of(merge(parts)))
    return Scores(mean_loss, hits / max(1, counted))


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
