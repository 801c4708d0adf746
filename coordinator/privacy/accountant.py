"""What rounds of noised sums spend: epsilon for a delta, with everything that it assumes.

    kind = NoisyRound(noise_multiplier=1.0, sampling="poisson", cohort=200, clients=2000)
    epsilon_after(kind, rounds=50, delta=1e-5)      # Guarantee(epsilon=5.148…, …)
    find_noise(kind, rounds=50, delta=1e-5, epsilon=8.0)

The arithmetic is dp-accounting's. What it has to know is how rounds get their clients:

    poisson   each client takes part with probability cohort / clients, by itself; data sets differ by one client (add or remove)
    fixed     `cohort` of the clients, drawn without replacement; one client's data are replaced, which moves a sum by twice the norm
    none      nobody claims how clients got in; one client's update is replaced by zeros, and that it took part is no secret

dp-accounting has Rényi divergences (RDP) for all of them, and privacy loss distributions (PLD), which give a smaller epsilon, for all but
sampling without replacement (Wang 2019, Theorem 27).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

AccountantName = Literal["pld", "rdp", "rdp_classic"]
Sampling = Literal["poisson", "fixed", "none"]
Adjacency = Literal["add_or_remove_one", "replace_one", "replace_by_zero", "add_or_remove_row"]

ADJACENCY: dict[Sampling, Adjacency] = {
    "poisson": "add_or_remove_one",
    "fixed": "replace_one",
    "none": "replace_by_zero",
}
"""Which data sets an epsilon compares."""

_ADJACENCY_WORDS: dict[Adjacency, str] = {
    "add_or_remove_one": "with and without any one client, with all of its rows",
    "add_or_remove_row": "with and without any one row of any one client",
    "replace_one": "with any one client's rows replaced by others",
    "replace_by_zero": "with any one client's updates replaced by zeros; that it took part is not hidden",
}
_ACCOUNTANT_WORDS: dict[AccountantName, str] = {
    "pld": "the privacy loss distribution (dp-accounting)",
    "rdp": "Rényi divergences (dp-accounting)",
    "rdp_classic": "Rényi divergences, converted by Mironov 2017, Proposition 3",
}

_INTERVALS = (1e-4, 1e-3)
"""Of the privacy loss, which is rounded up to them: the fine one, which costs ten times as much, where a round's loss is small."""
_TINY_DELTA = 1e-30
_LEAST_NOISE, _MOST_NOISE = 0.05, 1e6


class CannotAccount(ValueError):
    """No accountant answers the question; the message says why, and what to do."""


@dataclass(frozen=True)
class NoisyRound:
    """A round that releases a sum of clipped updates with Gaussian noise.

    Attributes:
        noise_multiplier: standard deviation of the noise over the clipping norm.
        cohort: clients in a round, of Poisson sampling on average.
        clients: of which they are drawn.
    """

    noise_multiplier: float
    sampling: Sampling
    cohort: int
    clients: int

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0:
            raise CannotAccount(f"noise_multiplier is {self.noise_multiplier:g}; expected more than 0")
        if not 1 <= self.cohort <= self.clients:
            raise CannotAccount(
                f"cohort is {self.cohort} of {self.clients} clients; expected 1 to all of them"
            )

    @property
    def probability(self) -> float:
        """That a client takes part in a round, as far as the account may use it."""
        return 1.0 if self.sampling == "none" else self.cohort / self.clients

    @property
    def sampling_words(self) -> str:
        """The assumption about how the round got its clients, for people."""
        share = f"{self.cohort} of {self.clients} clients"
        return {
            "poisson": f"each round takes each client by itself with probability {self.probability:g} ({share} on average), and nobody "
            "learns who took part",
            "fixed": f"each round takes {share}, all such sets equally likely, and nobody learns who took part",
            "none": "nothing is claimed of how rounds get their clients",
        }[self.sampling]


@dataclass(frozen=True)
class Guarantee:
    """An epsilon with all that it depends on.

    Attributes:
        sampling_words: how rounds got their clients.
    """

    epsilon: float
    delta: float
    rounds: int
    accountant: AccountantName
    adjacency: Adjacency
    sampling: Sampling
    sampling_words: str

    def in_words(self) -> str:
        """What is guaranteed, under which assumptions, in a sentence."""
        return (
            f"(epsilon {self.epsilon:.4g}, delta {self.delta:g}) after {self.rounds} round{'s' * (self.rounds != 1)}: what is released is about as likely "
            f"{_ADJACENCY_WORDS[self.adjacency]}. By {_ACCOUNTANT_WORDS[self.accountant]}; {self.sampling_words}."
        )


