"""Device classes: clients of narrower models in one simulation, what its report says of them, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.experiments import experiment as experiments
from coordinator.fleets.simulated_clients import DeviceClass
from coordinator.on_flower.possible import require_possible
from coordinator.on_flower.strategy import FedloopStrategy
from coordinator.runs import own_strategy
from coordinator.runs.population.clients import make_clients
from coordinator.runs.simulation import Environment, resume
from edge_client.train.torch_trainer import TorchRuntime
from edge_client.train.trainer import Trainer
from edge_client.wire import arrays
from models import datasets, zoo

HIDDEN = 16
CLASSES = {"full": 1.0, "half": 0.5, "quarter": 0.25}


def document(strategy: dict[str, Any], hidden: int = HIDDEN, **simulation: Any) -> dict[str, Any]:
    return {
        "seed": 1,
        "data": {"dataset": "digits", "partition": "iid"},
        "model": {"name": "mlp", "hidden": [hidden]},
        "federation": {"clients": 12, "clients_per_round": 12, "rounds": 12, "runtimes": {"torch": 1.0}},
        "local": {"epochs": 2, "batch_size": 16, "lr": 0.1},
        "evaluation": {"every": 4},
        "simulation": {"workers": 2, "engine": "pool", **simulation},
        "strategy": strategy,
    }


@pytest.fixture(scope="module")
def three_classes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("classes") / "run"
    return out, fedloop.simulate(document({"name": "heterofl"}), out=out).report


@pytest.mark.slow
def test_with_three_classes_the_whole_model_beats_a_federation_of_the_smallest(
    three_classes: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The same clients, rows and rounds; of the small federation the best round counts."""
    _, report = three_classes
    small = fedloop.simulate(document({"name": "fedavg"}, HIDDEN // 4), out=tmp_path / "small").report
    best = max(each["test_accuracy"] for each in small["rounds"] if each["test_accuracy"] is not None)
    assert report["final"]["test_accuracy"] > best + 0.03
    assert report["device_classes"]["half"]["test_accuracy"] > 0.5


@pytest.mark.slow
def test_the_report_has_clients_size_and_accuracy_of_each_class(
    three_classes: tuple[Path, dict[str, Any]],
) -> None:
    out, report = three_classes
    classes = report["device_classes"]
    assert list(classes) == list(CLASSES)
    assert [each["clients"] for each in classes.values()] == [4, 4, 4]
    assert [each["params"] for each in classes.values()] == [65 * n + 10 * n + 10 for n in (16, 8, 4)]
    sizes = [each["model_bytes"] for each in classes.values()]
    assert sizes[0] == (out / "model.safetensors").stat().st_size
    assert report["rounds"][0]["bytes_down"] == 4 * sum(sizes)
    assert classes["full"]["test_accuracy"] == report["final"]["test_accuracy"]
    assert {name: each["options"] for name, each in classes.items()} == {
        "full": {"hidden": [16]},
        "half": {"hidden": [8]},
        "quarter": {"hidden": [4]},
    }


@pytest.mark.slow
def test_the_stored_part_of_a_class_is_a_model_of_the_catalog_that_scores_as_reported(
    three_classes: tuple[Path, dict[str, Any]],
) -> None:
    out, report = three_classes
    rows = datasets.load("digits", seed=1)
    test = rows.test
    for each in report["device_classes"].values():
        spec = zoo.get("mlp", input_shape=(8, 8), classes=10, **each["options"])
        params = arrays.decode((out / each["file"]).read_bytes())
        logits = Trainer(TorchRuntime(spec.build(0), spec.loss)).runtime.logits(params, rows.x[test])
        assert (logits.argmax(1) == rows.y[test]).mean() == pytest.approx(each["test_accuracy"], abs=1e-9)


@pytest.mark.slow
@pytest.mark.extended
def test_one_class_of_full_width_is_fedavg_to_the_bit(tmp_path: Path) -> None:
    one_class: dict[str, Any] = {"name": "heterofl", "classes": {"all": 1.0}}
    hashes = [
        fedloop.simulate(document(strategy), out=tmp_path / name).report["final"]["model_sha256"]
        for name, strategy in {"plain": {"name": "fedavg"}, "classes": one_class}.items()
    ]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy.classes": {"half": 0.5}}, r"strategy.classes = \{ half = 0.5 \}: no class has width 1"),
        ({"strategy.classes": {"full": 1, "wide": 1.5}}, "each > 0 and <= 1"),
        ({"strategy.classes": {"full": 1, "a b": 0.5}}, "expected a table of numbers"),
        ({"strategy.classes": 0.5}, "expected a table of numbers"),
        ({"strategy.classes": {"full": 1, "a": 0.5, "b": 0.49}}, "a and b train the same model"),
        ({"strategy.shares": {"full": 1}}, "strategy.shares = .* needs a share for each .* full, half, quarter"),
        ({"federation.clients": 2, "federation.clients_per_round": 2}, "3 classes, but federation.clients = 2"),
        ({"model": {"name": "logreg"}}, "model.name = 'logreg' cannot be cut .* expected mlp, cnn, resnet8"),
        ({"model": {"name": "nets:build"}}, "model.name = 'nets:build' cannot be cut"),
        ({"model": {"name": "resnet8", "norm": "batch"}}, "running statistics"),
        ({"model.adapt": "head", "model.init": "w.safetensors"}, "model.adapt = 'head' freezes a backbone"),
        ({"federation.mode": "async"}, "federation.mode = 'async' does not go with strategy.name = 'heterofl'"),
        ({"federation.runtimes": {"tensorflow": 1.0}}, "asks for tensorflow, but .* in: litert, torch"),
        ({"simulation.engine": "stacked"}, 'simulation.engine = "stacked" trains clients of one model'),
        ({"simulation.attack": {"name": "sign_flip", "clients": 2}}, "simulation.attack is for clients of one model"),
        ({"federation.relays": 3}, "federation.relays = 3 fold updates of one model"),
        ({"uplink": {"code": "qsgd"}}, "uplink.code = 'qsgd' is for updates of one model"),
        ({"simulation.fine_tune": {}}, "simulation.fine_tune trains the whole model on every client"),
        ({"simulation.local_baseline": "on"}, 'simulation.local_baseline = "on" trains the whole model'),
    ],
)  # fmt: skip
def test_what_does_not_go_with_narrower_models_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        experiments.resolve(changed(changes), "experiment")


