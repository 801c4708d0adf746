"""The mechanism of a run on devices as its ledger keeps it, and what rounds of several runs spend together on one device.

    mechanism = Mechanism.of_json(row.mechanism)
    mechanism.spending().after(rounds).in_words()
    compose([mechanism.releases(rounds), other.releases(rounds)], delta)

Runs compose as one, those that hide a whole device and those that hide single rows (DP-SGD) each by themselves. The privacy loss of Gaussian
releases without sampling adds up in closed form, that of sampled ones by convolution (Koskela 2020; dp-accounting). Noise on integers has no
known privacy loss distribution; with it all divergences add up (Mironov 2017, Proposition 1). An epsilon of several runs compares what is
released with any one device's updates and with zeros in their place. Under Poisson sampling that is the same as leaving the device
out, since a sum is divided by a fixed number. Of local noise it is an upper bound: it would hide other updates in their place too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from coordinator.privacy.accountant import (
    AccountantName,
    NoisyRound,
    Sampling,
    Spending,
    compose_losses,
    gaussian_divergences,
)
from coordinator.privacy.correlated import CorrelatedSpending
from coordinator.privacy.distributed import ORDERS, DistributedSpending, to_epsilon
from coordinator.privacy.local import LocalSpending
from coordinator.privacy.rows import RowSpending, RowWork
from edge_client.wire import strict
from strategies.privacy.noise.correlated import BandedNoise, CorrelatedNoise, Participation, TreeNoise
from strategies.privacy.noise.distributed import GroupNoise
from strategies.privacy.noise.secure import Floats

Hidden = Literal["device", "row"]
"""What a mechanism hides: that a device's updates are in, or that any one of its rows is."""

AnySpending = Spending | CorrelatedSpending | LocalSpending | DistributedSpending | RowSpending

_COMPARED: dict[Hidden, str] = {
    "device": "with any one device's updates replaced by zeros",
    "row": "with and without any one row of any one device",
}


def across_runs_in_words(hides: Hidden) -> str:
    """What an epsilon of several runs means."""
    return (
        "by the privacy loss distribution of all of these rounds together, or by their Rényi divergences if one of them has noise on integers "
        f"(dp-accounting), {_COMPARED[hides]}"
    )


@dataclass(frozen=True)
class Releases:
    """So many equal noisy releases that a device, or one of its rows, may be in.

    Attributes:
        probability: that it is in one of them, as far as the account may use it.
        in_ring: of noise on integers: what it spends; None: the noise is Gaussian.
    """

    noise_multiplier: float
    probability: float
    times: int
    in_ring: RingNoise | None = None
    hides: Hidden = "device"


@dataclass(frozen=True)
class RingNoise:
    """Noise that devices add inside secure aggregation.

    Attributes:
        group_size: as of the experiment. `cohort`: the most devices of a round.
        values: of an update.
    """

    group: GroupNoise
    group_size: int
    cohort: int
    values: int

    def spending(self, participation: Participation, delta: float) -> DistributedSpending:
        """What rounds with this noise spend."""
        sums = self.group.possible(self.group_size, self.cohort, self.values)
        return DistributedSpending(sums, participation, delta)


