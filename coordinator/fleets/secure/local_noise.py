"""A fleet whose clients add noise to their updates before they send them (local differential privacy).

Another fleet trains them. What reaches the engine of an update is clipped and noised, and says nothing else of the client's rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from coordinator.rounds.fleet import Answer, Fleet, Model, Result, Terms, WrappedFleet, singly
from coordinator.rounds.plan import Task, generator
from strategies.privacy import clients
from strategies.privacy.clients import ClientNoise
from strategies.privacy.noise.secure import SeededSource
from strategies.update import Update


class LocalNoiseFleet(WrappedFleet):
    """Another fleet, each of whose updates gets its own noise. `seed`: of the run; a client has the same noise in a round whenever it is played."""

    def __init__(self, fleet: Fleet, noise: ClientNoise, seed: int) -> None:
        super().__init__(fleet)
        self._noise, self._seed = noise, seed

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return {}

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        self._fleet.submit(tasks, model, replace(terms, summation=None))  # each update is needed

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        noise = self._noise
        for result in singly(self._fleet.results(excluded)):
            if isinstance(result, Answer) and isinstance(result.verdict, Update):
                task = result.task
                rng = generator(self._seed, "noise of clients", task.message.round, task.position)
                sent = clients.add_noise(
                    result.verdict, noise.clip_norm, noise.noise_multiplier, SeededSource(rng)
                )
                result = replace(result, verdict=sent)
            yield result
