"""Small trained models on digits, for steps of compression."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from models import datasets, zoo
from models.compress.step import Context, Data, StepModel
from models.compress.tuning import Tuning, own_loss, tune
from models.pretrain.data.batches import Arrays


def digits() -> Data:
    loaded = datasets.load("digits", seed=7)
    learnt, test = ~loaded.test, loaded.test
    return Data(loaded.x[learnt], loaded.y[learnt], loaded.x[test], loaded.y[test])


def trained(name: str, data: Data, epochs: int, lr: float = 3e-3, **options: Any) -> StepModel:
    """One of the zoo, trained on `data` with one seed."""
    spec = zoo.get(name, input_shape=data.x_train.shape[1:], classes=10, **options)
    module = spec.build(7)
    tune(
        module,
        Arrays(data.x_train, data.y_train),
        Tuning(epochs=epochs, batch_size=32, lr=lr),
        np.random.default_rng(7),
        own_loss(spec),
    )
    return StepModel(spec, module.eval())


def context(model: StepModel, seed: int = 3) -> Context:
    return Context(seed, model)


def accuracy(model: StepModel, data: Data) -> float:
    with torch.inference_mode():
        predicted = model.module(torch.from_numpy(data.x_test)).argmax(-1).numpy()
    return float((predicted == data.y_test).mean())
