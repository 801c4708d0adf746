"""What the fleet of an asynchronous run promises, and one round as such a fleet gets it (`rounds.asynchronous`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from coordinator.rounds import plan
from coordinator.rounds.fleet import Answer, Model, OpenRound, Silence, Terms
from coordinator.rounds.plan import Asynchrony, RunPlan, Task
from coordinator.rounds.records import InFlight
from strategies.params import Tensors


@dataclass(frozen=True)
class Step:
    """One round of an asynchronous run, as its fleet needs it.

    Attributes:
        terms: when it closes; its deadline is that of each single client, from its start.
        oldest: first round whose clients may still be accepted.
    """

    number: int
    model: Model
    terms: Terms
    oldest: int
    run_plan: RunPlan

    @property
    def concurrency(self) -> int:
        return asynchrony_of(self.run_plan).concurrency

    def task(self, client: str, position: int) -> Task:
        """The task of a client that starts now; `position` is its own in this round."""
        return make_task(self.run_plan, self.number, self.model.base, client, position)

    def draw(self, clients: Sequence[str], busy: Collection[str], started: int) -> int | None:
        """Index of the client to start next, None if all are busy. `started`: how many were started in this round.

        Each client that is not busy is equally likely. `busy` holds no client twice, and only such as are in `clients`.
        """
        if len(busy) >= len(clients):
            return None
        rng = plan.generator(self.run_plan.seed, "start", self.number, started)
        while clients[index := int(rng.integers(len(clients)))] in busy:
            pass
        return index


class AsynchronousFleet(Protocol):
    """Carries tasks to clients that do not wait for each other. Every method may raise `Stopped`."""

    def find_open_round(self, round_number: int) -> OpenRound | None:
        """This round if it was begun but not committed, without its tasks."""

    def clients(self, wanted: int) -> Sequence[str]:
        """As `Fleet.clients`."""

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        """As `Fleet.declared_examples`."""

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        """Prepares params for the clients that start from now on; those of clients at work stay available."""

    def begin(self, step: Step) -> None:
        """Begins a round, or continues it if it was open before.

        Clients that started before `step.oldest` are told to stop; each counts as rejected, as `stale_base`.
        """

    def results(self) -> Iterator[Answer | Silence]:
        """Answers in the order of their arrival, with as many accepted updates as close the round, or fewer if no client is
        at work any more and none can start. Clients keep starting meanwhile."""

    def base(self, task: Task) -> Tensors:
        """The params that the client of a task started from, whose answer `results` gave in this round."""

    def started(self) -> int:
        """Number of clients that have started in this round so far."""

    def in_flight(self) -> InFlight:
        """The clients at work, for the checkpoint. Empty for fleets that store them themselves."""

    def simulated_seconds(self) -> float | None:
        """Virtual time that the round took; None in real time."""


def asynchrony_of(run_plan: RunPlan) -> Asynchrony:
    """How an asynchronous run works."""
    assert run_plan.asynchrony is not None
    return run_plan.asynchrony


def make_task(run_plan: RunPlan, number: int, base: str, client: str, position: int) -> Task:
    """The task of a client that starts in round `number`; `position` is its own in this round."""
    (task,) = plan.make_tasks((client,), number, base, run_plan)
    return replace(task, position=position)


def staleness_of(number: int, task: Task) -> int:
    """The staleness of a client's answer in round `number`."""
    return number - task.message.round
