"""What clients spend that train by DP-SGD, which hides single rows of a client rather than the client.

A step takes each of a client's n rows with probability q = batch_size / n. The steps of all rounds in which the client takes part add up, and each
client has an epsilon of its own: nobody else's rows are in its steps. What counts is the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from coordinator.privacy.accountant import AccountantName, Guarantee, NoisyRound, Spending, least_noise
from coordinator.privacy.participation import in_words
from strategies.privacy.noise.correlated import Participation


@dataclass(frozen=True)
class RowWork:
    """A client's part in a round.

    Attributes:
        rows: that it has.
        batch_size: rows of a step on average, unless it has fewer.
        steps: that it takes.
    """

    rows: int
    batch_size: int
    steps: int

    @property
    def probability(self) -> float:
        """With which a step takes a row."""
        return min(1.0, self.batch_size / self.rows)

    def round(self, noise_multiplier: float) -> NoisyRound:
        """One step, in the accountant's terms."""
        return NoisyRound(noise_multiplier, "poisson", min(self.batch_size, self.rows), self.rows)


def find_hardest(
    rows: Iterable[int], batch_size: int, epochs: int | None, steps: int | None
) -> list[RowWork]:
    """Of clients with so many rows those of which one spends most: no other takes its rows with a larger probability in as many steps.

    Clients without rows do not train. With `steps` it is the client with the fewest rows.
    """
    found: list[RowWork] = []
    for number in sorted({each for each in rows if each}):
        taken = steps if steps is not None else (epochs or 0) * math.ceil(number / batch_size)
        if not found or taken > found[-1].steps:
            found.append(RowWork(number, batch_size, taken))
    return found


@dataclass(frozen=True)
class RowSpending:
    """What the first rounds of a run have spent of the client that spends most, if it took part as often as it may.

    Attributes:
        noise_multiplier: standard deviation of a step's noise over the norm of a row's gradient.
        work: of the clients of which one spends most; at least one.
        participation: of a client in the rounds of the whole run.
    """

    noise_multiplier: float
    work: Sequence[RowWork]
    participation: Participation
    delta: float
    accountant: AccountantName = "pld"

    def after(self, rounds: int) -> Guarantee:
        """The guarantee of every client's rows after so many rounds, 0 or more."""
        times = replace(self.participation, rounds=rounds).most
        worst, spent = self.worst(times)
        words = (
            f"of all clients that with {worst.rows} rows has spent most, if it took part as often as it may, whose steps, {worst.steps} a round, "
            f"take each row by itself with probability {worst.probability:.4g}, and nobody learns which; how many rows a client has is no "
            f"secret; {in_words(self.participation)}"
        )
        return replace(
            spent, rounds=rounds, adjacency="add_or_remove_row", sampling="none", sampling_words=words
        )

    def worst(self, times: int) -> tuple[RowWork, Guarantee]:
        """The client that spends most in so many of its rounds, and what it spends."""
        # Rényi divergences bound what the loss distribution says, so few clients have to be asked for that.
        bounds = {each: self._spent(each, times, "rdp") for each in self.work}
        order = sorted(self.work, key=lambda each: -bounds[each].epsilon)
        worst, most = order[0], self._spent(order[0], times, self.accountant)
        for each in order[1:]:
            if bounds[each].epsilon <= most.epsilon:
                break
            if (spent := self._spent(each, times, self.accountant)).epsilon > most.epsilon:
                worst, most = each, spent
        return worst, most

    def _spent(self, work: RowWork, times: int, accountant: AccountantName) -> Guarantee:
        return _spent(work.round(self.noise_multiplier), work.steps * times, self.delta, accountant)


@lru_cache(maxsize=4096)
def _spent(step: NoisyRound, steps: int, delta: float, accountant: AccountantName) -> Guarantee:
    return Spending(step, delta, accountant).after(steps)


def find_row_noise(spending: RowSpending, epsilon: float) -> float:
    """The least noise multiplier, to a thousandth, with which every client spends `epsilon` at most. That of `spending` does not matter.

    Raises:
        CannotAccount: no noise multiplier between 0.05 and a million is right.
    """
    rounds, when = spending.participation.rounds, f"in {spending.participation.rounds} rounds"

    def find(accountant: AccountantName, guess: float) -> float:
        def spent(noise: float) -> float:
            tried = replace(spending, noise_multiplier=noise, accountant=accountant)
            return tried.after(rounds).epsilon

        return least_noise(spent, epsilon, spending.delta, when, guess)

    quick = find("rdp", 1.0)
    return quick if spending.accountant == "rdp" else find(spending.accountant, quick)
