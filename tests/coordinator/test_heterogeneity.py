"""What FedProx and SCAFFOLD are for, over three seeds: stragglers on synthetic(1, 1), and clients that have few classes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from coordinator.fleets.stragglers import Stragglers
from coordinator.rounds import plan
from coordinator.rounds.plan import LocalWork
from edge_client.data.examples import Examples
from edge_client.train.trainer import Trainer, TrainTask
from models.datasets import sources
from models.zoo import logreg
from models.zoo.spec import ModelSpec
from strategies import presets
from strategies.params import Params
from strategies.strategy import Strategy
from tests.support.federation import run_plan
from tests.support.local_data import first_params, torch_runtime
from tests.support.long import extended

SEEDS = (1, 2, 3)


class Federation:
    """Clients in this process, of which each round draws some; `test`: rows that score the model."""

    def __init__(self, spec: ModelSpec, clients: Sequence[Examples], test: Examples, seed: int) -> None:
        self.trainer = Trainer(torch_runtime(spec))
        self.clients, self.test, self.seed = clients, test, seed
        self.start = first_params(spec, seed)

    def run(
        self,
        strategy: Strategy,
        work: LocalWork,
        per_round: int,
        rounds: int,
        stragglers: Stragglers | None = None,
        until: float = 1.0,
    ) -> tuple[int, float, float]:
        """Rounds taken, test loss and test accuracy. `until`: accuracy that ends the run."""
        names = tuple(f"client-{index:03}" for index in range(len(self.clients)))
        params, state = self.start, strategy.init(self.start, self.start)
        kept: dict[str, dict[str, Params]] = {}
        for number in range(1, rounds + 1):
            rng = plan.generator(self.seed, "cohort", number)
            cohort = tuple(names[at] for at in sorted(rng.choice(len(names), per_round, replace=False)))
            chosen = replace(run_plan(local=work, seed=self.seed), strategy=strategy)
            tasks = plan.make_tasks(cohort, number, "0" * 64, chosen)
            slowed = {} if stragglers is None else stragglers.slow_down(tasks)
            fold = strategy.start(len(tasks))
            for task in tasks:
                if stragglers is not None and stragglers.drops and task.position in slowed:
                    continue
                message = slowed.get(task.position, task).message
                rows = self.clients[names.index(message.client)]
                own = TrainTask.of(message, strategy.broadcast(state))
                result = self.trainer.train(params, own, rows, kept.get(message.client))
                kept[message.client] = result.client_state
                fold.add(task.position, result.update)
            moved, state = strategy.apply(params, state, fold.finish(), len(names))
            params = {name: np.asarray(moved[name]) for name in moved}
            scored = self.trainer.evaluate(params, self.test)
            if scored.accuracy >= until:
                break
        return number, scored.loss, scored.accuracy


@pytest.mark.slow
@pytest.mark.parametrize("seed", [SEEDS[0], *extended(*SEEDS[1:])])
def test_fedprox_with_partial_work_beats_fedavg_without_its_stragglers(seed: int) -> None:
    """Nine of ten clients are stragglers; FedProx takes what they have done, FedAvg drops it. Li 2020, figure 1."""
    data = sources.load("synthetic(1, 1)", seed=seed, clients=30)
    train, sites = ~data.test, np.asarray(data.site)
    clients = [Examples(data.x[rows], data.y[rows]) for k in range(30) for rows in [(sites == k) & train]]
    federation = Federation(
        logreg.spec((60,), 10), clients, Examples(data.x[data.test], data.y[data.test]), seed
    )
    work = LocalWork(
        batch_size=10, lr=0.01, epochs=None, steps=60
    )  # of equal length, because some clients have 20,000 rows

    stragglers = Stragglers(0.9, drops=True, seed=seed)
    _, dropped_loss, dropped = federation.run(presets.get("fedavg"), work, 10, 15, stragglers)
    taken = replace(stragglers, drops=False)
    _, loss, accuracy = federation.run(presets.get("fedprox", mu=1.0), work, 10, 15, taken)

    assert accuracy > dropped + 0.15
    assert loss < dropped_loss / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "seed"),
    [(5, 1), (10, 2), *extended((5, 2), (5, 3), (10, 1), (10, 3))],
)
def test_scaffold_needs_fewer_rounds_than_fedavg_on_sorted_labels(epochs: int, seed: int) -> None:
    """Digits in the order of their labels, cut into 20 clients, 4 of them a round. Karimireddy 2020, table 3."""
    data = sources.load("digits", seed=seed)
    train = np.flatnonzero(~data.test)
    ordered = train[np.argsort(data.y[train], kind="stable")]
    clients = [Examples(data.x[rows], data.y[rows]) for rows in np.array_split(ordered, 20)]
    test = Examples(data.x[data.test], data.y[data.test])
    federation = Federation(logreg.spec((8, 8), 10), clients, test, seed)
    work = LocalWork(batch_size=16, lr=0.05, epochs=epochs, steps=None)

    rounds, _, reached = federation.run(presets.get("scaffold"), work, 4, 80, until=0.9)
    _, _, accuracy = federation.run(presets.get("fedavg"), work, 4, rounds, until=0.9)

    assert reached >= 0.9 > accuracy
