"""Devices that train models of different width in one run: what each gets, what counts, and what a restart finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import update as update_rows

from coordinator.api.participation import _explain
from coordinator.db import runs as rows
from coordinator.db.store import Database
from coordinator.db.tables import runs
from coordinator.fleets.device import DeviceFleet
from coordinator.reports import run_report
from coordinator.rounds import engine, intake, plan
from coordinator.rounds.closing import Closing
from coordinator.rounds.fleet import Answer, Terms
from coordinator.rounds.plan import LocalWork, RunPlan, Task
from coordinator.rounds.records import Score
from coordinator.runs.live_store import LiveStore
from coordinator.scheduling import matching
from coordinator.scheduling.deployments import Deployment, ModelClass
from coordinator.workers.runtimes import Runtimes
from coordinator.workers.training import ClientTask
from edge_client.data.examples import Examples
from edge_client.train.resolve import runtime_for
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.device import ModelRef, TaskMessage, TaskOffer
from models import widths
from strategies import presets
from strategies.params import Params, State, materialize
from strategies.slices import take
from strategies.update import Update
from tests.support.databases import database, database_url
from tests.support.device_cohort import Changed, Cohort, ScriptedDevice, _unchanged
from tests.support.device_world import REPORT, Refused, TestDevice, World, serving
from tests.support.runs import Seen, first_state

__all__ = ["database", "database_url"]

SHAPE: dict[str, Any] = {
    "input_shape": (5,),
    "classes": 3,
    "input_dtype": "float32",
    "task": "classification",
}
OPTIONS = {"hidden": [8]}
WHOLE = ModelRef("mlp", OPTIONS, **SHAPE)
MIB = {"full": 900, "half": 600, "quarter": 0}
DEVICES = {"a": ("quarter", 100), "b": ("full", 1000), "c": ("half", 700), "d": ("quarter", 599)}
"""Each device's class, and the memory that it offers in MiB."""


def shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        "fc.bias": (3,),
        "fc.weight": (3, hidden),
        "hidden.0.bias": (hidden,),
        "hidden.0.weight": (hidden, 5),
    }


def model_class(name: str, width: float) -> ModelClass:
    options = widths.scale_options("mlp", OPTIONS, width)
    divisors = widths.divisors("mlp", options, width) if width < 1 else {}
    model = replace(WHOLE, options=options, divisors=divisors)
    return ModelClass(name, width, MIB[name] * 2**20, model, shapes(options["hidden"][0]))


CLASSES = tuple(model_class(*each) for each in (("full", 1.0), ("half", 0.5), ("quarter", 0.25)))
RUN: dict[str, Any] = {"model": WHOLE, "runtimes": ("torch",), "classes": CLASSES}
START: Params = {
    name: np.random.default_rng(at).normal(0, 0.5, shape).astype(np.float32)
    for at, (name, shape) in enumerate(shapes(8).items())
}
PLAN = RunPlan(
    seed=7,
    rounds=2,
    strategy=presets.get("heterofl"),
    local=LocalWork(batch_size=8, lr=0.3, epochs=2, steps=None),
    trainable=tuple(START),
    closing=Closing(len(DEVICES)),
)


def examples(device: str) -> Examples:
    rng = np.random.default_rng(list(device.encode()))
    count = REPORT.datasets["digits"]
    return Examples(rng.random((count, 5), np.float32), rng.integers(0, 3, count).astype(np.int32))


class TorchDevice(ScriptedDevice):
    """Trains the model of its task, built as a daemon builds it."""

    def __init__(self, client: TestDevice, memory_mib: int, changed: Changed = _unchanged) -> None:
        super().__init__(client, 1.0, 0.0, seconds=1.0, changed=changed)
        report: dict[str, Any] = {"wire": "1.4", "runtimes": {"torch": "2"}, "models": ("mlp",)}
        client.check_in = partial(client.check_in, memory_bytes=memory_mib * 2**20, **report)  # type: ignore[method-assign]

    def train(self, offer: TaskOffer) -> Any:
        self._trainer = Trainer(runtime_for(offer.runtime, offer.model, None, None))
        work = TaskMessage.from_json(offer.message)
        assert offer.params is not None
        params = arrays.decode(self.client.fetch(offer.params.sha256).content)
        result = self._trainer.train(params, TrainTask.of(work, {}), examples(work.client), None)
        sent = arrays.encode_result(work, self._changed(work, result.update))
        return type("Result", (), {"seconds": 1.0, "offer": offer, "payload": sent, "state": {}})()


@pytest.fixture
def world(tmp_path: Path, database: Database) -> Iterator[World]:
    with serving(tmp_path, database, lease_seconds=1e6) as world:
        yield world


def begun(world: World) -> tuple[Deployment, LiveStore]:
    """A run with its first model, as its preparation leaves it."""
    deployment, store = world.start_run("r", **RUN), LiveStore(world.services, "r")
    params, strategy = store.put(first_state(PLAN, START))
    values = {"params": params, "strategy_state": strategy}
    world.services.database.write(
        lambda at: at.execute(update_rows(runs).where(runs.c.id == "r").values(**values))
    ).result()
    return deployment, store


def play(world: World, changed: dict[str, Changed], rounds: int = 2) -> tuple[Params, Seen]:
    """The model after the run with devices of which some change their updates."""
    deployment, store = begun(world)
    devices = {
        name: TorchDevice(world.enrol(name), memory, changed.get(name, _unchanged))
        for name, (_, memory) in DEVICES.items()
    }
    Cohort(world, devices)
    seen = Seen()
    row = world.services.database.read(partial(rows.find, run="r"))
    store.on_committed = seen.records.append  # type: ignore[method-assign]
    last = engine.run(
        replace(PLAN, rounds=rounds),
        DeviceFleet(world.services, deployment, patience_seconds=60),
        store.load(row),
        store,
        evaluate=lambda number, params: Score(None, None, {}),
        emit=seen.emit,
        monotonic=lambda: 0.0,
    )
    return materialize(last.params), seen


