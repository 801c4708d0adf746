"""What rounds with correlated noise spend: all of them together are one release of one Gaussian mechanism.

The noise multiplier is that of the mechanism: z is drawn with a standard deviation of noise_multiplier · sensitivity · clip_norm, the
sensitivity counting how often a client may take part (`strategies.privacy.noise.correlated`). C is lower triangular, so what t rounds
release is the mechanism of t rounds, with its smaller sensitivity and the same z; and clients may train on what earlier rounds
released (Denisov 2022, Theorem 2.1). Nothing is assumed of how rounds get their clients but that these keep their distance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.privacy.accountant import AccountantName, Guarantee, NoisyRound, Spending, find_noise
from coordinator.privacy.participation import in_words
from strategies.privacy.noise.correlated import CorrelatedNoise, Participation


@dataclass(frozen=True)
class CorrelatedSpending:
    """What the first rounds of a run have spent.

    Attributes:
        participation: of a client in the rounds of the whole run.
    """

    noise: CorrelatedNoise
    noise_multiplier: float
    participation: Participation
    delta: float
    accountant: AccountantName = "pld"

    @property
    def round_multiplier(self) -> float:
        """Standard deviation of z over the clipping norm."""
        return self.noise_multiplier * self.noise.sensitivity(self.participation)

    def multiplier_after(self, rounds: int, times: int | None = None) -> float:
        """The noise multiplier of what so many rounds, 1 or more, release together. `times`: for a client that took part in so many of them,
        1 or more."""
        known = Participation(rounds, self.participation.separation, times)
        return self.round_multiplier / self.noise.sensitivity(known)

    def after(self, rounds: int) -> Guarantee:
        """The guarantee after so many of the run's rounds, 0 or more."""
        multiplier = self.multiplier_after(max(rounds, 1))
        once = Spending(_release(multiplier), self.delta, self.accountant).after(min(rounds, 1))
        return replace(once, rounds=rounds, sampling_words=in_words(self.participation))


def find_correlated_noise(delta: float, epsilon: float, accountant: AccountantName = "pld") -> float:
    """The least noise multiplier, to a thousandth, with which all rounds together spend `epsilon` at most.

    Raises:
        CannotAccount: no noise multiplier between 0.05 and a million is right.
    """
    return find_noise(_release(1.0), 1, delta, epsilon, accountant)


def _release(noise_multiplier: float) -> NoisyRound:
    return NoisyRound(noise_multiplier, "none", 1, 1)