@dataclass
class Spending:
    """What a run of equal rounds has spent after each of them. Asked for one round after the other, it composes only the new one."""

    kind: NoisyRound
    delta: float
    accountant: AccountantName

    def __post_init__(self) -> None:
        require_known(self.kind.sampling, self.accountant)
        self._last: tuple[int, Any] = (0, None)

    @property
    def noise_multiplier(self) -> float:
        """That of a round."""
        return self.kind.noise_multiplier

    def after(self, rounds: int) -> Guarantee:
        """The guarantee after so many rounds, 0 or more."""
        kind = self.kind
        # Rounded, because sums in another order differ in the last digits.
        epsilon = 0.0 if not rounds else round(self._epsilon(rounds), 6)
        return Guarantee(
            epsilon,
            self.delta,
            rounds,
            self.accountant,
            ADJACENCY[kind.sampling],
            kind.sampling,
            kind.sampling_words,
        )

    def _epsilon(self, rounds: int) -> float:
        if self.accountant != "pld":
            return _convert(rounds * _renyi(self.kind), self.delta, self.accountant)
        if self.kind.probability == 1:
            # Gaussians compose to one, so there is nothing to add up.
            alone = replace(self.kind, noise_multiplier=self.kind.noise_multiplier / rounds**0.5)
            return float(_loss_of(alone).get_epsilon_for_delta(self.delta))
        known, loss = self._last
        single = _loss_of(self.kind)
        if known != rounds:
            loss = loss.compose(single) if 0 < known == rounds - 1 else single.self_compose(rounds)
            self._last = rounds, loss
        return float(loss.get_epsilon_for_delta(self.delta))


def epsilon_after(
    kind: NoisyRound, rounds: int, delta: float, accountant: AccountantName = "pld"
) -> Guarantee:
    """What so many equal rounds spend.

    Raises:
        CannotAccount: the accountant does not know this kind of sampling, or a number is out of range.
    """
    if rounds < 0 or not 0 < delta < 1:
        raise CannotAccount(
            f"rounds = {rounds}, delta = {delta:g}: expected 0 rounds or more, and a delta between 0 and 1"
        )
    return Spending(kind, delta, accountant).after(rounds)


@lru_cache(maxsize=64)
def find_noise(
    kind: NoisyRound, rounds: int, delta: float, epsilon: float, accountant: AccountantName = "pld"
) -> float:
    """The least noise multiplier, to a thousandth, with which so many rounds spend `epsilon` at most. That of `kind` does not matter.

    Raises:
        CannotAccount: as `epsilon_after`, or no noise between 0.05 and a million is right.
    """
    require_known(kind.sampling, accountant)

    def spent(noise: float) -> float:
        return epsilon_after(replace(kind, noise_multiplier=noise), rounds, delta, accountant).epsilon

    # Rényi divergences are quick, and never promise less noise.
    most = 1.0 if accountant != "pld" else find_noise(kind, rounds, delta, epsilon, "rdp")
    return least_noise(spent, epsilon, delta, f"in {rounds} rounds", most)


