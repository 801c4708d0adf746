"""How to train: optimizer, length and learning rate of a pretraining, as one value.

No torch here, so that commands may read and check it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from models.options import bounded

NoDecay = Literal["none", "vectors", "embeddings"]


@dataclass(frozen=True)
class TrainingOptions:
    """How to train.

    Attributes:
        epochs: passes over the training set, where `steps` is 0.
        steps: global batches.
        batch_size: rows of a global batch, shared by all dp ranks.
        no_decay: what weight decay leaves out: "vectors", biases and other params of one dimension, such as those of
            norms; "embeddings", embeddings besides; "none", nothing.
        warmup: steps over which the learning rate rises from 0.
        decay: the learning rate afterwards: constant, or falling to a tenth linearly or along half a cosine.
        clip_norm: largest norm of the whole gradient; 0: no clipping.
        outer_lr, outer_momentum: of the outer optimizer, where the plan has one (Douillard 2023, section 3.1).
        freeze: modules that keep their params, "embedding,layers.0"; see `models.pretrain.freezing`.
        freeze_cache_mib: cache for the outputs of a frozen prefix of the model, per process; 0: no cache.
        shift: largest random shift of images in pixels, drawn anew in every epoch; 0: none.
        validate_every: steps between two scores of the model on rows held out of the training set; 0: none.
    """

    epochs: int = bounded(150, 1, 100_000)
    steps: int = bounded(0, 0, 100_000_000)
    batch_size: int = bounded(30, 1, 1_000_000)
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = bounded(4e-3, 0.0, 1e3)
    weight_decay: float = bounded(0.01, 0.0, 1e3)
    no_decay: NoDecay = "vectors"
    momentum: float = bounded(0.9, 0.0, 1.0)
    beta1: float = bounded(0.9, 0.0, 1.0)
    beta2: float = bounded(0.999, 0.0, 1.0)
    eps: float = bounded(1e-8, 0.0, 1.0)
    warmup: int = bounded(0, 0, 100_000_000)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    clip_norm: float = bounded(0.0, 0.0, 1e6)
    outer_lr: float = bounded(0.7, 0.0, 1e3)
    outer_momentum: float = bounded(0.9, 0.0, 1.0)
    shift: int = bounded(0, 0, 64)
    validate_every: int = bounded(0, 0, 100_000_000)
    freeze: str = ""
    freeze_cache_mib: int = bounded(1024, 0, 1_000_000)

    def steps_of(self, steps_per_epoch: int) -> int:
        """Global batches in all."""
        return self.steps or self.epochs * steps_per_epoch

    def rate(self, step: int, steps: int) -> float:
        """Learning rate at `step`, counted from 0, of `steps`."""
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        progress = (step - self.warmup) / max(1, steps - self.warmup)
        if self.decay == "linear":
            return self.lr * (1 - 0.9 * progress)
        if self.decay == "cosine":
            return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        return self.lr


def validation_rows(requested: int, rows: int) -> int:
    """How many of `rows` training rows to hold out: `requested`; 0: a tenth of them, at most 1024."""
    return requested or max(1, min(1024, rows // 10))


@dataclass(frozen=True)
class ProfileOptions:
    """What `models.pretrain.profiling` records of a training.

    Attributes:
        folder: for the results, inside the job's folder.
        start: warm-up steps before the first profiled one.
        peak_tflops: of one processor, 10^12 operations a second; 0: measured with a matrix product.
    """

    folder: str = "profile"
    start: int = bounded(3, 0, 100_000_000)
    steps: int = bounded(5, 1, 1000)
    peak_tflops: float = bounded(0.0, 0.0, 1e6)
