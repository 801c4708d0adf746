"""The private part of a round: whom it takes, what it spends, and the noise on what it releases.

    1. limit the strategy: clipped updates, their sum divided by a fixed number
    2. draw the cohort as the accountant assumes, and take every answer that comes in time
    3. charge the ledger; only then draw the noise and add it to the sum. If the noise cannot be drawn again, keep the noised sum before
       anything follows from it
    4. adaptive clipping: move the norm for the next round

A round without any update, which Poisson sampling may draw, releases noise alone: were it left out, the model would tell that nobody
took part.

Where clients add the noise themselves, the ledger is charged before they train, with all of the cohort, and the server changes nothing. Who
takes part is no secret then, so a round may also end without a change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from coordinator import failpoints
from coordinator.privacy.accountant import Guarantee, Sampling
from coordinator.privacy.participation import Turns
from coordinator.rounds.gathered import Gathered
from strategies.params import State, Tensors
from strategies.privacy import central
from strategies.privacy.central import CentralNoise
from strategies.privacy.clients import ClientNoise
from strategies.privacy.noise.additive import NoiseSource
from strategies.privacy.noise.secure import Floats
from strategies.strategy import Strategy
from strategies.update import Aggregate

_CLIP_NORM = "clip_norm"
"""The value of the strategy's state that holds the norm of adaptive clipping."""


@dataclass(frozen=True)
class Release:
    """The noised aggregate of a round.

    Attributes:
        aggregate: None: there is none, and nobody's noise hides that.
        clip_norm: of the next round.
        figures: `Gathered.figures` of the round's clients.
    """

    aggregate: Aggregate | None
    clip_norm: float
    figures: Mapping[str, Any]

    def gathered(self) -> Gathered:
        """What was gathered for it, with the noised aggregate."""
        return Gathered.of_figures(self.figures, self.aggregate if self.figures["accepted"] else None)


class Ledger(Protocol):
    """What a run has spent, and what it has released of a round that is not committed."""

    def enter(self, round_number: int, clients: Sequence[str]) -> None:
        """Makes durable that these clients may be drawn for a round, or that they are to add their noise in it."""
        ...

    def charge(self, round_number: int, epsilon: float, clients: Sequence[str]) -> None:
        """Makes durable that a round has spent its share, before anything of it is released; a second time it does nothing. `clients`: whose
        updates are in its sum."""
        ...

    def find_release(self, round_number: int) -> Release | None:
        """What an earlier process has kept of this round; None: its noise is not drawn, or is the same whenever it is drawn."""
        ...

    def keep(self, round_number: int, release: Release) -> Release:
        """Makes a release durable, if its noise cannot be drawn again, and returns it as it is stored."""
        ...


@dataclass(frozen=True)
class PrivacyPlan:
    """Differential privacy of a run.

    Attributes:
        noise_multiplier: of the mechanism, from which epsilon follows.
        clients: the population, of which a round takes `noise.cohort`.
        guarantee_after: what so many rounds spend, with its assumptions.
        source: of a round's central noise. In a simulation a round has the same noise whenever it is played.
        uniforms: as many numbers in [0, 1) for the draw of a round's cohort.
        budget: epsilon that no round may exceed.
        turns: in which rounds clients may take part; None: in all.
    """

    noise: CentralNoise | ClientNoise
    noise_multiplier: float
    sampling: Sampling
    clients: int
    guarantee_after: Callable[[int], Guarantee]
    ledger: Ledger
    source: Callable[[int], NoiseSource]
    uniforms: Callable[[int, int], Floats]
    budget: float | None = None
    turns: Turns | None = None

    @property
    def is_central(self) -> bool:
        """Whether the server adds the noise, and hides who takes part."""
        return isinstance(self.noise, CentralNoise)

    def epsilon_after(self, rounds: int) -> float:
        """Epsilon of so many rounds."""
        return self.guarantee_after(rounds).epsilon

    def clip_norm(self, state: State) -> float:
        """The clipping norm of the round after this state of the strategy."""
        return float(state.values.get(_CLIP_NORM) or self.noise.clip_norm)

    def limit(self, strategy: Strategy, state: State) -> Strategy:
        """The strategy of the round after this state."""
        if isinstance(self.noise, ClientNoise):
            return strategy
        return self.noise.limit(strategy, self.clip_norm(state))

    def affords(self, round_number: int) -> bool:
        """Whether the budget suffices for this round."""
        return self.budget is None or self.epsilon_after(round_number) <= self.budget

    def admit(self, round_number: int, clients: Sequence[str]) -> Sequence[str]:
        """Those of the clients that may take part in a round."""
        return clients if self.turns is None else self.turns.select(round_number, clients)

    def choose(self, round_number: int, clients: Sequence[str]) -> tuple[str, ...]:
        """The clients of a round, each drawn by itself. `clients`: those that are there."""
        self.ledger.enter(round_number, clients)
        drawn = self.uniforms(round_number, len(clients)) < self.noise.cohort / self.clients
        return tuple(clients[index] for index in np.flatnonzero(drawn).tolist())

    def begin(self, round_number: int) -> None:
        """Charges a round whose clients add the noise, before they do."""
        if not self.is_central:
            self._charge(round_number, ())

    def enter(self, round_number: int, cohort: Sequence[str]) -> None:
        """Counts the clients of a round in which they add the noise, before they get their tasks."""
        if not self.is_central:
            self.ledger.enter(round_number, cohort)

    def find_release(self, round_number: int) -> Release | None:
        """As `Ledger.find_release`."""
        return self.ledger.find_release(round_number)

    def release(self, round_number: int, gathered: Gathered, state: State, trained: Tensors) -> Release:
        """The noised aggregate of a round, charged before the noise is drawn, and kept before anybody gets it.

        `trained`: the params that clients send.
        """
        aggregated, clip_norm = gathered.aggregated, self.clip_norm(state)
        if isinstance(self.noise, ClientNoise):
            failpoints.reach("privacy.noised")
            return Release(aggregated.aggregate, clip_norm, {})
        self._charge(round_number, aggregated.accepted)
        source = self.source(round_number)
        noised = self.noise.add_noise(aggregated.aggregate or central.nothing(trained), clip_norm, source)
        # Norms as measured by the server, before it clips.
        following = self.noise.next_clip_norm(clip_norm, list(aggregated.norms.values()), source)
        released = self.ledger.keep(round_number, Release(noised, following, gathered.figures()))
        failpoints.reach("privacy.noised")
        return released

    def keep(self, strategy: State, clip_norm: float) -> State:
        """The strategy's state with the next round's clipping norm, if that changes."""
        if isinstance(self.noise, ClientNoise) or self.noise.adaptive is None:
            return strategy
        return replace(strategy, values={**strategy.values, _CLIP_NORM: clip_norm})

    def _charge(self, round_number: int, clients: Sequence[str]) -> None:
        self.ledger.charge(round_number, self.epsilon_after(round_number), clients)
        failpoints.reach("privacy.charged")
