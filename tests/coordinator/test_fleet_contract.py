"""What every fleet promises: one suite over all of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.fleets.device import DeviceFleet
from coordinator.fleets.flower import Clock as FlowerClock
from coordinator.fleets.flower import Federation, FlowerFleet
from coordinator.fleets.simulated import SimulatedFleet
from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.rounds import intake, plan
from coordinator.rounds.closing import Closing
from coordinator.rounds.fleet import (
    Answer,
    Fleet,
    Model,
    Silence,
    Terms,
)
from coordinator.rounds.plan import LocalWork, RunPlan, Task
from coordinator.workers.pool import WorkerPool
from edge_client.wire import arrays
from strategies import presets
from strategies.codes import known
from strategies.codes.code import Code
from strategies.codes.compression import Compression
from strategies.params import Params, flatten, zeros_like
from strategies.update import Update
from tests.support.device_cohort import Cohort, ScriptedDevice
from tests.support.device_world import serving, sqlite
from tests.support.federation import PARAMS
from tests.support.flower_grid import NodeGrid, quadratic_node
from tests.support.memory_fleet import MemoryClient, MemoryFleet, honest
from tests.support.virtual_time import clock_of

ARRIVALS = {"d": 4.0, "a": 1.0, "c": 2.0, "b": 2.0}
"""Clients in their fixed order, and when each answers."""


@dataclass(frozen=True)
class Kind:
    """A kind of fleet. `make` gives a fresh one with the clients of `ARRIVALS`; `order` is their canonical one."""

    make: Callable[[], Fleet]
    params: Params
    trainable: tuple[str, ...]
    order: tuple[str, ...] = tuple(ARRIVALS)

    def model(self, fleet: Fleet, *, control: float | None = None, moved: float = 0.0) -> Model:
        """What a round starts from; with `control` the stream of SCAFFOLD, filled with it."""
        trained = {name: self.params[name] for name in self.trainable}
        filled = {name: value + np.float32(control or 0) for name, value in zeros_like(trained).items()}
        params = {name: value + np.float32(moved) for name, value in self.params.items()}
        return fleet.model(params, {} if control is None else {"control": filled})

    def tasks(
        self,
        model: Model,
        clients: Sequence[str] = tuple(ARRIVALS),
        number: int = 1,
        code: Code | None = None,
    ) -> tuple[Task, ...]:
        strategy = presets.get("scaffold" if model.streams else "fedavg")
        work = LocalWork(batch_size=4, lr=0.1, epochs=None, steps=1)
        run_plan = RunPlan(7, 3, strategy, work, self.trainable, Closing(4), code=code)
        return plan.make_tasks(clients, number, model.base, run_plan)

    def terms(
        self, model: Model, *, until: float = 100.0, wanted: int = 99, code: Code | None = None
    ) -> Terms:
        trained = {name: self.params[name] for name in self.trainable}
        expected = intake.make_expected(trained, model.streams, code=code)
        return Terms(expected, Closing(wanted, until), len(ARRIVALS))


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
        found = pool.run_one({"kind": "prepare", **request}).values
        described = {key: found[key] for key in ("input_shape", "classes", "input_dtype", "task")}
        model = {"name": "logreg", "options": {}, **described}
        made = pool.run_one({"kind": "initial", "model": model, "seed": 7})
        pool.broadcast({"kind": "open", "folder": str(folder / "work"), "model": model})

        def make() -> Fleet:
            clients = [
                SimulatedClient(name, index, found["examples"][index], "torch")
                for index, name in enumerate(ARRIVALS)
            ]
            # One step of one second a client, so that its factor is when it answers.
            return SimulatedFleet(pool, clients, clock_of(ARRIVALS.values()))

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


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Kind]:
    """Devices as threads that talk to a device API on loopback; each fleet has a coordinator of its own."""
    with ExitStack() as running:

        def make() -> Fleet:
            folder = tmp_path / uuid.uuid4().hex
            folder.mkdir()
            database = running.enter_context(sqlite(folder))
            world = running.enter_context(serving(folder, database, lease_seconds=1e6))
            deployment = world.start_run("r")
            Cohort(
                world,
                {
                    name: ScriptedDevice(world.enrol(name), a=1 + 0.2 * i, c=i - 1.5, seconds=seconds)
                    for i, (name, seconds) in enumerate(ARRIVALS.items())
                },
            )
            return DeviceFleet(world.services, deployment, patience_seconds=60)

        yield Kind(make, PARAMS, ("w",), order=tuple(sorted(ARRIVALS)))


@pytest.fixture
def flower(tmp_path: Path) -> Kind:
    """Nodes of a Flower Grid as functions of this process."""

    def make() -> Fleet:
        folder = tmp_path / uuid.uuid4().hex
        folder.mkdir()
        clients = [
            SimulatedClient(name, index, num_examples=8, runtime="torch")
            for index, name in enumerate(ARRIVALS)
        ]
        grid = NodeGrid(
            {
                100 - i: quadratic_node(i, len(ARRIVALS), a=1 + 0.2 * i, c=i - 1.5)
                for i in range(len(ARRIVALS))
            },
            {100 - i: seconds for i, seconds in enumerate(ARRIVALS.values())},
        )
        federation = Federation(clients, "data", None, {}, {}, quorum=1, patience_seconds=60)
        return FlowerFleet(grid, federation, folder, clock=FlowerClock(grid.time.monotonic, grid.time.sleep))

    return Kind(make, PARAMS, ("w",))


@pytest.fixture(params=["memory", "simulated", "device", "flower"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["memory", "simulated", "flower"])
def keeping(request: pytest.FixtureRequest) -> Any:
    """Kinds that keep the state of their clients for them; devices keep their own."""
    return request.getfixturevalue(request.param)


def answers(fleet: Fleet) -> list[Answer]:
    return [result for result in fleet.results() if isinstance(result, Answer)]


def bits(answer: Answer) -> dict[str, Any]:
    """All that an accepted update says."""
    update = answer.verdict
    assert isinstance(update, Update), update
    tensors = flatten({"delta": update.delta, **update.extras})
    figures = (update.num_examples, update.num_steps, update.train_loss)
    return {"said": figures} | {name: (value.shape, value.tobytes()) for name, value in tensors.items()}


def updates(kind: Kind, fleet: Fleet, tasks: Sequence[Task], model: Model) -> dict[str, dict[str, Any]]:
    """What each client answers, by name."""
    fleet.submit(tasks, model, kind.terms(model))
    return {each.task.message.client: bits(each) for each in answers(fleet)}


def test_clients_keep_their_order(kind: Kind) -> None:
    fleet = kind.make()
    assert tuple(fleet.clients(4)) == kind.order
    model = kind.model(fleet)
    updates(kind, fleet, kind.tasks(model), model)
    assert tuple(fleet.clients(4)) == kind.order


def test_a_model_is_named_by_its_params(kind: Kind) -> None:
    fleet = kind.make()
    assert kind.model(fleet).base == kind.model(kind.make()).base == arrays.sha256(arrays.encode(kind.params))
    assert kind.model(fleet, moved=1.0).base != kind.model(fleet).base
    assert kind.model(fleet, control=0.5).payload_bytes > kind.model(fleet).payload_bytes > 0


def test_a_round_that_was_never_submitted_is_not_reopened(kind: Kind) -> None:
    assert kind.make().find_open_round(1) is None


def test_each_selected_client_answers_once_with_an_update_that_is_accepted(kind: Kind) -> None:
    fleet = kind.make()
    model = kind.model(fleet)
    tasks = kind.tasks(model, ("d", "c", "b"))
    fleet.submit(tasks, model, kind.terms(model))
    got = answers(fleet)
    assert sorted(each.task.position for each in got) == [0, 1, 2]
    for each in got:
        assert each.task == tasks[each.task.position]
        assert isinstance(each.verdict, Update), each.verdict
        assert any(np.any(value) for value in each.verdict.delta.values())
        assert each.payload_bytes > sum(value.nbytes for value in each.verdict.delta.values())


def test_results_come_in_the_order_of_arrival(kind: Kind) -> None:
    fleet = kind.make()
    model = kind.model(fleet)
    fleet.submit(kind.tasks(model), model, kind.terms(model))
    assert [(each.task.message.client, each.seconds) for each in answers(fleet)] == [
        ("a", 1.0),
        ("c", 2.0),
        ("b", 2.0),
        ("d", 4.0),
    ]


def test_results_end_at_the_deadline_and_name_who_is_missing(kind: Kind) -> None:
    fleet = kind.make()
    model = kind.model(fleet)
    fleet.submit(kind.tasks(model), model, kind.terms(model, until=2.0))
    results = list(fleet.results())
    assert [each.task.message.client for each in results if isinstance(each, Answer)] == ["a", "c", "b"]
    (missing,) = [each for each in results if isinstance(each, Silence)]
    assert (missing.task.message.client, missing.seconds) == ("d", 2.0)
    assert missing.reason


def test_results_end_with_the_last_one_wanted(kind: Kind) -> None:
    fleet = kind.make()
    model = kind.model(fleet)
    fleet.submit(kind.tasks(model), model, kind.terms(model, wanted=2))
    assert [each.task.message.client for each in fleet.results()] == ["a", "c"]


def test_results_other_than_requested_are_rejected_and_do_not_count_as_wanted(kind: Kind) -> None:
    fleet = kind.make()
    model = kind.model(fleet)
    terms = kind.terms(model, wanted=1)
    other = replace(terms, expected=replace(terms.expected, shapes={"delta/other": (1,)}))
    fleet.submit(kind.tasks(model), model, other)
    got = answers(fleet)
    assert [each.task.message.client for each in got] == ["a", "c", "b", "d"]
    for each in got:
        assert isinstance(each.verdict, intake.Rejection)
        assert each.verdict.client == each.task.message.client
        assert each.verdict.reason in ("misnamed_tensor", "extra_tensor")


@pytest.mark.parametrize("until", [2.0, 100.0])
def test_results_are_repeated_unchanged(kind: Kind, until: float) -> None:
    def reported(fleet: Fleet) -> list[Any]:
        return [
            (each.task, each.seconds, bits(each) if isinstance(each, Answer) else each.reason)
            for each in fleet.results()
        ]

    fleet = kind.make()
    model = kind.model(fleet, control=0.5)
    fleet.submit(kind.tasks(model), model, kind.terms(model, until=until))
    first = reported(fleet)
    assert len(first) == 4
    assert reported(fleet) == first
    accepted = [each[0].message.client for each in first if isinstance(each[2], dict)]
    states = fleet.client_state(accepted)
    once = kind.make()
    once.submit(kind.tasks(model), kind.model(once, control=0.5), kind.terms(model, until=until))
    assert [each.task for each in once.results()] == [each[0] for each in first]
    assert same_states(states, once.client_state(accepted))


def same_states(left: Mapping[str, Mapping[str, Params]], right: Mapping[str, Mapping[str, Params]]) -> bool:
    """Whether both hold the same bits for the same clients."""

    def of(states: Mapping[str, Mapping[str, Params]]) -> dict[str, dict[str, bytes]]:
        return {
            client: {name: value.tobytes() for name, value in flatten(streams).items()}
            for client, streams in states.items()
        }

    return of(left) == of(right)


@pytest.mark.parametrize(("name", "options"), [("topk", {"share": 0.3, "bits": 8}), ("drive", {})])
def test_updates_written_by_a_code_are_its_bits_round_by_round(
    kind: Kind, name: str, options: dict[str, Any]
) -> None:
    """Each answer is what the code makes of the plain update and of what the client has kept, whatever carries it."""
    code, coded, plain = known.get(name, **options), kind.make(), kind.make()
    kept: dict[str, Mapping[str, Params]] = {}
    for number in (1, 2):
        model = kind.model(coded)
        plain.submit(kind.tasks(kind.model(plain), number=number), model, kind.terms(model))
        learnt = {each.task.message.client: each for each in answers(plain)}
        coded.submit(kind.tasks(model, number=number, code=code), model, kind.terms(model, code=code))
        got = answers(coded)
        assert len(got) == len(learnt) == len(ARRIVALS)
        for each in got:
            message = each.task.message
            before = learnt[message.client].verdict
            assert isinstance(each.verdict, Update) and isinstance(before, Update), each.verdict
            expected, kept[message.client] = Compression(code, message.seed).apply(
                before, kept.get(message.client, {})
            )
            assert bits(each) == bits(replace(each, verdict=expected))
            assert each.payload_bytes == len(arrays.encode_result(message, expected))
        coded.client_state(list(ARRIVALS))


def test_an_update_that_no_code_has_written_is_refused_where_one_is_expected(kind: Kind) -> None:
    fleet = kind.make()
    model = kind.model(fleet)
    fleet.submit(kind.tasks(model), model, kind.terms(model, code=known.get("drive")))
    verdicts = [each.verdict for each in answers(fleet)]
    assert len(verdicts) == len(ARRIVALS)
    for verdict in verdicts:
        assert isinstance(verdict, intake.Rejection) and verdict.reason == "malformed"
        assert "this run expects delta (U8), written by the code drive" in verdict.message


def test_an_empty_request_has_an_empty_answer(kind: Kind) -> None:
    fleet = kind.make()
    model = kind.model(fleet)
    fleet.submit((), model, kind.terms(model))
    assert list(fleet.results()) == []


def test_a_round_left_early_leaves_nothing_in_the_next(kind: Kind) -> None:
    """As where the engine fails in mid-round: stop listening, cancel the rest, go on."""
    fleet = kind.make()
    model = kind.model(fleet)
    tasks = kind.tasks(model)
    fleet.submit(tasks, model, kind.terms(model))
    first = next(iter(fleet.results()))
    fleet.cancel([task for task in tasks if task != first.task])

    again = kind.tasks(model, ("c", "d"), number=2)
    fleet.submit(again, model, kind.terms(model))
    got = answers(fleet)
    assert [(each.task, each.seconds) for each in got] == [(again[0], 2.0), (again[1], 4.0)]
    assert all(isinstance(each.verdict, Update) for each in got)  # of this round, or the check would tell


@pytest.mark.slow
def test_equal_tasks_give_equal_bits(kind: Kind) -> None:
    fleet = kind.make()
    model = kind.model(fleet)
    tasks = kind.tasks(model)
    first = updates(kind, fleet, tasks, model)
    assert updates(kind, fleet, tasks, model) == first
    anew = kind.make()
    assert updates(kind, anew, tasks, kind.model(anew)) == first
    assert all(first[a] != first[b] for a in ARRIVALS for b in ARRIVALS if a != b)


@pytest.mark.slow
def test_each_round_starts_from_its_own_model(kind: Kind) -> None:
    fleet = kind.make()
    before = kind.model(fleet)
    updates(kind, fleet, kind.tasks(before), before)
    moved = kind.model(fleet, moved=1.0)
    second = updates(kind, fleet, kind.tasks(moved, number=2), moved)
    other = kind.make()
    unmoved = updates(kind, other, kind.tasks(before, number=2), kind.model(other))
    assert all(second[name] != unmoved[name] for name in ARRIVALS)


def test_clients_of_a_rule_without_state_have_none_to_save(kind: Kind) -> None:
    fleet = kind.make()
    model = kind.model(fleet)
    updates(kind, fleet, kind.tasks(model), model)
    assert fleet.client_state(list(ARRIVALS)) == {}


def test_state_is_handed_out_for_accepted_clients_only(keeping: Kind) -> None:
    kind = keeping
    fleet = kind.make()
    model = kind.model(fleet, control=0.5)
    updates(kind, fleet, kind.tasks(model), model)
    states = fleet.client_state(["a", "c"])
    assert sorted(states) == ["a", "c"]
    for streams in states.values():
        assert {name: value.shape for name, value in streams["control"].items()} == {
            name: kind.params[name].shape for name in kind.trainable
        }


def test_a_client_that_was_not_accepted_keeps_the_state_it_had(keeping: Kind) -> None:
    kind = keeping
    fleet = kind.make()
    model = kind.model(fleet, control=0.5)
    first, second = kind.tasks(model), kind.tasks(model, number=2)
    updates(kind, fleet, first, model)
    fleet.client_state(["a"])
    got = updates(kind, fleet, second, model)
    anew = updates(kind, kind.make(), second, model)
    assert got["b"] == anew["b"]
    assert got["a"] != anew["a"]


def test_a_restored_fleet_goes_on_as_the_one_before(keeping: Kind) -> None:
    kind = keeping
    fleet = kind.make()
    model = kind.model(fleet, control=0.5)
    saved: dict[str, Mapping[str, Params]] = {}
    for number, accepted in ((1, ["a", "b"]), (2, ["b", "c"])):
        updates(kind, fleet, kind.tasks(model, number=number), model)
        saved |= fleet.client_state(accepted)
    assert sorted(saved) == ["a", "b", "c"]

    restored = kind.make()
    restored.restore(saved)
    third = kind.tasks(model, number=3)
    assert updates(kind, restored, third, model) == updates(kind, fleet, third, model)
    assert updates(kind, kind.make(), third, model) != updates(kind, fleet, third, model)
