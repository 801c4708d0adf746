"""A client whose loss is a parabola: f(w) = a/2 · (w − c)². Fixed points of federated algorithms have closed forms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.examples import Examples
from strategies.client_rules import Correction
from strategies.params import Params


@dataclass(frozen=True)
class QuadraticRuntime:
    """A `Runtime` on one scalar tensor `w`, float64 inside. Each batch is one step, whatever is in it."""

    a: float
    c: float
    name: str = "quadratic"
    trainable: tuple[str, ...] = ("w",)

    def take_steps(
        self, params: Params, batches: Iterable[Examples], lr: float, correction: Correction, seed: int
    ) -> tuple[Params, list[float]]:
        start = params["w"].astype(np.float64)
        offset = 0.0 if correction.offset is None else correction.offset["w"].astype(np.float64)
        w, losses = start, []
        for _ in batches:
            losses.append(float(np.sum(self.a / 2 * (w - self.c) ** 2)))
            w = w - lr * (self.a * (w - self.c) + correction.mu * (w - start) + offset)
        return {"w": w.astype(np.float32)}, losses

    def logits(self, params: Params, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        return np.full((len(x), 1), params["w"], np.float32)
