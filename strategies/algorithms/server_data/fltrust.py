"""FLTrust: updates count by how far they point where the server's own rows do, each at the length of the server's own. Cao 2021, Algorithm 2.

Update gᵢ has the trust score TSᵢ = max(0, cos(gᵢ, g₀)), where g₀ is what the server's rows give, and the aggregate is
Σ TSᵢ · ‖g₀‖/‖gᵢ‖ · gᵢ / Σ TSᵢ (equations 2 to 4). If no update has a positive score, the model stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies import options
from strategies.algorithms.server_data.server import NeedsServer, Server
from strategies.client_rules import PlainSGD
from strategies.cohort_fold import CohortFold, NeedsEachUpdate
from strategies.params import Tensors, elementwise, l2_norm, piece_of, shape_of, spans
from strategies.robust import Combination, Matrix, combine
from strategies.strategy import SGD, Strategy, WeightedMean
from strategies.update import Update


@dataclass(frozen=True)
class TrustedMean(NeedsEachUpdate, NeedsServer):
    """Aggregates by trust scores. No update counts for more because its client claims more examples."""

    server: Server | None = None

    def start(self, cohort_size: int) -> CohortFold:
        return CohortFold(self._aggregate, WeightedMean("uniform").start(cohort_size))

    def _aggregate(self, updates: Sequence[Update]) -> Tensors:
        assert self.server is not None  # `with_server`
        return aggregate(updates, self.server.train())


def aggregate(updates: Sequence[Update], reference: Tensors) -> Tensors:
    """The aggregated delta, float64. `reference`: g₀, with the tensors of the updates."""
    weights = weights_of(updates, reference)
    if not weights.any():
        return elementwise(lambda value: np.zeros(value.shape), updates[0].delta)
    return combine(
        [update.delta for update in updates], None, Combination(lambda values: values[0], weights[None])
    )


def weights_of(updates: Sequence[Update], reference: Tensors) -> Matrix:
    """What each update is multiplied with, TSᵢ · ‖g₀‖/‖gᵢ‖ / Σ TS, float64 [n]; all 0 if no update has a positive score."""
    length = l2_norm(reference)
    norms = np.array([update.norm for update in updates])
    products = np.array([_product(update.delta, reference) for update in updates])
    has_direction = norms * length > 0
    # Divided one after the other: the product of two tiny norms may be 0.
    cosines = np.divide(products, norms, out=np.zeros(len(norms)), where=has_direction)
    scores = np.maximum(np.divide(cosines, length, out=np.zeros(len(norms)), where=has_direction), 0)
    factors = np.divide(length, norms, out=np.zeros(len(norms)), where=has_direction)
    total = float(scores.sum())
    return np.asarray(scores * factors / total) if total else np.zeros(len(norms))


def _product(one: Tensors, other: Tensors) -> float:
    """The inner product over all tensors, in float64."""
    total = 0.0
    for name in sorted(other):
        for start, stop in spans(int(np.prod(shape_of(other, name), dtype=np.int64))):
            pieces = (piece_of(each, name, start, stop).astype(np.float64) for each in (one, other))
            total += float(np.sum(np.multiply(*pieces)))
    return total


@dataclass(frozen=True)
class FLTrust:
    limits: ClassVar[str] = "simulations"
    bears: ClassVar[str] = "any number"

    server_lr: float = options.server_lr()

    def build(self) -> Strategy:
        return Strategy("fltrust", PlainSGD(), (), TrustedMean(), SGD(self.server_lr), modes=("sync",))
