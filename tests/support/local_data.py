"""Small random data sets, models' first params and SCAFFOLD streams, for tests of local training."""

from __future__ import annotations

import numpy as np

from edge_client.data.examples import PADDING, Examples
from edge_client.train.torch_trainer import TorchRuntime, read
from models.zoo.spec import ModelSpec
from strategies.params import Params


def examples(
    input_shape: tuple[int, ...], classes: int, count: int, *, seed: int, padded: int = 0
) -> Examples:
    """Normal features and uniform labels; the first `padded` labels count for nothing."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, count).astype(np.int32)
    y[:padded] = PADDING
    return Examples(rng.standard_normal((count, *input_shape)).astype(np.float32), y)


def torch_runtime(spec: ModelSpec) -> TorchRuntime:
    return TorchRuntime(spec.build(seed=0), spec.loss)


def first_params(spec: ModelSpec, seed: int = 0) -> Params:
    return read(spec.build(seed))


def noise_like(params: Params, *, seed: int, scale: float = 0.1) -> Params:
    """Normal tensors with the names and shapes of `params`."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, scale, value.shape).astype(np.float32) for name, value in params.items()}
