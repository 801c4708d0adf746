"""A fleet of which some clients are malicious: they train honestly, and send another update.

sign_flip: −scale · Δ. scaling: scale · Δ. gaussian: noise of standard deviation `scale`. The others collude and know the honest
updates of the round, with mean m and standard deviation s of each value. alie: m − scale · s (Baruch 2019, Algorithm 3, where
`scale` follows from the numbers of clients). ipm: −scale · m (Xie 2020, equation 4).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from coordinator.rounds.fleet import Answer, Fleet, Model, Result, Terms, WrappedFleet, singly
from coordinator.rounds.plan import Task, generator
from strategies.params import Params, Tensors
from strategies.update import Update

UPDATE_ATTACKS = ("sign_flip", "scaling", "gaussian", "alie", "ipm")
SCALES = {"sign_flip": 5.0, "scaling": 10.0, "gaussian": 1.0, "ipm": 10.0}
"""Of attacks whose scale is not given."""


@dataclass(frozen=True)
class UpdateAttack:
    """What malicious clients send. `scale`: None: the attack's own."""

    name: str
    clients: frozenset[str]
    seed: int
    scale: float | None = None


class AttackedFleet(WrappedFleet):
    """Another fleet with malicious clients. Their answers come after the others, because they depend on them."""

    def __init__(self, fleet: Fleet, attack: UpdateAttack) -> None:
        super().__init__(fleet)
        self._attack = attack

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        self._fleet.submit(
            tasks, model, replace(terms, summation=None, in_blocks=False)
        )  # each update is needed

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        waiting: list[tuple[Answer, Update]] = []
        honest = _Moments()
        for result in singly(self._fleet.results(excluded)):
            verdict = result.verdict if isinstance(result, Answer) else None
            if isinstance(result, Answer) and isinstance(verdict, Update):
                if result.task.message.client in self._attack.clients:
                    waiting.append((result, verdict))
                    continue
                honest.add(verdict.delta)
            yield result
        for answer, update in waiting:
            delta = self._forge(answer.task, update, honest, len(waiting))
            yield replace(answer, verdict=replace(update, delta=delta))

    def _forge(self, task: Task, update: Update, honest: _Moments, malicious: int) -> Params:
        """The delta that a malicious client sends."""
        name, scale = self._attack.name, self._attack.scale
        if name == "alie":
            scale = scale if scale is not None else alie_scale(honest.count + malicious, malicious)
            spread = honest.deviation()
            return _float32({key: mean - scale * spread[key] for key, mean in honest.mean.items()}, update)
        scale = SCALES[name] if scale is None else scale
        if name == "ipm":
            return _float32({key: -scale * mean for key, mean in honest.mean.items()}, update)
        if name == "gaussian":
            rng = generator(self._attack.seed, "gaussian attack", task.message.round, task.position)
            return _float32(
                {key: scale * rng.standard_normal(value.shape) for key, value in update.delta.items()}, update
            )
        factor = -scale if name == "sign_flip" else scale
        return _float32({key: factor * value for key, value in update.delta.items()}, update)


def alie_scale(clients: int, malicious: int) -> float:
    """The largest deviation that a majority still covers. Baruch 2019, Algorithm 3."""
    supporters = clients // 2 + 1 - malicious
    honest = clients - malicious
    share = min(max((honest - supporters) / honest, 0.5), 1 - 1e-6) if honest else 0.5
    return NormalDist().inv_cdf(share)


class _Moments:
    """Mean and deviation of updates, value by value. Welford 1962."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: dict[str, npt.NDArray[np.float64]] = {}
        self._squares: dict[str, npt.NDArray[np.float64]] = {}

    def add(self, delta: Tensors) -> None:
        self.count += 1
        for name, value in delta.items():
            mean = self.mean.setdefault(name, np.zeros(value.shape))
            away = value - mean
            mean += away / self.count
            squares = self._squares.setdefault(name, np.zeros(value.shape))
            squares += away * (value - mean)

    def deviation(self) -> Mapping[str, npt.NDArray[np.float64]]:
        return {name: np.sqrt(value / max(1, self.count)) for name, value in self._squares.items()}


def _float32(delta: Mapping[str, npt.NDArray[np.floating]], own: Update) -> Params:
    """The delta, or the client's own if there is no honest update to know."""
    with np.errstate(over="ignore"):
        forged = {name: np.asarray(delta.get(name, value), np.float32) for name, value in own.delta.items()}
    return {name: np.nan_to_num(value) for name, value in forged.items()}