MEMORY = {"full": 1024.0, "half": 512.0, "quarter": 0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy.memory_mib": {"full": 9}}, "needs the memory of each of strategy.classes: full, half, quarter"),
        ({"strategy.memory_mib": MEMORY}, "needs the memory of each client: give simulation.profiles"),
        ({"strategy.memory_mib": {**MEMORY, "half": 2048.0}}, "a wider class needs more memory"),
        ({"strategy.memory_mib": MEMORY, "strategy.shares": CLASSES}, "both say which clients have which class"),
    ],
)  # fmt: skip
def test_memory_decides_only_where_it_is_known(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        experiments.resolve(changed(changes), "experiment")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ((2048, 1024, 1023, 512, 511, 1), ["full", "full", "half", "half", "quarter", "quarter"]),
        ((600, 600, 600, 1, 1, 1), "strategy.memory_mib gives none of the 6 clients to full"),
        (
            (2048, 600, 50, 50, 50, 50),
            "client 'c2' has memory_mib = 50, and every class .* needs more, 100 or above",
        ),
    ],
)
def test_the_memory_of_a_client_decides_its_class(
    tmp_path: Path, memory: tuple[int, ...], expected: list[str] | str
) -> None:
    lines = [f"c{index},{each}" for index, each in enumerate(memory)]
    (tmp_path / "clients.csv").write_text("\n".join(["client,memory_mib", *lines]), "utf-8")
    least = MEMORY | ({"quarter": 100.0} if memory[-1] == 50 else {})
    changes = {
        "strategy.memory_mib": least,
        "simulation.profiles": str(tmp_path / "clients.csv"),
        "federation.clients": 6,
        "federation.clients_per_round": 6,
    }
    found = experiments.resolve(changed(changes), "experiment")
    classes = [DeviceClass(name, width, 1.0, {}, 0, {}) for name, width in CLASSES.items()]
    data_info = {"clients": [f"c{index}" for index in range(6)], "examples": [1] * 6}
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            make_clients(found, data_info, classes)
        return
    made = make_clients(found, data_info, classes)
    assert [each.device_class.name for each in made if each.device_class is not None] == expected


def test_on_devices_memory_decides_and_needs_no_profiles() -> None:
    with pytest.raises(UserError, match=r"on devices needs strategy.memory_mib, .* full, half, quarter"):
        experiments.resolve(changed({}), "experiment", "devices")
    with pytest.raises(UserError, match="both say which clients have which class"):
        both = {"strategy.memory_mib": MEMORY, "strategy.shares": CLASSES}
        experiments.resolve(changed(both), "experiment", "devices")
    resolved = experiments.resolve(changed({"strategy.memory_mib": MEMORY}), "experiment", "devices")
    assert resolved.strategy.options["memory_mib"] == MEMORY
    for key, value in (
        ("uplink", {"code": "qsgd"}),
        ("federation.mode", "async"),
        ("federation.runtimes", {"tensorflow": 1.0}),
        ("local", {"optimizer": "adamw", "lr": 0.01, "keep_moments": True}),
    ):
        with pytest.raises(UserError, match=key.partition(".")[0]):
            experiments.resolve(changed({"strategy.memory_mib": MEMORY, key: value}), "experiment", "devices")


