"""A model trained by one process, here and now."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from models.pretrain import trainer, world
from models.pretrain.data.batches import Arrays
from models.pretrain.plan import ParallelPlan
from models.pretrain.training import TrainingOptions
from models.zoo import ModelSpec


def trained(
    spec: ModelSpec, x: npt.NDArray[Any], y: npt.NDArray[np.int32], options: TrainingOptions, seed: int = 0
) -> tuple[nn.Module, list[float]]:
    """The module in evaluation mode, and the loss of every step."""
    with world.join(ParallelPlan()) as here:
        training = trainer.build(spec, Arrays(x, y), options, here, seed)
        losses: list[float] = []
        trainer.train(training, lambda progress: losses.extend(progress.losses), every=10)
    return training.parallel.parts[0].eval(), losses