@dataclass(frozen=True)
class Mechanism:
    """All that a run's epsilon follows from.

    Attributes:
        clients: the devices of which `cohort` are drawn, under Poisson sampling.
        minimum_separation: of correlated noise (DP-FTRL), with `bands`, or a tree if that is 0, and of noise that devices add; 0: noise is
            the coordinator's, and new in each round.
        by_devices: the mechanism by which devices add the noise; empty: the coordinator adds it.
        in_ring: of `distributed`. `work`: of `example`: the devices of which one spends most.
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
    by_devices: Literal["", "local", "distributed", "example"] = ""
    in_ring: RingNoise | None = None
    work: tuple[RowWork, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The value as JSON."""
        return asdict(self)

    @staticmethod
    def of_json(document: Mapping[str, Any]) -> Mechanism:
        """The value of `to_json`."""
        return strict.parse(Mechanism, document, "mechanism")

    @property
    def hides(self) -> Hidden:
        return "row" if self.by_devices == "example" else "device"

    @property
    def is_correlated(self) -> bool:
        """Whether rounds take noise of earlier ones back."""
        return self.minimum_separation > 0 and not self.by_devices

    def spending(self) -> AnySpending:
        """The run's account, with `after(rounds)`."""
        return _spending(self)

    def releases(self, rounds: int, times: int | None = None) -> Releases | None:
        """What so many rounds release of a device. `times`: if it took part in so many of them only; None: as often as it may.

        Under Poisson sampling these are the rounds for which it may have been drawn. The result is None if it is in no release.
        """
        spending = self.spending()
        most = rounds
        if self.by_devices:
            most = Participation(max(rounds, 1), self.minimum_separation).most if rounds else 0
        count = most if times is None else min(times, rounds)
        if count < 1:
            return None
        if isinstance(spending, CorrelatedSpending):
            return Releases(spending.multiplier_after(rounds, times), 1.0, 1)
        if isinstance(spending, Spending):
            return Releases(self.noise_multiplier, spending.kind.probability, count)
        if isinstance(spending, RowSpending):
            worst, _ = spending.worst(count)
            return Releases(self.noise_multiplier, worst.probability, worst.steps * count, hides="row")
        if isinstance(spending, LocalSpending):
            # Any other update in its place moves what is sent by twice the norm.
            return Releases(self.noise_multiplier / 2, 1.0, count)
        return Releases(self.noise_multiplier, 1.0, count, self.in_ring)


@lru_cache(maxsize=64)
def _spending(mechanism: Mechanism) -> AnySpending:
    each = mechanism
    if not each.minimum_separation:
        kind = NoisyRound(each.noise_multiplier, each.sampling, each.cohort, each.clients)
        return Spending(kind, each.delta, each.accountant)
    participation = Participation(each.rounds, each.minimum_separation)
    if each.by_devices == "local":
        return LocalSpending(each.noise_multiplier, participation, each.delta, each.accountant)
    if each.by_devices == "example":
        return RowSpending(each.noise_multiplier, each.work, participation, each.delta, each.accountant)
    if each.by_devices == "distributed":
        assert each.in_ring is not None  # it was made with it
        return each.in_ring.spending(participation, each.delta)
    noise: CorrelatedNoise = BandedNoise(each.bands) if each.bands else TreeNoise()
    return CorrelatedSpending(noise, each.noise_multiplier, participation, each.delta, each.accountant)


def compose(releases: Iterable[Releases | None], delta: float) -> float:
    """Epsilon of all these releases together on what they hide, which is the same of all."""
    counted = [each for each in releases if each is not None]
    assert len({each.hides for each in counted}) <= 1
    return _compose(tuple(sorted(counted, key=repr)), delta)


@lru_cache(maxsize=4096)
def _compose(releases: tuple[Releases, ...], delta: float) -> float:
    if not releases:
        return 0.0
    if any(each.in_ring is not None for each in releases):
        total = np.sum([each.times * _divergences(each) for each in releases], axis=0)
        return round(to_epsilon(total, delta), 6)
    # Gaussians without sampling compose to one.
    alone = sum(each.times / each.noise_multiplier**2 for each in releases if each.probability == 1)
    parts = [(alone**-0.5, 1.0, 1)] if alone else []
    parts += [
        (each.noise_multiplier, each.probability, each.times) for each in releases if each.probability < 1
    ]
    return round(compose_losses(parts, delta), 6)


def _divergences(release: Releases) -> Floats:
    """Rényi divergences of one of these releases, at `ORDERS`."""
    if release.in_ring is not None:
        return release.in_ring.spending(Participation(1, 1), 0.5).divergences
    return gaussian_divergences(release.noise_multiplier, release.probability, ORDERS)


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
