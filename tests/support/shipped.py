"""A model that was shipped: trained a little, on a few rows of the digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_client.train.torch_trainer import read
from edge_client.wire import arrays
from models import zoo
from models.datasets import load
from models.zoo.spec import ModelSpec
from strategies.params import Params

ROWS, STEPS = 150, 60


def digits_model(name: str, **options: Any) -> ModelSpec:
    return zoo.get(name, input_shape=(8, 8), classes=10, **options)


def shipped(spec: ModelSpec, seed: int = 7, steps: int = STEPS) -> Params:
    """Its params after a few steps of Adam."""
    data = load("digits", seed=seed)
    chosen = np.random.default_rng(0).choice(np.flatnonzero(~data.test), ROWS, replace=False)
    x, y = torch.from_numpy(data.x[chosen]), torch.from_numpy(data.y[chosen])
    module = spec.build(0).train()
    optimizer = torch.optim.Adam(module.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        spec.loss(module(x), y).backward()
        optimizer.step()
    return read(module)


def written(params: Params, path: Path) -> Path:
    path.write_bytes(arrays.encode(params))
    return path
