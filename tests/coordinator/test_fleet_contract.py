"""What every fleet promises: one suite over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from coordinator.fleets.fleet import Delivery, Fleet, Model, Silence
from coordinator.fleets.simulated import SimulatedClient, SimulatedFleet
from coordinator.rounds import engine, intake, plan
from coordinator.rounds.plan import LocalWork, RunPlan, Task
from coordinator.simulation.pool import WorkerPool
from coordinator.simulation.virtual_time import VirtualTime
from edge_client.wire import arrays
from edge_client.wire.messages import result_header
from strategies import presets
from strategies.params import Params, zeros_like
from strategies.update import Update
from tests.support.federation import PARAMS
from tests.support.memory_fleet import MemoryClient, MemoryFleet, honest

ARRIVALS = {"d": 4.0, "a": 1.0, "c": 2.0, "b": 2.0}
"""Clients in their fixed order, and when each answers."""


@dataclass(frozen=True)
class Kind:
    """A kind of fleet. `make` gives a fresh one with the clients of `ARRIVALS`."""

    make: Callable[[], Fleet]
    params: Params
    trainable: tuple[str, ...]

    def model(self, *, control: float | None = None) -> Model:
        """What a round starts from; with `control` the stream of SCAFFOLD, filled with it."""
        trained = {name: self.params[name] for name in self.trainable}
        filled = {name: value + np.float32(control or 0) for name, value in zeros_like(trained).items()}
        return engine.model_of(self.params, {} if control is None else {"control": filled})

    def tasks(
        self, model: Model, clients: Sequence[str] = tuple(ARRIVALS), number: int = 1
    ) -> tuple[Task, ...]:
        strategy = presets.get("scaffold" if model.streams else "fedavg")
        work = LocalWork(batch_size=4, lr=0.1, epochs=None, steps=1)
        run_plan = RunPlan(7, 3, strategy, work, self.trainable, clients_per_round=4)
        return plan.tasks_for(clients, number, model.base, run_plan)

    def expected(self, model: Model) -> intake.Expected:
        return intake.expected_of({name: self.params[name] for name in self.trainable}, model.streams)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    """Logistic regression on a few made-up rows, trained by PyTorch in one worker process."""
    folder = tmp_path_factory.mktemp("simulated")
    data = {
        "dataset": "synthetic(shape=[5], classes=3, samples=10)", "path": None, "label": "label", "site": None,
        "split": None, "features": None, "length": 32, "vocab": 2048, "partition": "iid", "public_samples": 0,
    }  # fmt: skip
    request = {"folder": str(folder / "work"), "seed": 7, "data": data, "clients": 4, "data_dir": None}
    with WorkerPool(1, folder / "workers.log") as pool:
        found = pool.one({"kind": "prepare", **request}).values
        described = {key: found[key] for key in ("input_shape", "classes", "input_dtype", "task")}
        model = {"name": "logreg", "options": {}, **described}
        made = pool.one({"kind": "initial", "model": model, "seed": 7})
        pool.tell({"kind": "open", "folder": str(folder / "work"), "model": model})

        def make() -> Fleet:
            clients = [
                SimulatedClient(name, index, found["examples"][index], "torch")
                for index, name in enumerate(ARRIVALS)
            ]
            # One step of one second a client, so that its factor is when it answers.
            return SimulatedFleet(pool, clients, VirtualTime(1.0, dict(ARRIVALS), dropout=0.0, seed=7))

        yield Kind(make, arrays.decode(made.blobs[0]), tuple(made.values["trainable"]))


@pytest.fixture(scope="module")
def memory() -> Kind:
    def make() -> Fleet:
        return MemoryFleet(
            {
                name: MemoryClient(a=1 + 0.2 * i, c=i - 1.5, script=honest(seconds))
                for i, (name, seconds) in enumerate(ARRIVALS.items())
            }
        )

    return Kind(make, PARAMS, ("w",))


@pytest.fixture(params=["memory", "simulated"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def deliveries(fleet: Fleet, until: float = 100.0) -> list[Delivery]:
    return [result for result in fleet.results(until) if isinstance(result, Delivery)]


def payloads(fleet: Fleet, tasks: Sequence[Task], model: Model) -> dict[str, bytes]:
    """What each client answers, by name."""
    fleet.submit(tasks, model)
    return {each.task.message.client: each.payload for each in deliveries(fleet)}


def test_clients_keep_their_order(kind: Kind) -> None:
    fleet = kind.make()
    assert list(fleet.clients()) == list(ARRIVALS)
    payloads(fleet, kind.tasks(kind.model()), kind.model())
    assert list(fleet.clients()) == list(ARRIVALS)


def test_each_client_asked_answers_once_with_an_update_that_is_accepted(kind: Kind) -> None:
    fleet, model = kind.make(), kind.model()
    tasks = kind.tasks(model, ("d", "c", "b"))
    fleet.submit(tasks, model)
    got = deliveries(fleet)
    assert sorted(each.task.position for each in got) == [0, 1, 2]
    for each in got:
        assert each.task == tasks[each.task.position]
        verdict = intake.check(each.payload, each.task, kind.expected(model), already_accepted=False)
        assert isinstance(verdict, Update), verdict
        assert any(np.any(value) for value in verdict.delta.values())


def test_results_come_in_the_order_of_arrival(kind: Kind) -> None:
    fleet, model = kind.make(), kind.model()
    fleet.submit(kind.tasks(model), model)
    assert [(each.task.message.client, each.seconds) for each in deliveries(fleet)] == [
        ("a", 1.0),
        ("c", 2.0),
        ("b", 2.0),
        ("d", 4.0),
    ]


def test_results_end_at_the_time_given_and_name_who_is_missing(kind: Kind) -> None:
    fleet, model = kind.make(), kind.model()
    fleet.submit(kind.tasks(model), model)
    results = list(fleet.results(until=2.0))
    assert [each.task.message.client for each in results if isinstance(each, Delivery)] == ["a", "c", "b"]
    (missing,) = [each for each in results if isinstance(each, Silence)]
    assert (missing.task.message.client, missing.seconds) == ("d", 2.0)
    assert missing.reason


def test_nothing_comes_where_nothing_was_asked(kind: Kind) -> None:
    fleet = kind.make()
    fleet.submit((), kind.model())
    assert list(fleet.results(until=100.0)) == []


def test_a_round_left_early_leaves_nothing_in_the_next(kind: Kind) -> None:
    """As the engine does at a quorum: stop listening, cancel the rest, go on."""
    fleet, model = kind.make(), kind.model()
    tasks = kind.tasks(model)
    fleet.submit(tasks, model)
    first = next(iter(fleet.results(until=100.0)))
    fleet.cancel([task for task in tasks if task != first.task])

    again = kind.tasks(model, ("c", "d"), number=2)
    fleet.submit(again, model)
    got = deliveries(fleet)
    assert [(each.task, each.seconds) for each in got] == [(again[0], 2.0), (again[1], 4.0)]
    for each in got:
        header = result_header(arrays.read_header(each.payload).values)
        assert (header.round, header.client) == (2, each.task.message.client)


def test_equal_tasks_give_equal_bytes(kind: Kind) -> None:
    model = kind.model()
    tasks = kind.tasks(model)
    fleet = kind.make()
    first = payloads(fleet, tasks, model)
    assert payloads(fleet, tasks, model) == first
    assert payloads(kind.make(), tasks, model) == first
    assert len(set(first.values())) == len(ARRIVALS)


def test_each_round_starts_from_its_own_model(kind: Kind) -> None:
    fleet, before = kind.make(), kind.model()
    moved = engine.model_of({name: value + np.float32(1) for name, value in kind.params.items()}, {})
    first = payloads(fleet, kind.tasks(before), before)
    second = payloads(fleet, kind.tasks(moved), moved)
    assert all(first[name] != second[name] for name in ARRIVALS)


def test_clients_of_a_rule_without_state_have_none_to_save(kind: Kind) -> None:
    fleet, model = kind.make(), kind.model()
    payloads(fleet, kind.tasks(model), model)
    assert fleet.client_state(list(ARRIVALS)) == {}


def test_state_is_handed_out_for_accepted_clients_only(kind: Kind) -> None:
    fleet, model = kind.make(), kind.model(control=0.5)
    payloads(fleet, kind.tasks(model), model)
    states = fleet.client_state(["a", "c"])
    assert sorted(states) == ["a", "c"]
    for streams in states.values():
        assert {name: value.shape for name, value in streams["control"].items()} == {
            name: kind.params[name].shape for name in kind.trainable
        }


def test_a_client_that_was_not_accepted_keeps_the_state_it_had(kind: Kind) -> None:
    fleet, model = kind.make(), kind.model(control=0.5)
    first, second = kind.tasks(model), kind.tasks(model, number=2)
    payloads(fleet, first, model)
    fleet.client_state(["a"])
    got = payloads(fleet, second, model)
    anew = payloads(kind.make(), second, model)
    assert got["b"] == anew["b"]
    assert got["a"] != anew["a"]


def test_a_restored_fleet_goes_on_as_the_one_before(kind: Kind) -> None:
    fleet, model = kind.make(), kind.model(control=0.5)
    saved: dict[str, Mapping[str, Params]] = {}
    for number, accepted in ((1, ["a", "b"]), (2, ["b", "c"])):
        payloads(fleet, kind.tasks(model, number=number), model)
        saved |= fleet.client_state(accepted)
    assert sorted(saved) == ["a", "b", "c"]

    restored = kind.make()
    restored.restore(saved)
    third = kind.tasks(model, number=3)
    assert payloads(restored, third, model) == payloads(fleet, third, model)
    assert payloads(kind.make(), third, model) != payloads(fleet, third, model)
