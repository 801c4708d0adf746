"""What rounds spend in which clients add the noise, on integers in the ring of secure aggregation.

The noise is not Gaussian, so it has divergences of its own (`strategies.privacy.noise.divergence`), which add up over the rounds in which a
client takes part. They are known for integer orders, and converted to epsilon by dp-accounting (Canonne 2020, Proposition 12). The
privacy loss distribution is not known in many dimensions, so there is no "pld".

The coordinator opens the sums and knows who takes part, so sampling hides nobody from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from coordinator.privacy.accountant import Guarantee, least_noise
from coordinator.privacy.participation import in_words
from strategies.privacy.noise.correlated import Participation
from strategies.privacy.noise.distributed import DistributedNoise, GroupNoise
from strategies.privacy.noise.divergence import divergences
from strategies.privacy.noise.secure import Floats

ORDERS = (*range(2, 64), 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Orders at which divergences are known."""


@dataclass(frozen=True)
class DistributedSpending:
    """What the first rounds of a run have spent, in each of which a client's encoded update is in one sum.

    Attributes:
        sums: the noise of every kind of sum that a client's update may be in; the one that hides it worst counts.
        participation: of a client in the rounds of the whole run.
    """

    sums: Sequence[DistributedNoise]
    participation: Participation
    delta: float

    @property
    def noise_multiplier(self) -> float:
        """That of a sum of the fewest clients."""
        return self.sums[0].noise_multiplier

    def after(self, rounds: int) -> Guarantee:
        """The guarantee after so many rounds, 0 or more."""
        times = replace(self.participation, rounds=rounds).most
        epsilon = to_epsilon(times * self.divergences, self.delta) if rounds else 0.0
        words = (
            "each sum is opened only with the noise of all the clients that have to stay, none of which leaves it out or tells it; "
            f"{in_words(self.participation)}"
        )
        return Guarantee(round(epsilon, 6), self.delta, rounds, "rdp", "replace_by_zero", "none", words)

    @cached_property
    def divergences(self) -> Floats:
        """Rényi divergences of one round, at `ORDERS`."""
        return np.asarray(np.max([divergences(each, ORDERS) for each in self.sums], axis=0))


def to_epsilon(found: Floats, delta: float) -> float:
    """Epsilon of Rényi divergences at `ORDERS` (Canonne 2020, Proposition 12)."""
    from dp_accounting.rdp import compute_epsilon

    return float(compute_epsilon(ORDERS, found, delta)[0])


def find_distributed_noise(
    group: GroupNoise,
    group_size: int,
    cohort: int,
    values: int,
    participation: Participation,
    delta: float,
    epsilon: float,
) -> float:
    """The least noise multiplier, to a thousandth, with which all rounds together spend `epsilon` at most. That of `group` does not matter.

    Raises:
        CannotAccount: no noise multiplier between 0.05 and a million is right.
        ValueError: as `DistributedNoise.in_group`.
    """

    def spent(noise: float) -> float:
        sums = replace(group, noise_multiplier=noise).possible(group_size, cohort, values)
        return DistributedSpending(sums, participation, delta).after(participation.rounds).epsilon

    return least_noise(spent, epsilon, delta, f"in {participation.rounds} rounds")
