"""The private part of a round under central differential privacy: whom it takes, what it spends, and the noise on what it releases.

    1. limit the strategy: clipped updates, their sum divided by a fixed number
    2. draw the cohort as the accountant assumes, and take every answer that comes in time
    3. charge the ledger; only then draw the noise and add it to the sum
    4. adaptive clipping: move the norm for the next round

A round without any update, which Poisson sampling may draw, releases noise alone: were it left out, the model would tell that nobody
took part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coordinator import failpoints
from coordinator.privacy.accountant import Guarantee, Sampling
from coordinator.privacy.participation import Turns
from strategies.params import State, Tensors
from strategies.privacy import central
from strategies.privacy.central import CentralNoise, Normals
from strategies.strategy import Strategy
from strategies.update import Aggregate

_CLIP_NORM = "clip_norm"
"""The value of the strategy's state that holds the norm of adaptive clipping."""


@dataclass(frozen=True)
class PrivacyPlan:
    """Central differential privacy of a run.

    Attributes:
        noise_multiplier: of the mechanism, from which epsilon follows.
        clients: the population, of which a round takes `noise.cohort`.
        guarantee_after: what so many rounds spend, with its assumptions.
        charge: makes durable that a round has spent its share, before anything of it is released; a second time it does nothing.
        normals: the source of a round's noise. In a simulation a round has the same noise whenever it is played.
        budget: epsilon that no round may exceed.
        turns: in which rounds clients may take part; None: in all.
    """

    noise: CentralNoise
    noise_multiplier: float
    sampling: Sampling
    clients: int
    guarantee_after: Callable[[int], Guarantee]
    charge: Callable[[int, float], None]
    normals: Callable[[int], Normals]
    budget: float | None = None
    turns: Turns | None = None

    def epsilon_after(self, rounds: int) -> float:
        """Epsilon of so many rounds."""
        return self.guarantee_after(rounds).epsilon

    def clip_norm(self, state: State) -> float:
        """The clipping norm of the round after this state of the strategy."""
        return float(state.values.get(_CLIP_NORM) or self.noise.clip_norm)

    def limit(self, strategy: Strategy, state: State) -> Strategy:
        """The strategy of the round after this state."""
        return self.noise.limit(strategy, self.clip_norm(state))

    def affords(self, round_number: int) -> bool:
        """Whether the budget suffices for this round."""
        return self.budget is None or self.epsilon_after(round_number) <= self.budget

    def admit(self, round_number: int, clients: Sequence[str]) -> Sequence[str]:
        """Those of the clients that may take part in a round."""
        return clients if self.turns is None else self.turns.select(round_number, clients)

    def choose(self, clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
        """The clients of a round, each drawn by itself. `clients`: those that are there."""
        drawn = rng.random(len(clients)) < self.noise.cohort / self.clients
        return tuple(clients[index] for index in np.flatnonzero(drawn).tolist())

    def release(
        self,
        round_number: int,
        aggregate: Aggregate | None,
        norms: Sequence[float],
        state: State,
        trained: Tensors,
    ) -> tuple[Aggregate, float]:
        """The noised aggregate of a round, charged before the noise is drawn, and the next round's clipping norm.

        `norms`: of its updates before clipping. `trained`: the params that clients send.
        """
        self.charge(round_number, self.epsilon_after(round_number))
        failpoints.reach("privacy.charged")
        clip_norm, normals = self.clip_norm(state), self.normals(round_number)
        noised = self.noise.add_noise(aggregate or central.nothing(trained), clip_norm, normals)
        following = self.noise.next_clip_norm(clip_norm, norms, normals)
        failpoints.reach("privacy.noised")
        return noised, following

    def keep(self, strategy: State, clip_norm: float) -> State:
        """The strategy's state with the next round's clipping norm, if that changes."""
        if self.noise.adaptive is None:
            return strategy
        return replace(strategy, values={**strategy.values, _CLIP_NORM: clip_norm})
