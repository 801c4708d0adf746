"""The rounds of a simulation, synchronous or asynchronous, from its checkpoint on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

from coordinator.errors import UserError
from coordinator.experiments.privacy import secure_aggregation
from coordinator.experiments.schema import Experiment
from coordinator.fleets.attacked import AttackedFleet
from coordinator.fleets.secure.fleet import SecureFleet
from coordinator.fleets.secure.local_noise import LocalNoiseFleet
from coordinator.fleets.simulated import SimulatedFleet
from coordinator.fleets.simulated_asynchronous import AsynchronousSimulatedFleet
from coordinator.fleets.simulated_clients import SimulatedClient, VirtualTime
from coordinator.rounds import asynchronous, engine
from coordinator.rounds.engine import CommitStore, Evaluate
from coordinator.rounds.events import Emit
from coordinator.rounds.fleet import Fleet
from coordinator.rounds.plan import RunPlan
from coordinator.rounds.records import Checkpoint, InFlight, RunState
from coordinator.rounds.step import AsynchronousFleet
from coordinator.runs.privacy.by_clients import group_noise
from coordinator.runs.trials import attack
from coordinator.workers.pool import WorkerPool
from strategies.privacy.clients import ClientNoise
from strategies.strategy import BLOCK


class RunRounds(Protocol):
    """Runs the rounds after `start`, as `engine.run`."""

    def __call__(
        self, start: RunState, store: CommitStore, *, evaluate: Evaluate, emit: Emit, monotonic: Monotonic
    ) -> RunState: ...


class Monotonic(Protocol):
    def __call__(self) -> float: ...


class ResumableFleet(AsynchronousFleet, Protocol):
    """The fleet of an asynchronous simulation."""

    def resume(self, in_flight: InFlight, run_plan: RunPlan) -> None:
        """Goes on from a checkpoint."""


Around = Callable[[Fleet], Fleet]
"""A fleet by another one."""

SimulationFleet = Fleet | ResumableFleet
"""A synchronous or an asynchronous one, as the plan has it."""


def make_rounds(
    run_plan: RunPlan,
    pool: WorkerPool,
    clients: Sequence[SimulatedClient],
    clock: VirtualTime,
    checkpoint: Checkpoint | None,
    fleet: SimulationFleet | None = None,
    clients_per_job: int = BLOCK,
    around: Around = lambda fleet: fleet,
) -> RunRounds:
    """What runs the rounds of a plan over these clients, as they were at the checkpoint.

    `fleet`: None: a simulated one, whose workers train `clients_per_job` clients at a time. `around`: what stands between it and the
    engine, in synchronous rounds.
    """
    if run_plan.asynchrony is None:
        now = 0.0 if checkpoint is None else checkpoint.in_flight.seconds
        chosen = cast(Fleet, fleet or SimulatedFleet(pool, clients, clock, clients_per_job, now))
        chosen = around(chosen)
        if checkpoint is not None:
            chosen.restore(checkpoint.client_states)
        return partial(engine.run, run_plan, chosen)
    asynchronous_fleet = cast(ResumableFleet, fleet or AsynchronousSimulatedFleet(pool, clients, clock))
    if checkpoint is not None:
        asynchronous_fleet.resume(checkpoint.in_flight, run_plan)
    return partial(asynchronous.run, run_plan, asynchronous_fleet)


def around_fleet(experiment: Experiment, clients: Sequence[SimulatedClient], run_plan: RunPlan) -> Around:
    """What noise of clients, malicious clients and secure aggregation make of the updates of a resolved experiment, in this order."""
    forged, table = attack.of_updates(experiment, clients), experiment.privacy
    noise = None if run_plan.privacy is None else run_plan.privacy.noise
    in_sums = None
    if table.mechanism == "distributed" and noise is not None:
        in_sums = group_noise(table, noise.noise_multiplier)
    sums = secure_aggregation.make_sums(table, experiment.seed, in_sums)

    def wrap(fleet: Fleet) -> Fleet:
        if table.mechanism == "local" and isinstance(noise, ClientNoise):
            fleet = LocalNoiseFleet(fleet, noise, experiment.seed)
        attacked = fleet if forged is None else AttackedFleet(fleet, forged)
        return attacked if sums is None else SecureFleet(attacked, sums)

    return wrap


def require_enough(experiment: Experiment, clients: int) -> None:
    """Checks keys that count clients. If the clients are the sites of the data, their number is known only now.

    Raises:
        UserError: a key asks for more clients than there are.
    """
    for key in ("clients_per_round", "buffer", "concurrency"):
        value = getattr(experiment.federation, key)
        if value is not None and value > clients:
            raise UserError(
                f'federation.{key} = {value} is more than the {clients} sites that data.partition = "natural" gives; '
                f"expected 1 to {clients}"
            )