def simulated() -> Params:
    """What simulated clients of these classes learn: by the code of the workers."""
    described: dict[str, Any] = {"name": "mlp", "options": OPTIONS, **SHAPE}
    narrower = {
        each.name: {
            **described,
            "name": widths.MODEL,
            "options": {"base": "mlp", "base_options": OPTIONS, "width": each.width},
            "shapes": each.shapes,
        }
        for each in CLASSES[1:]
    }
    runtimes, params = Runtimes({**described, "narrower": narrower}), dict(START)
    for number in (1, 2):
        base = arrays.sha256(arrays.encode(params))
        fold = PLAN.strategy.start(len(DEVICES))
        for task in plan.make_tasks(sorted(DEVICES), number, base, PLAN):
            name = task.message.client
            data = examples(name)
            client = ClientTask(name, TrainTask.of(task.message, {}), np.arange(len(data)), {})
            trainer = runtimes.trainer("torch", DEVICES[name][0])
            (result,) = trainer.train(params, [client], data)
            fold.add(task.position, PLAN.strategy.transform(result.update))
        moved, _ = PLAN.strategy.apply(params, State(), fold.finish(), len(DEVICES))
        params = materialize(moved)
    return params


def test_devices_of_three_classes_learn_what_simulated_clients_learn_to_the_bit(world: World) -> None:
    model, seen = play(world, {})
    expected = simulated()
    assert {name: value.tobytes() for name, value in model.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
    sizes = [
        len(arrays.encode(dict(take(START, each.shapes)))) for each in (CLASSES[2], *CLASSES, CLASSES[2])
    ]
    assert [record.bytes_down for record in seen.records] == [sum(sizes[:4])] * 2
    # The parts are deleted with the round: what is left are the last params and state.
    kept = world.services.database.read(partial(rows.find, run="r"))
    assert kept is not None
    blobs = {path.name for path in (world.services.settings.home / "blobs").iterdir() if path.is_file()}
    assert blobs == {kept.params, kept.strategy_state}


def test_the_report_and_the_device_say_in_which_class_it_is(world: World) -> None:
    play(world, {}, rounds=1)
    used = world.services.database.read(lambda at: rows.model_classes_used(at, "r"))
    assert used == {"full": ["b"], "half": ["c"], "quarter": ["a", "d"]}
    document = [
        {"name": each.name, "width": each.width, "memory_bytes": each.memory_bytes, "shapes": each.shapes, "model": {"options": each.model.options}}
        for each in CLASSES
    ]  # fmt: skip
    scored = {"half": {"test_accuracy": 0.5, "test_loss": 1.0}}
    found = run_report._device_classes(used, document, scored)
    assert [each["clients"] for each in found.values()] == [1, 1, 2]
    assert [each["params"] for each in found.values()] == [75, 39, 21]
    assert found["half"]["test_accuracy"] == 0.5 and "test_accuracy" not in found["full"]
    why = world.services.database.read(lambda at: _explain(at, world.services, "d", None))
    (part,) = why.runs
    assert [each.words for each in part.reasons if each.code == "model_class"] == [
        "model class quarter, which trains 0.25 of the model's width: it offers 599 MiB of memory"
    ]


def test_an_update_of_another_width_is_rejected(world: World) -> None:
    def of_the_whole_model(task: TaskMessage, update: Update) -> Update:
        return replace(update, delta={name: np.zeros_like(value) for name, value in START.items()})

    _, seen = play(world, {"a": of_the_whole_model}, rounds=1)
    (record,) = seen.records
    assert (record.accepted, record.rejections) == (3, {"wrong_shape": 1})


def test_a_restart_cuts_the_parts_again_that_an_open_round_may_need(world: World) -> None:
    deployment, _ = begun(world)
    device = TorchDevice(world.enrol("d"), 599)
    device.client.check_in()
    for _ in range(2):  # the second process finds the round open, and no blob of its part
        fleet = DeviceFleet(world.services, deployment, patience_seconds=60)
        model = fleet.model(START, {})
        task = Task(0, plan.make_tasks(["d"], 1, model.base, PLAN)[0].message)
        terms = Terms(intake.make_expected(START, {}), Closing(1), 1)
        fleet.submit([task], model, terms)
        offer = device.client.lease()
        assert offer.model_class == "quarter" and offer.model.options == {"hidden": [2]}
        assert offer.params is not None and offer.result_limit_bytes < terms.expected.payload_limit_bytes
        assert model.download_bytes("d") == offer.params.size_bytes < model.payload_bytes
        part = world.services.blobs.path(offer.params.sha256)
        assert arrays.decode(part.read_bytes()).keys() == START.keys()
        part.unlink()
        with pytest.raises(Refused):
            device.client.fetch(offer.params.sha256)
    fleet.model(START, {})
    fleet.submit([task], model, terms)
    device.deliver(device.train(offer))
    (answer,) = fleet.results()
    assert isinstance(answer, Answer) and isinstance(answer.verdict, Update)


@pytest.mark.parametrize(
    ("mib", "expected"), [(2000, "full"), (900, "full"), (899, "half"), (600, "half"), (0, "quarter")]
)
def test_the_memory_that_a_device_offers_decides_its_class(mib: int, expected: str) -> None:
    found = matching.class_for(CLASSES, mib * 2**20)
    assert found is not None and found.name == expected
