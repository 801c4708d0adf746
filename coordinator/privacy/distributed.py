"""What rounds spend in which clients add the noise, on integers in the ring of secure aggregation.

The noise is not Gaussian, so it has divergences of its own (`strategies.privacy.noise.divergence`), which add up over rounds. They are
known for integer orders, and converted to epsilon by dp-accounting (Canonne 2020, Proposition 12). The privacy loss distribution is not
known in many dimensions, so there is no "pld".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from coordinator.privacy.accountant import Guarantee
from strategies.privacy.noise.distributed import DistributedNoise
from strategies.privacy.noise.divergence import divergences
from strategies.privacy.noise.secure import Floats

_ORDERS = (*range(2, 64), 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class DistributedSpending:
    """What equal rounds spend, each of which opens one sum of encoded updates."""

    noise: DistributedNoise
    delta: float

    def after(self, rounds: int) -> Guarantee:
        """The guarantee after so many rounds, 0 or more."""
        from dp_accounting.rdp import compute_epsilon

        epsilon = (
            float(compute_epsilon(_ORDERS, rounds * self._divergences, self.delta)[0]) if rounds else 0.0
        )
        words = (
            f"each sum is opened only with the noise of {self.noise.fewest} clients that do as told; nothing is claimed of how rounds get "
            "their clients"
        )
        return Guarantee(epsilon, self.delta, rounds, "rdp", "replace_by_zero", "none", words)

    @cached_property
    def _divergences(self) -> Floats:
        return divergences(self.noise, _ORDERS)