def least_noise(
    spent: Callable[[float], float], epsilon: float, delta: float, when: str, guess: float = 1.0
) -> float:
    """The least noise multiplier, to a thousandth, that spends `epsilon` at most.

    `spent`: epsilon of a noise multiplier. `when`: it is spent, for the message. `guess`: a noise multiplier that may suffice.

    Raises:
        CannotAccount: no noise between 0.05 and a million is right.
    """
    import dp_accounting as dp
    from dp_accounting.mechanism_calibration import ExplicitBracketInterval

    most = guess
    while spent(most) > epsilon and most < _MOST_NOISE:
        most *= 2
    least = most / 2
    while spent(least) < epsilon and least > _LEAST_NOISE:
        least /= 2
    if spent(most) > epsilon or spent(least) < epsilon:
        raise CannotAccount(
            f"no noise multiplier between {_LEAST_NOISE:g} and {_MOST_NOISE:g} spends epsilon = {epsilon:g} {when}; "
            "give another epsilon, or the noise multiplier itself"
        )

    class _Rounds(dp.PrivacyAccountant):  # type: ignore[misc]
        """Our own account of the rounds, for the search."""

        def __init__(self) -> None:
            super().__init__(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
            self._noise = 0.0

        def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> None:
            if do_compose:
                self._noise = event.noise_multiplier

        def get_epsilon(self, target_delta: float) -> float:
            return spent(self._noise)

    found = dp.calibrate_dp_mechanism(
        _Rounds, dp.GaussianDpEvent, epsilon, delta, ExplicitBracketInterval(least, most), tol=1e-4
    )
    rounded = np.ceil(found * 1000) / 1000
    return float(rounded if spent(rounded) <= epsilon else rounded + 0.001)


def require_known(sampling: Sampling, accountant: AccountantName) -> None:
    """Refuses an accountant that does not know a kind of sampling.

    Raises:
        CannotAccount: naming one that does.
    """
    if sampling == "fixed" and accountant == "pld":
        raise CannotAccount(
            'the privacy loss distribution of sampling without replacement (sampling = "fixed") is not known; take accountant = "rdp"'
        )


def compose_losses(releases: Sequence[tuple[float, float, int]], delta: float) -> float:
    """Epsilon of Gaussian releases of different kinds together, by privacy loss distributions.

    `releases`: noise multiplier, probability that a client is in one, and how many of them; at least one.
    """
    interval = min(_interval(noise, probability) for noise, probability, _ in releases)
    losses = [
        _loss(noise, probability, interval).self_compose(times) for noise, probability, times in releases
    ]
    together = reduce(lambda one, other: one.compose(other), losses)
    return float(together.get_epsilon_for_delta(delta))


def _loss_of(kind: NoisyRound) -> Any:
    """The privacy loss distribution of one round."""
    interval = _interval(kind.noise_multiplier, kind.probability)
    return _loss(kind.noise_multiplier, kind.probability, interval)


def _interval(noise_multiplier: float, probability: float) -> float:
    fine, coarse = _INTERVALS
    return coarse if probability / noise_multiplier >= 0.01 else fine


@lru_cache(maxsize=8)
def _loss(noise_multiplier: float, probability: float, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as pld

    return pld.from_gaussian_mechanism(
        standard_deviation=noise_multiplier,
        sampling_prob=probability,
        value_discretization_interval=interval,
    )


def _renyi(kind: NoisyRound) -> npt.NDArray[np.float64]:
    """The Rényi divergences of one round, at `_orders`."""
    import dp_accounting as dp

    orders = tuple(_orders().tolist())
    if kind.sampling != "fixed":
        return gaussian_divergences(kind.noise_multiplier, kind.probability, orders)
    # Replacing a client's data moves the sum by twice the clipping norm, and noise counts in multiples of that.
    halved = dp.GaussianDpEvent(kind.noise_multiplier / 2)
    event = dp.SampledWithoutReplacementDpEvent(kind.clients, kind.cohort, halved)
    return _divergences(event, dp.NeighboringRelation.REPLACE_ONE, orders)


def gaussian_divergences(
    noise_multiplier: float, probability: float, orders: Sequence[float]
) -> npt.NDArray[np.float64]:
    """The Rényi divergences of one noisy sum that a client is in with this probability, at these orders."""
    import dp_accounting as dp

    event: Any = dp.GaussianDpEvent(noise_multiplier)
    if probability < 1:
        event = dp.PoissonSampledDpEvent(probability, event)
    return _divergences(event, dp.NeighboringRelation.ADD_OR_REMOVE_ONE, tuple(orders))


@lru_cache(maxsize=16)
def _divergences(event: Any, relation: Any, orders: tuple[float, ...]) -> npt.NDArray[np.float64]:
    """The Rényi divergences of an event at these orders.

    The accountant tells them as an epsilon at each order alone, for a delta that is the same for all.
    """
    from dp_accounting.rdp import RdpAccountant

    found = []
    with _quiet():  # it warns of orders that it leaves out, of which others are better anyway
        for order in orders:
            account = RdpAccountant([order], relation).compose(event)
            told = account.get_epsilon(_TINY_DELTA)
            found.append(told - np.log1p(-1 / order) + np.log(_TINY_DELTA * order) / (order - 1))
    return np.maximum(np.array(found, np.float64), 0.0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of dp-accounting."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _orders() -> npt.NDArray[np.float64]:
    from dp_accounting.rdp import rdp_privacy_accountant

    return np.array(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, np.float64)


def _convert(divergences: npt.NDArray[np.float64], delta: float, accountant: AccountantName) -> float:
    """Epsilon of Rényi divergences at `_orders`."""
    from dp_accounting.rdp import compute_epsilon

    if accountant == "rdp_classic":
        return float(np.nanmin(divergences - np.log(delta) / (_orders() - 1)))
    epsilon, _ = compute_epsilon(_orders(), divergences, delta)
    return float(epsilon)
