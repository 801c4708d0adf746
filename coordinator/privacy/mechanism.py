"""The mechanism of a run on devices as its ledger keeps it, and what rounds of several runs spend together on one device.

    mechanism = Mechanism.of_json(row.mechanism)
    mechanism.spending().after(rounds).in_words()
    compose([mechanism.releases(rounds), other.releases(rounds)], delta)

Runs compose as one: the privacy loss of Gaussian releases without sampling adds up in closed form, that of sampled ones by convolution
(Koskela 2020; dp-accounting). Every epsilon of several runs is of the privacy loss distribution, whatever accountant single runs have, and
compares what is released with any one device's updates and with zeros in their place. Under Poisson sampling that is the same as leaving the
device out, since a sum is divided by a fixed number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from coordinator.privacy.accountant import (
    AccountantName,
    NoisyRound,
    Sampling,
    Spending,
    compose_losses,
)
from coordinator.privacy.correlated import CorrelatedSpending
from strategies.privacy.noise.correlated import BandedNoise, CorrelatedNoise, Participation, TreeNoise

ACROSS_RUNS = "by the privacy loss distribution of all of these rounds together (dp-accounting), with any one device's updates replaced by zeros"
"""What an epsilon of several runs means."""


@dataclass(frozen=True, order=True)
class Releases:
    """So many equal noisy releases that a device may be in.

    Attributes:
        probability: that a device is in one of them, as far as the account may use it.
    """

    noise_multiplier: float
    probability: float
    times: int


@dataclass(frozen=True)
class Mechanism:
    """All that a run's epsilon follows from.

    Attributes:
        clients: the devices of which `cohort` are drawn, under Poisson sampling.
        minimum_separation: of correlated noise (DP-FTRL), with `bands`, or a tree if that is 0; 0: noise is new in each round.
    """

    noise_multiplier: float
    sampling: Sampling
    cohort: int
    clients: int
    rounds: int
    delta: float
    accountant: AccountantName
    minimum_separation: int = 0
    bands: int = 0

    def to_json(self) -> dict[str, Any]:
        """The value as JSON."""
        return asdict(self)

    @staticmethod
    def of_json(document: Mapping[str, Any]) -> Mechanism:
        """The value of `to_json`."""
        return Mechanism(**document)

    def spending(self) -> Spending | CorrelatedSpending:
        """The run's account, with `after(rounds)`."""
        return _spending(self)

    def releases(self, rounds: int, times: int | None = None) -> Releases | None:
        """What so many rounds release of a device. `times`: if it took part in so many of them only; None: nothing.

        Under Poisson sampling these are the rounds for which it may have been drawn.
        """
        count = rounds if times is None else min(times, rounds)
        if count < 1:
            return None
        spending = self.spending()
        if isinstance(spending, CorrelatedSpending):
            return Releases(spending.multiplier_after(rounds, times), 1.0, 1)
        return Releases(self.noise_multiplier, spending.kind.probability, count)


@lru_cache(maxsize=64)
def _spending(mechanism: Mechanism) -> Spending | CorrelatedSpending:
    each = mechanism
    if not each.minimum_separation:
        kind = NoisyRound(each.noise_multiplier, each.sampling, each.cohort, each.clients)
        return Spending(kind, each.delta, each.accountant)
    noise: CorrelatedNoise = BandedNoise(each.bands) if each.bands else TreeNoise()
    participation = Participation(each.rounds, each.minimum_separation)
    return CorrelatedSpending(noise, each.noise_multiplier, participation, each.delta, each.accountant)


def compose(releases: Iterable[Releases | None], delta: float) -> float:
    """Epsilon of all these releases together on one device."""
    return _compose(tuple(sorted(each for each in releases if each is not None)), delta)


@lru_cache(maxsize=4096)
def _compose(releases: tuple[Releases, ...], delta: float) -> float:
    if not releases:
        return 0.0
    # Gaussians without sampling compose to one.
    alone = sum(each.times / each.noise_multiplier**2 for each in releases if each.probability == 1)
    parts = [(alone**-0.5, 1.0, 1)] if alone else []
    parts += [
        (each.noise_multiplier, each.probability, each.times) for each in releases if each.probability < 1
    ]
    return round(compose_losses(parts, delta), 6)


@lru_cache(maxsize=256)
def rounds_within(mechanism: Mechanism, budget: float | None) -> int:
    """How many of the run's rounds its budget suffices for."""
    spending, least, most = mechanism.spending(), 0, mechanism.rounds
    if budget is None:
        return most
    # From below: an epsilon far beyond the budget takes long to compute.
    tried = 1
    while tried < most:
        if spending.after(tried).epsilon > budget:
            most = tried - 1
        else:
            least, tried = tried, 2 * tried
    while least < most:
        middle = (least + most + 1) // 2
        if spending.after(middle).epsilon <= budget:
            least = middle
        else:
            most = middle - 1
    return least
