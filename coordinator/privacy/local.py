"""What a client spends that adds Gaussian noise to its update before it sends it.

Each round in which it takes part is one Gaussian mechanism on its own update, and these add up. Nothing is amplified: whoever receives the
update knows whose it is. Adjacent are any two updates that the client might have sent, which lie twice the clipping norm apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.privacy.accountant import AccountantName, Guarantee, NoisyRound, Spending, find_noise
from coordinator.privacy.participation import in_words
from strategies.privacy.noise.correlated import Participation


@dataclass(frozen=True)
class LocalSpending:
    """What a client has spent after the first rounds of a run, if it took part as often as it may.

    Attributes:
        noise_multiplier: of one client's update.
        participation: of a client in the rounds of the whole run.
    """

    noise_multiplier: float
    participation: Participation
    delta: float
    accountant: AccountantName = "pld"

    def after(self, rounds: int) -> Guarantee:
        """The guarantee of each client after so many rounds, 0 or more."""
        times = replace(self.participation, rounds=rounds).most
        spent = Spending(_update(self.noise_multiplier), self.delta, self.accountant).after(times)
        words = (
            "this is what one client has spent that took part as often as it may, for each client by itself, against the coordinator and "
            f"whoever else sees its updates; {in_words(self.participation)}"
        )
        return replace(spent, rounds=rounds, adjacency="replace_one", sampling_words=words)


def find_local_noise(
    participation: Participation, delta: float, epsilon: float, accountant: AccountantName = "pld"
) -> float:
    """The least noise multiplier, to a thousandth, with which a client that takes part as often as it may spends `epsilon` at most.

    Raises:
        CannotAccount: no noise multiplier between 0.05 and a million is right.
    """
    # Twice the distance needs twice the noise.
    return 2 * find_noise(_update(2.0), participation.most, delta, epsilon, accountant)


def _update(noise_multiplier: float) -> NoisyRound:
    """One update; the noise counts in multiples of how far it may move, which is twice the norm."""
    return NoisyRound(noise_multiplier / 2, "none", 1, 1)
