"""Strategy classes of Flower in our engine: against ours on the same updates, what they keep, what is refused, and whole runs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
from coordinator.db import runs as rows
from coordinator.errors import UserError
from coordinator.experiments import experiment as experiments
from coordinator.on_flower.possible import require_possible
from coordinator.runs import admission, simulation
from coordinator.runs.own_strategy import make_strategy
from coordinator.runs.service import RunService
from coordinator.workers.worker import Worker
from edge_client.processes.channel import Frame
from edge_client.wire import arrays
from strategies import presets
from strategies.client_rules import PlainSGD, Proximal
from strategies.params import Params, State
from strategies.strategy import Strategy
from strategies.update import Update
from tests.support.fake_devices import answering
from tests.support.services import services_in

SHIPPED = "flower:flwr.serverapp.strategy."
SHAPES = {"fc.weight": (5, 7), "fc.bias": (5,), "scale": ()}
EXAMPLES = [1, 10, 25, 3, 7, 40, 12, 9, 30, 2, 5]
ROUNDS = 4


@dataclass
class OneWorker:
    """A pool of one worker in this process."""

    worker: Worker = field(default_factory=Worker)

    def run_one(self, values: dict[str, Any], blobs: tuple[bytes, ...] = ()) -> Frame:
        reply, answers = self.worker.handle(Frame(values, blobs))
        return Frame(reply, tuple(map(bytes, answers)))

    def broadcast(self, values: dict[str, Any], file: int | None = None) -> None:
        self.worker.handle(Frame(values, (), None if file is None else os.dup(file)))


def load(folder: Path, name: str, **options: Any) -> Strategy:
    """As a run makes it."""
    resolved = experiments.resolve({"strategy": {"name": name, **options}}, "experiment")
    pool: Any = OneWorker()
    return make_strategy(resolved, lambda: pool, folder)


def tensors(rng: np.random.Generator, scale: float) -> Params:
    return {name: np.asarray(rng.normal(0, scale, shape), np.float32) for name, shape in SHAPES.items()}


def rounds(count: int = ROUNDS, clients: int = len(EXAMPLES)) -> list[list[Update]]:
    rng = np.random.default_rng(11)
    return [
        [Update(tensors(rng, 0.1), examples, 3, 0.5) for examples in EXAMPLES[:clients]] for _ in range(count)
    ]


def after_each_round(
    strategy: Strategy, given: list[list[Update]], state: State | None = None, params: Params | None = None
) -> tuple[list[Params], State]:
    params = tensors(np.random.default_rng(5), 1.0) if params is None else params
    frozen = {"frozen": np.ones(2, np.float32)}
    state = strategy.init({**params, **frozen}, list(params)) if state is None else state
    seen = []
    for updates in given:
        fold = strategy.start(len(updates))
        for position, update in enumerate(updates):
            fold.add(position, update)
        moved, state = strategy.apply({**params, **frozen}, state, fold.finish(), num_clients=20)
        assert moved["frozen"] is frozen["frozen"]
        params = {name: np.asarray(moved[name]) for name in params}
        seen.append(params)
    return seen, state


ADAPTIVE = {"eta": 0.1, "beta_1": 0.8, "beta_2": 0.95, "tau": 1e-2}
OURS = {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.95, "tau": 1e-2, "flower_form": True}
PAIRS: dict[str, tuple[dict[str, Any], tuple[str, dict[str, Any]]]] = {
    "FedAvg": ({}, ("fedavg", {})),
    "FedAvgM": (
        {"server_learning_rate": 0.7, "server_momentum": 0.9},
        ("fedavgm", {"server_lr": 0.7, "momentum": 0.9}),
    ),
    "FedAdam": (ADAPTIVE, ("fedadam", OURS)),
    "FedYogi": (ADAPTIVE, ("fedyogi", OURS)),
    "FedMedian": ({}, ("median", {})),
    "FedTrimmedAvg": ({"beta": 0.2}, ("trimmed_mean", {"malicious": 2})),
    "Krum": ({"num_malicious_nodes": 2}, ("krum", {"malicious": 2})),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_class_of_flower_makes_the_same_models_as_ours(tmp_path: Path, name: str) -> None:
    options, (ours, ours_options) = PAIRS[name]
    found, _ = after_each_round(load(tmp_path, SHIPPED + name, **options), rounds())
    expected, _ = after_each_round(presets.get(ours, **ours_options), rounds())
    for number, (mine, theirs) in enumerate(zip(expected, found, strict=True), start=1):
        for key in SHAPES:  # Flower computes in float32
            np.testing.assert_allclose(theirs[key], mine[key], rtol=0, atol=number * 1e-6, err_msg=key)


def test_krum_takes_one_of_the_updates_and_bulyan_bears_a_liar(tmp_path: Path) -> None:
    honest = rounds(1)[0]
    lie = Update({key: value + 1e3 for key, value in honest[0].delta.items()}, 1, 3, 0.5)
    start = tensors(np.random.default_rng(5), 1.0)
    (chosen,), _ = after_each_round(load(tmp_path, SHIPPED + "Krum", num_malicious_nodes=1), [[*honest, lie]])
    taken = [
        all(np.allclose(chosen[key], start[key] + each.delta[key], atol=1e-6) for key in SHAPES)
        for each in [*honest, lie]
    ]
    assert sum(taken) == 1 and not taken[-1]
    (borne,), _ = after_each_round(
        load(tmp_path, SHIPPED + "Bulyan", num_malicious_nodes=1), [[*honest, lie]]
    )
    assert max(float(np.abs(borne[key] - start[key]).max()) for key in SHAPES) < 1


@pytest.mark.parametrize("name", ["FedAdam", "FedAvgM"])
def test_what_a_class_keeps_goes_through_the_checkpoint(tmp_path: Path, name: str) -> None:
    options, _ = PAIRS[name]
    whole, _ = after_each_round(load(tmp_path, SHIPPED + name, **options), rounds())
    first, state = after_each_round(load(tmp_path, SHIPPED + name, **options), rounds()[:2])
    stored = arrays.encode(dict(state.arrays), state.values)
    state = State(arrays.decode(stored), arrays.read_header(stored).values)
    rest, _ = after_each_round(load(tmp_path, SHIPPED + name, **options), rounds()[2:], state, first[-1])
    for key in SHAPES:
        assert rest[-1][key].tobytes() == whole[-1][key].tobytes()


def test_fedprox_tells_our_clients_its_mu(tmp_path: Path) -> None:
    assert load(tmp_path, SHIPPED + "FedProx", proximal_mu=0.3).client_rule == Proximal(0.3)
    assert load(tmp_path, SHIPPED + "FedProx").client_rule == PlainSGD()


def test_a_round_of_one_client_does_not_wait_for_more(tmp_path: Path) -> None:
    (update,) = rounds(1, clients=1)[0]
    (moved,), _ = after_each_round(load(tmp_path, SHIPPED + "FedAvg"), [[update]])
    start = tensors(np.random.default_rng(5), 1.0)
    np.testing.assert_allclose(moved["fc.bias"], start["fc.bias"] + update.delta["fc.bias"], atol=1e-6)


OWN = """
import random
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg

class Noisy(FedAvg):
    '''Adds noise of its own, and keeps a count, a scalar and a list.'''
    def __init__(self, scale=0.1, **more):
        super().__init__(**more)
        self.scale, self.count, self.seen, self.norm = scale, 0, [], np.float64(0)
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.count += len(list(replies))
        self.norm += np.float64(random.random())
        self.seen.append(np.float32([server_round, self.count, self.norm]))
        moved = {k: a.numpy() + np.float32(self.scale * np.random.normal() + self.norm) for k, a in arrays.items()}
        return ArrayRecord({k: __import__("flwr").app.Array(np.asarray(v)) for k, v in moved.items()}), metrics

class Rate(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = 0.1 / server_round
        return super().configure_train(server_round, arrays, config, grid)
class Later(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        if server_round > 1:
            config["proximal-mu"] = 0.5
        return super().configure_train(server_round, arrays, config, grid)
class Half(FedAvg):
    def __init__(self):
        super().__init__(fraction_train=0.5, min_train_nodes=1, min_available_nodes=1)
class Waits(FedAvg):
    def __init__(self):
        super().__init__(min_train_nodes=50)
class Zeros(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        zeros = ArrayRecord({k: __import__("flwr").app.Array(np.zeros(1, np.float32)) for k in ["x"]})
        return super().configure_train(server_round, zeros, config, grid)
class Keeps(FedAvg):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)
class Doubles(FedAvg):
    def aggregate_train(self, server_round, replies):
        self.kept = np.zeros(2)
        return super().aggregate_train(server_round, replies)
class Part(FedAvg):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        del arrays["scale"]
        return arrays, metrics
class Falls(FedAvg):
    def aggregate_train(self, server_round, replies):
        raise KeyError("gone")
class Nothing(FedAvg):
    def aggregate_train(self, server_round, replies):
        return None, None
class Other: pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine_for_flower.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_for_flower", raising=False)  # of an earlier test's folder
    return tmp_path


def test_a_class_of_ones_own_keeps_what_it_keeps_and_draws_the_same_when_resumed(own: Path) -> None:
    name = "flower:mine_for_flower.Noisy"
    whole, state = after_each_round(load(own, name, scale=0.2), rounds())
    assert [each.tolist()[:2] for _, each in sorted(state.arrays.items())] == [
        [number, 11 * number] for number in (1, 2, 3, 4)
    ]
    first, state = after_each_round(load(own, name, scale=0.2), rounds()[:2])
    rest, _ = after_each_round(load(own, name, scale=0.2), rounds()[2:], state, first[-1])
    assert rest[-1]["fc.weight"].tobytes() == whole[-1]["fc.weight"].tobytes()


def test_a_class_that_returns_no_arrays_leaves_the_model(own: Path) -> None:
    (moved,), _ = after_each_round(load(own, "flower:mine_for_flower.Nothing"), rounds(1))
    start = tensors(np.random.default_rng(5), 1.0)
    assert all(np.array_equal(moved[key], start[key]) for key in SHAPES)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (SHIPPED + "FedAdm", {}, "did you mean 'FedAdam'?"),
        (SHIPPED + "FedAdam", {"etta": 1}, "strategy.etta: FedAdam has no such argument, did you mean 'eta'?"),
        (SHIPPED + "FedAdam", {"fraction_train": 0.5}, "federation.clients_per_round says how many clients take part"),
        (SHIPPED + "FedAvg", {"min_evaluate_nodes": 2}, "[evaluation] says when models are scored"),
        (SHIPPED + "DifferentialPrivacyServerSideFixedClipping", {}, "cannot be built with {}"),
        ("flower:absent_module.Class", {}, "no module 'absent_module'"),
        ("flower:FedAdam", {}, "a class of Flower is given with its module"),
        ("flower:mine_for_flower.Other", {}, "expected a class that extends flwr.serverapp.strategy.Strategy"),
        ("flower:mine_for_flower.Rate", {}, "its configure_train tells clients lr = 0.1, which Fedloop's clients do not know"),
        ("flower:mine_for_flower.Half", {}, "sends messages to 1 of 2 nodes"),
        ("flower:mine_for_flower.Waits", {}, "it waits for more than 2 nodes"),
        ("flower:mine_for_flower.Zeros", {}, "sends other arrays than the model"),
        ("flower:mine_for_flower.Keeps", {}, "keeps Generator in its attribute 'generator'"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_before_the_run(
    own: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        load(own, name, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Later", "sends {'proximal-mu': 0.5} in round 2, but clients trained by {}"),
        ("Doubles", "keeps float64 in its attribute 'kept'"),
        ("Part", "returned other arrays than those of the model"),
        ("Falls", "mine_for_flower.py, line"),
    ],
)
def test_what_goes_wrong_in_a_round_ends_the_run_with_the_reason(own: Path, name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        after_each_round(load(own, f"flower:mine_for_flower.{name}"), rounds())
    assert message in str(caught.value)


def test_rounds_are_synchronous_and_without_relays_and_not_on_flower() -> None:
    document = {"strategy": {"name": SHIPPED + "FedAvg"}, "federation": {"relays": 2}}
    with pytest.raises(UserError, match=r"federation\.relays = 2 does not go with"):
        experiments.resolve(document, "experiment")
    with pytest.raises(UserError, match="give the class to the ServerApp"):
        require_possible(experiments.resolve({"strategy": document["strategy"]}, "experiment"))


def test_a_coordinator_needs_permission_only_for_classes_that_flower_does_not_ship(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        admission.require_code(
            experiments.resolve({"strategy": {"name": SHIPPED + "FedAdam"}}, "experiment"), services.settings
        )
        for name in ("flower:mine_for_flower.Noisy", "flower:flwr.serverapp.strategy.krum.Krum"):
            with pytest.raises(UserError, match="--allow-code ") as refused:
                admission.require_code(
                    experiments.resolve({"strategy": {"name": name}}, "experiment"), services.settings
                )
            assert refused.value.code == "code_not_allowed"


DOCUMENT: dict[str, Any] = {
    "model": {"name": "logreg"},
    "data": {"partition": "iid"},
    "federation": {"clients": 4, "clients_per_round": 3, "rounds": 3, "runtimes": {"torch": 1.0}},
    "local": {"epochs": 1},
    "strategy": {"name": SHIPPED + "FedAdam", "eta": 0.1},
    "simulation": {"workers": 2, "local_baseline": "off"},
}


@pytest.mark.slow
def test_a_simulation_trains_by_fedadam_of_flower_and_resumes_with_its_moments(tmp_path: Path) -> None:
    whole = fedloop.simulate(DOCUMENT, out=tmp_path / "whole").report
    assert whole["final"]["test_loss"] < whole["start"]["test_loss"]
    assert whole["rejections"] == {}
    ours = {"name": "fedadam", "server_lr": 0.1, "flower_form": True}
    same = fedloop.simulate({**DOCUMENT, "strategy": ours}, out=tmp_path / "ours").report["final"]
    assert whole["final"]["test_loss"] == pytest.approx(same["test_loss"], abs=1e-4)

    two = {**DOCUMENT, "federation": {**DOCUMENT["federation"], "rounds": 2}}
    fedloop.simulate(two, out=tmp_path / "resumed")
    resumed = simulation.resume(
        tmp_path / "resumed", simulation.Environment(), ["federation.rounds=3", "simulation.workers=1"]
    )
    assert resumed["final"]["model_sha256"] == whole["final"]["model_sha256"]


@pytest.mark.slow
def test_a_run_on_devices_trains_by_a_class_of_flower(tmp_path: Path) -> None:
    document = {**DOCUMENT, "federation": {"rounds": 2, "clients_per_round": 3, "runtimes": {"torch": 1.0}}}
    del document["simulation"]
    with services_in(tmp_path / "home") as services:
        service = RunService(services, answering)
        run = service.create(document)
        assert service.join(run, 120)
        row = services.database.read(partial(rows.find, run=run))
        assert row is not None and (row.state, row.round, row.error) == ("finished", 2, None)