def test_flower_has_one_model_for_all() -> None:
    with pytest.raises(
        UserError, match=r"strategy.name = 'heterofl': Flower's nodes all train the same model"
    ):
        require_possible(experiments.resolve(changed({}), "experiment"))
    with pytest.raises(UserError, match="models of different sizes, and a round of Flower sends one to all"):
        FedloopStrategy("heterofl", {})


def test_every_key_of_an_experiment_with_classes_survives_its_file(tmp_path: Path) -> None:
    shares = {"full": 1.0, "half": 2.0, "quarter": 0.5}
    resolved = experiments.resolve(changed({"strategy.shares": shares}), "experiment")
    assert resolved.simulation.engine == "pool"
    assert resolved.strategy.options["classes"] == CLASSES
    (tmp_path / "again.toml").write_text(resolved.to_toml(), "utf-8")
    assert experiments.load(tmp_path / "again.toml") == resolved


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    result = document({"name": "heterofl"}) | {"simulation": {}}
    for key, value in changes.items():
        table, _, inner = key.partition(".")
        result[table] = {**result[table], inner: value} if inner else value
    return result


def clients_of(shares: dict[str, float], count: int) -> Counter[str]:
    classes = [
        DeviceClass(name, 1 / (at + 1), share, {}, 0, {}) for at, (name, share) in enumerate(shares.items())
    ]
    found = experiments.resolve(
        changed({"federation.clients": count, "federation.clients_per_round": 1}), "e"
    )
    data_info = {"clients": [f"c{index}" for index in range(count)], "examples": [1] * count}
    made = make_clients(found, data_info, classes)
    return Counter(each.device_class.name for each in made if each.device_class is not None)


def test_shares_deal_classes_out_and_each_class_gets_a_client() -> None:
    assert clients_of({"a": 2, "b": 1, "c": 1}, 20) == {"a": 10, "b": 5, "c": 5}
    with pytest.raises(
        UserError, match=r"strategy.shares gives none of the 4 clients to c of strategy.classes"
    ):
        clients_of({"a": 10, "b": 10, "c": 1}, 4)


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_with_faults_and_dropouts_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Faulty clients of narrower models are rejected for their own shapes; LiteRT would do the same."""
    options: dict[str, Any] = {"dropout": 0.2, "faults": {"wrong_shape": 1, "nan": 1}}
    given = document({"name": "heterofl"}, **options)
    given["federation"] |= {"rounds": 3}
    whole = fedloop.simulate(given, out=tmp_path / "whole").report
    assert set(whole["rejections"]) == {"wrong_shape", "non_finite"}
    given["federation"] |= {"rounds": 1}
    fedloop.simulate(given, out=tmp_path / "parts")
    resumed = resume(tmp_path / "parts", Environment(), ["federation.rounds=3"])
    assert resumed["final"]["model_sha256"] == whole["final"]["model_sha256"]
    assert resumed["device_classes"] == whole["device_classes"]


@pytest.mark.slow
@pytest.mark.extended
def test_litert_clients_of_each_class_learn_what_torch_clients_learn(tmp_path: Path) -> None:
    """One round from the same params: an artifact for each class, each with its scaler."""
    models = {}
    for runtime in ("torch", "litert"):
        given = document({"name": "heterofl"})
        given["federation"] |= {"rounds": 1, "runtimes": {runtime: 1.0}}
        report = fedloop.simulate(given, out=tmp_path / runtime).report
        models[runtime] = arrays.decode((tmp_path / runtime / "model.safetensors").read_bytes())
        assert [each["clients"] for each in report["device_classes"].values()] == [4, 4, 4]
    for name, value in models["torch"].items():
        np.testing.assert_allclose(models["litert"][name], value, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.extended
def test_a_recorded_run_replays_and_quantities_have_losses(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.random((2, 240))
    rows = [f"{x},{y},{3 * x - 2 * y}" for x, y in zip(a, b, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,label", *rows]), "utf-8")
    given = document({"name": "heterofl"}, dropout=0.3) | {"record": "trace.csv"}
    given["data"] = {"dataset": "csv", "path": str(tmp_path / "rows.csv"), "task": "regression"}
    given["federation"] |= {"rounds": 3}
    recorded = fedloop.simulate(given, out=tmp_path / "recorded").report
    again = given | {"simulation": {"workers": 2, "replay": str(tmp_path / "recorded" / "trace.csv")}}
    replayed = fedloop.simulate(again, out=tmp_path / "replayed").report
    assert replayed["final"]["model_sha256"] == recorded["final"]["model_sha256"]
    for each in recorded["device_classes"].values():
        assert each["test_accuracy"] is None and each["test_loss"] > 0
    assert recorded["device_classes"]["full"]["test_loss"] == recorded["final"]["test_loss"]


def test_a_strategy_of_ones_own_cannot_replace_the_mean_over_holders() -> None:
    with pytest.raises(
        UserError, match="it replaces the mean of its base, and 'heterofl' has another aggregator"
    ):
        own_strategy._base("mine:Strategy", {"base": "heterofl", "options": {}, "takes": []})
