"""A small trained digits classifier as a compression takes it, trained once a process."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from models import zoo
from models.compress.step import Context, Data, StepModel
from models.compress.tuning import Tuning, own_loss, tune
from models.pretrain.data.batches import Arrays
from models.zoo.spec import ModelSpec

TRAINING = Tuning(epochs=8, lr=4e-3, batch_size=32)


@cache
def digits() -> Data:
    """1000 rows to learn, 300 to score, 8x8."""
    from sklearn.datasets import load_digits  # takes seconds

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))[:1300]
    x, y = (found.images[order] / 16).astype(np.float32), found.target[order].astype(np.int32)
    return Data(x[:1000], y[:1000], x[1000:], y[1000:])


@cache
def cnn() -> StepModel:
    """3.8k parameters, about 0.97 on test rows."""
    return trained(zoo.get("cnn", input_shape=(8, 8), classes=10))


def trained(spec: ModelSpec, tuning: Tuning = TRAINING) -> StepModel:
    torch.set_num_threads(1)
    data, module = digits(), spec.build(0)
    rows = Arrays(data.x_train, data.y_train)
    tune(module, rows, tuning, np.random.default_rng(0), own_loss(spec))
    return StepModel(spec, module)


def context(original: StepModel, seed: int = 0) -> Context:
    return Context(seed, original)
