"""The model: a module of the app with the name of one of our packages."""

from __future__ import annotations

import numpy as np


def initial(features: int) -> np.ndarray:
    return np.zeros(features)


def load_data(partition: int, features: int) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(partition)
    x = drawn.normal(size=(20 + partition, features))
    return x, x @ np.arange(features) + 0.1 * drawn.normal(size=len(x))


def step(w: np.ndarray, x: np.ndarray, y: np.ndarray, lr: float) -> np.ndarray:
    return w - lr * x.T @ (x @ w - y) / len(x)
