"""IFCA: clients of a kind find together, each cluster has a model, and it beats one model for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
from coordinator.commands import summaries
from coordinator.errors import UserError
from coordinator.experiments import experiment as experiments
from coordinator.on_flower.possible import require_possible
from coordinator.runs import simulation
from edge_client.wire import arrays
from strategies import presets
from strategies.update import Update

LOADER = '''
import numpy as np
from sklearn.datasets import load_digits

def load(seed):
    """Eight sites; those of the second group call each digit by another name."""
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    site = rng.integers(0, 8, len(y))
    return {
        "x": (x / 16).astype(np.float32),
        "y": np.where(site < 4, y, (y + 3) % 10),
        "site": np.char.add("site ", site.astype(str)),
        "test": rng.random(len(y)) < 0.25,
        "classes": 10,
    }
'''
GROUPS = [{f"site {index}" for index in each} for each in (range(4), range(4, 8))]


def document(strategy: str = "ifca", rounds: int = 5, seed: int = 1, **changed: Any) -> dict[str, Any]:
    return {
        "seed": seed,
        "data": {"dataset": "two_groups:load", "partition": "natural"},
        "model": {"name": "mlp", "hidden": [32]},
        "federation": {"clients_per_round": 8, "rounds": rounds, "runtimes": {"torch": 1}},
        "local": {"epochs": 5, "lr": 0.2},
        "strategy": {"name": strategy},
        "simulation": {"workers": 1, "local_baseline": "off"},
    } | changed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "two_groups.py").write_text(LOADER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_clients_of_a_group_find_together_and_are_served_better_than_by_one_model(folder: Path) -> None:
    for seed in (1, 2):
        report = fedloop.simulate(document(seed=seed), out=folder / f"ifca-{seed}").report
        clusters = report["clusters"]
        assert sorted(map(sorted, (each["names"] for each in clusters.values()))) == sorted(
            map(sorted, GROUPS)
        )
        assert [each["clients"] for each in clusters.values()] == [4, 4]
        assert sum(each["test_rows"] for each in clusters.values()) == report["final"]["test_rows"]
        one = fedloop.simulate(document("fedavg", seed=seed), out=folder / f"one-{seed}").report["final"]
        assert report["final"]["personalised_accuracy"] > one["test_accuracy"] + 0.2
        assert all(each["personalised_accuracy"] > 0.8 for each in report["per_client"].values())
    assert "model 2: 4 clients, test accuracy 0." in summaries.run_summary(report, None)


@pytest.mark.slow
def test_every_model_is_a_file_and_a_resumed_run_ends_in_the_same_bits(folder: Path) -> None:
    whole = fedloop.simulate(document(rounds=3), out=folder / "whole").report
    fedloop.simulate(document(rounds=2), out=folder / "resumed")
    resumed = simulation.resume(folder / "resumed", simulation.Environment(), ["federation.rounds=3"])
    assert resumed["clusters"] == whole["clusters"] and resumed["final"] == whole["final"]
    files = [each["file"] for each in whole["clusters"].values()]
    assert files == ["model.safetensors", "model-cluster-2.safetensors"]
    contents = [(folder / "whole" / file).read_bytes() for file in files]
    assert contents == [(folder / "resumed" / file).read_bytes() for file in files]
    first, second = map(arrays.decode, contents)
    assert {name: value.shape for name, value in first.items()} == {
        name: value.shape for name, value in second.items()
    }
    assert contents[0] != contents[1]
    # A checkpoint holds nothing of a client.
    assert json.loads((folder / "whole" / "checkpoint" / "checkpoint.json").read_text())["clients"] == {}


def test_a_model_moves_by_the_mean_of_those_who_chose_it_and_one_that_nobody_chose_stays() -> None:
    strategy = presets.get("ifca", clusters=3, server_lr=0.5)
    params = {"w": np.array([1.0, 2.0, 3.0], np.float32), "frozen": np.ones(1, np.float32)}
    state = strategy.init(params, ["w"])
    before = strategy.broadcast(state)
    assert sorted(before["model_2"]["w"].tolist()) == [1.0, 2.0, 3.0]

    def update(step: float, examples: int, model: int) -> Update:
        chosen = {"chosen": {"model": np.array([model], np.float32)}}
        return Update({"w": np.full(3, step, np.float32)}, examples, 1, 0.0, chosen)

    fold = strategy.start(3)
    for position, each in enumerate((update(1.0, 1, 0), update(4.0, 2, 0), update(-2.0, 5, 2))):
        fold.add(position, each)
    moved, after = strategy.apply(params, state, fold.finish(), num_clients=3)
    np.testing.assert_allclose(moved["w"], params["w"] + 0.5 * 3.0)
    streams = strategy.broadcast(after)
    assert np.array_equal(streams["model_2"]["w"], before["model_2"]["w"])
    np.testing.assert_allclose(streams["model_3"]["w"], before["model_3"]["w"] - 0.5 * 2.0)
    assert moved["frozen"] is params["frozen"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"federation": {"keep": "best"}}, "federation.keep = 'best' does not go with strategy.name = 'ifca'"),
        ({"federation": {"early_stop": 2}}, "federation.early_stop = 2 does not go with"),
        ({"federation": {"mode": "async"}}, "federation.mode = 'async' does not go with"),
        ({"federation": {"relays": 2}}, "federation.relays = 2"),
        ({"simulation": {"attack": {"name": "ipm", "clients": 1}}}, "simulation.attack.name = 'ipm' does not go with"),
        ({"simulation": {"fine_tune": {}}}, "it would train model 1 on every client"),
        ({"simulation": {"engine": "stacked"}}, "asks each for a model of its own"),
        ({"model": {"name": "mlp", "init": "x.safetensors"}}, "its models begin as fresh ones"),
        ({"model": {"name": "mlp", "register": "digits"}}, "a version has one model"),
        ({"uplink": {"code": "topk"}}, "uplink.code = 'topk' does not go with"),
        ({"strategy": {"name": "ifca", "clusters": 1}}, "expected a whole number >= 2 and <= 64"),
    ],
)  # fmt: skip
def test_what_is_about_one_model_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        experiments.resolve({"strategy": {"name": "ifca"}, **changed}, "experiment")
    assert message in str(caught.value)


def test_devices_and_flower_are_refused() -> None:
    with pytest.raises(UserError, match="is for simulations: a release has one model"):
        experiments.resolve({"strategy": {"name": "ifca"}}, "experiment", "devices")
    with pytest.raises(UserError, match=r"strategy\.name = 'ifca'"):
        require_possible(experiments.resolve({"strategy": {"name": "ifca"}}, "experiment"))
