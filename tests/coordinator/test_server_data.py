"""Simulations whose server has data of its own: FedDF and FLTrust, the rows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedloop
from coordinator.commands.trial_summary import describe_trials
from coordinator.errors import UserError
from coordinator.experiments import experiment as experiments
from coordinator.jobs import documents
from coordinator.on_flower.possible import require_possible
from coordinator.on_flower.strategy import FedloopStrategy
from coordinator.rounds.records import Checkpoint
from coordinator.runs import resumption
from coordinator.runs.simulation import Environment, resume
from coordinator.workers import block, server_jobs, workspace
from coordinator.workers.runtimes import Runtimes
from edge_client.processes.channel import Frame
from edge_client.relay.expected import Expected
from edge_client.train import torch_trainer
from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage
from models import datasets, zoo
from strategies.params import Params, State
from tests.support.cli import assert_refused, run_here

CLASSES = {"gateway": "cnn", "phone": {"name": "mlp", "hidden": [16]}, "watch": "logreg"}


def document(strategy: dict[str, Any], **simulation: Any) -> dict[str, Any]:
    return {
        "seed": 1,
        "data": {"dataset": "digits", "partition": "dirichlet(0.3)", "public_samples": 150},
        "model": {"name": "cnn"},
        "federation": {"clients": 6, "clients_per_round": 6, "rounds": 5, "runtimes": {"torch": 1.0}},
        "local": {"epochs": 1, "batch_size": 16, "lr": 0.1},
        "evaluation": {"every": 5},
        "strategy": strategy,
        "simulation": {"workers": 1, **simulation},
    }


FEDDF: dict[str, Any] = {"name": "feddf", "classes": CLASSES, "distil_epochs": 10}


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("feddf") / "run"
    return out, fedloop.simulate(document(FEDDF), out=out).report


def mean_accuracy(report: dict[str, Any]) -> float:
    return float(np.mean([each["test_accuracy"] for each in report["device_classes"].values()]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_three_architectures_learn_more_together_than_each_alone(
    seed: int, distilled: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Without distillation each class is FedAvg among its own clients."""
    alone = document({**FEDDF, "distil_epochs": 0}) | {"seed": seed}
    apart = fedloop.simulate(alone, out=tmp_path / "apart").report
    together = distilled[1]
    if seed != 1:
        together = fedloop.simulate(document(FEDDF) | {"seed": seed}, out=tmp_path / "together").report
    assert mean_accuracy(together) > mean_accuracy(apart) + 0.05


@pytest.mark.slow
def test_every_class_has_a_model_of_its_own_in_the_report_and_the_folder(
    distilled: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, report = distilled
    classes = report["device_classes"]
    assert {name: each["model"] for name, each in classes.items()} == {
        "gateway": "cnn",
        "phone": "mlp",
        "watch": "logreg",
    }
    assert [each["clients"] for each in classes.values()] == [2, 2, 2]
    assert report["server_data"]["rows"] == 150
    lines = describe_trials(report)
    assert lines[1].startswith("phone: 2 clients of model mlp, ") and "server: 150 rows of its own" in lines
    assert classes["gateway"]["file"] == "model.safetensors"
    assert classes["gateway"]["test_accuracy"] == report["final"]["test_accuracy"]
    rounds = report["rounds"]
    assert rounds[0]["bytes_down"] == 2 * sum(each["model_bytes"] for each in classes.values())
    rows = datasets.load("digits", seed=1)
    np.save(tmp_path / "rows.npy", rows.x[rows.test])
    for name, each in classes.items():
        spec = zoo.get(each["model"], input_shape=(8, 8), classes=10, **each["options"])
        runtime = torch_trainer.TorchRuntime(spec.build(0), spec.loss)
        answers = runtime.logits(arrays.decode((out / each["file"]).read_bytes()), rows.x[rows.test])
        right = (answers.argmax(1) == rows.y[rows.test]).mean()
        assert right == pytest.approx(each["test_accuracy"], abs=1e-9)
        done = run_here("predict", str(out), str(tmp_path / "rows.npy"), "--device-class", name, "--json")
        predicted = [each["label"] for each in json.loads(done.stdout)["predictions"]]
        assert predicted == answers.argmax(1).tolist()
    assert_refused(
        run_here("predict", str(out), "x.npy", "--device-class", "tv"), "has no model of a device class"
    )


@pytest.mark.slow
def test_a_resumed_run_ends_in_the_same_models(
    distilled: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """With another number of workers."""
    given = document(FEDDF, workers=2)
    given["federation"] |= {"rounds": 4}
    fedloop.simulate(given, out=tmp_path)
    out, whole = distilled
    resumed = resume(tmp_path, Environment(), ["federation.rounds=5"])
    assert resumed["final"]["model_sha256"] == whole["final"]["model_sha256"]
    assert resumed["device_classes"] == whole["device_classes"]
    for each in resumed["device_classes"].values():
        assert (tmp_path / each["file"]).read_bytes() == (out / each["file"]).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["sign_flip", pytest.param("ipm", marks=pytest.mark.extended)])
def test_fltrust_bears_what_ends_a_mean(attack: str, clean: float, tmp_path: Path) -> None:
    assert trusted(tmp_path / "run", {"name": attack, "clients": 4}) > clean - 0.03


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> float:
    found = trusted(tmp_path_factory.mktemp("fltrust") / "run", None)
    assert found > 0.9
    return found


def trusted(out: Path, attack: dict[str, Any] | None) -> float:
    """The accuracy of ten clients, a minority of whom is malicious."""
    given = document({"name": "fltrust"}, **({"attack": attack} if attack else {}))
    given["data"] |= {"partition": "iid", "public_samples": 100}
    given["model"] = {"name": "mlp", "hidden": [32]}
    given["federation"] |= {"clients": 10, "clients_per_round": 10, "rounds": 20, "outlier_factor": 0.0}
    given["local"] = {"steps": 10, "batch_size": 512, "lr": 0.5}
    given["evaluation"] = {"every": 20}
    return float(fedloop.simulate(given, out=out).report["final"]["test_accuracy"])


# -- the work of the server, in this process --


def work(folder: Path, values: dict[str, Any], *blobs: bytes, epochs: int = 1) -> Params:
    """The reply to a job of the server, whose round starts from a fresh logistic regression."""
    message = TaskMessage(3, "a", "", 5, 512, 0.5, epochs, None, {"name": "plain"})
    start = block.RoundStart(fresh(), {}, block.RoundTerms(message, Expected({}, 0), None))
    frame = Frame({"seed": 1, **values}, tuple(blobs))
    return arrays.decode(server_jobs.run(frame, start, Runtimes(LOGREG), folder)[1][0])


LOGREG = {
    "name": "logreg",
    "options": {},
    "input_shape": [8, 8],
    "classes": 10,
    "input_dtype": "float32",
    "task": "classification",
}


def fresh() -> Params:
    return torch_trainer.read(zoo.get("logreg", input_shape=(8, 8), classes=10).build(4))


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A workspace with rows of the server, and these rows."""
    folder = tmp_path_factory.mktemp("rows") / "work"
    found = prepare(folder, {"dataset": None}, public_samples=40)
    assert found["server"]["rows"] == found["server"]["labelled"] == 40
    x, y = (np.load(folder / f"server_{name}.npy") for name in "xy")
    return folder, torch.from_numpy(x), torch.from_numpy(y).long()


def test_the_servers_update_is_that_of_gradient_descent_on_its_rows(
    server_folder: tuple[Path, torch.Tensor, torch.Tensor],
) -> None:
    folder, x, y = server_folder
    delta = work(folder, {"work": "train"}, epochs=3)
    weight, bias = (torch.tensor(value, requires_grad=True) for value in twin_params())
    for _ in range(3):
        loss = F.cross_entropy(x.flatten(1) @ weight.T + bias, y)
        for each, gradient in zip((weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True):
            each.data -= 0.5 * gradient
    for name, each, before in zip(sorted(delta, reverse=True), (weight, bias), twin_params(), strict=True):
        np.testing.assert_allclose(delta[name], each.detach().numpy() - before, atol=1e-6)


def test_a_model_is_distilled_by_adam_on_the_divergence_from_its_teacher(
    server_folder: tuple[Path, torch.Tensor, torch.Tensor],
) -> None:
    folder, x, _ = server_folder
    teacher = torch.from_numpy(np.random.default_rng(2).normal(size=(40, 10)).astype(np.float32))
    moved = {name: np.full_like(value, 0.01) for name, value in fresh().items()}
    how = {"epochs": 4, "batch_size": 40, "lr": 0.01, "temperature": 2.0}
    request = {"work": "distil", "class": "", "how": how}
    blobs = arrays.encode(moved), arrays.encode({"logits": teacher.numpy()})
    delta = work(folder, request, *blobs)
    params = [torch.tensor(value + np.float32(0.01), requires_grad=True) for value in twin_params()]
    optimizer = torch.optim.Adam(params, 0.01)
    for _ in range(4):
        optimizer.zero_grad()
        soft, wanted = (
            torch.log_softmax(each / 2, -1) for each in (x.flatten(1) @ params[0].T + params[1], teacher)
        )
        loss = 4 * F.kl_div(soft, wanted, reduction="batchmean", log_target=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, each, before in zip(sorted(delta, reverse=True), params, twin_params(), strict=True):
        np.testing.assert_allclose(delta[name], each.detach().numpy() - before, atol=2e-5)


def twin_params() -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias."""
    weight, bias = sorted(fresh().values(), key=lambda value: -value.ndim)
    return weight.copy(), bias.copy()


# -- the rows of the server --


def prepare(folder: Path, server: dict[str, Any], **data: Any) -> dict[str, Any]:
    table = {"dataset": "digits", "path": None, "label": "label", "partition": "iid", "public_samples": 0}
    request = {"folder": str(folder), "seed": 1, "data": table | data, "clients": 3, "data_dir": None}
    return workspace.prepare({**request, "server": server})


def test_rows_of_the_server_are_of_no_client_and_of_no_test(tmp_path: Path) -> None:
    prepare(tmp_path / "work", {"dataset": None}, public_samples=60)
    load = {
        name: np.load(tmp_path / "work" / f"{name}.npy") for name in ("x", "public", "parts", "test_rows")
    }
    own = np.load(tmp_path / "work" / "server_x.npy")
    np.testing.assert_array_equal(own, load["x"][load["public"]])
    assert not set(load["public"]) & {*load["parts"], *load["test_rows"]}
    assert len(own) == 60


def npz(
    path: Path, rows: int = 30, shape: tuple[int, ...] = (8, 8), classes: int = 10, scale: float = 1
) -> str:
    rng = np.random.default_rng(0)
    np.savez(path, x=scale * rng.random((rows, *shape), np.float32), y=np.arange(rows) % classes)
    return str(path)


def test_another_data_set_gives_as_many_rows_as_are_asked_for(tmp_path: Path) -> None:
    server = {"dataset": "npz", "path": npz(tmp_path / "a.npz"), "samples": 12, "with_labels": True}
    drawn = [prepare(tmp_path / name, server)["server"] for name in ("one", "two")]
    assert drawn[0]["rows"] == 12 and drawn[0]["fingerprint"]
    one, two = (np.load(tmp_path / name / "server_x.npy") for name in ("one", "two"))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("made", "more", "message"),
    [
        ({"rows": 9}, {"samples": 12}, "server_data.samples = 12, but the data set has 9 rows"),
        ({"shape": (8, 9)}, {}, r"a row is float32 of shape \[8, 9\], and that of a client is .* \[8, 8\]"),
        ({"scale": 255}, {}, "its values are .* and those of the clients 0 to 1"),
        ({"classes": 12}, {}, "it has 12 classes, and the clients' data 10"),
    ],
)
def test_rows_unlike_the_clients_are_refused(
    tmp_path: Path, made: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    server = {"dataset": "npz", "samples": None, "with_labels": True, "path": npz(tmp_path / "a.npz", **made)}
    with pytest.raises(datasets.DataError, match=message):
        prepare(tmp_path / "work", server | more)


def test_labels_that_nobody_reads_may_be_others(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", classes=12)
    server = {"dataset": "npz", "samples": None, "with_labels": False, "path": path}
    assert prepare(tmp_path / "work", server)["server"]["rows"] == 30


def test_the_data_of_the_clients_under_another_name_are_refused(tmp_path: Path) -> None:
    rows = ["a,b,label", *(f"{i / 7:.3f},{i % 5},{i % 2}" for i in range(40))]
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("\n".join(rows), "utf-8")
    server = {"dataset": "csv", "path": str(tmp_path / "b.csv"), "samples": None, "with_labels": True}
    with pytest.raises(datasets.DataError, match="holds the rows of the clients and of the test"):
        prepare(tmp_path / "work", server, dataset="csv", path=str(tmp_path / "a.csv"))


# -- what is refused before a run --


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    result = document(FEDDF) | {"simulation": {}, "server_data": {}}
    for key, value in changes.items():
        table, _, inner = key.partition(".")
        result[table] = {**result[table], inner: value} if inner else value
    return result


KERAS = {"gateway": "cnn", "phone": "net.keras"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.public_samples": 0}, "data.public_samples = 0, but strategy.name = 'feddf' needs rows of the server"),
        ({"server_data": {"samples": 9}}, "server_data.samples = 9 is about another data set .* data.public_samples"),
        ({"server_data": {"dataset": "npz"}}, 'server_data.dataset = "npz" needs server_data.path'),
        ({"server_data": {"dataset": "digits"}}, "is the data of the clients; .* set data.public_samples"),
        ({"server_data": {"dataset": "digit"}}, "server_data.dataset: .*digits"),
        ({"server_data": {"dataset": "csv", "path": "a.csv"}}, "expected a table for both, or for neither"),
        ({"server_data": {"dataset": "mnist", "path": "a.npz"}}, "server_data.path = .* is for csv and npz"),
        ({"server_data": {"dataset": "mnist", "label": "y"}}, "server_data.label = 'y' is for csv"),
        ({"server_data": {"samples": 0}}, "server_data.samples = 0"),
        ({"strategy": {"name": "fedavg"}, "server_data": {"dataset": "mnist"}}, "server_data.dataset is for strategies"),
        ({"strategy.classes": {"a": "mlp", "b": "logreg"}}, "no class has the model of the run, model.name = 'cnn'"),
        ({"strategy.classes": {"a": "cnn", "b": "mpl"}}, "model 'mpl' of b is unknown.*mlp"),
        ({"strategy.classes": {"a": "cnn", "b": {"name": "mlp", "hiden": [3]}}}, "b has hiden .* for model 'mlp'"),
        ({"strategy.classes": {"a": "cnn", "b": {"hidden": [3]}}}, "expected a table of models"),
        ({"strategy.classes": {"a": "cnn", "b": "cnn"}}, "a and b train the same model"),
        ({"strategy.classes": KERAS}, "phone = 'net.keras' is a Keras model"),
        ({"strategy.classes": {"a": "cnn", "b": "resnet8"}, "federation.runtimes": {"tensorflow": 1.0}}, "'resnet8', the model of b in strategy.classes, runs in: litert, torch"),
        ({"strategy.shares": {"gateway": 1}}, "needs a share for each of strategy.classes: gateway, phone, watch"),
        ({"strategy": {"name": "feddf", "shares": {"a": 1}}}, "strategy.shares is about classes"),
        ({"strategy.memory_mib": {"gateway": 1}}, "needs the memory of each of strategy.classes"),
        ({"federation.clients": 2, "federation.clients_per_round": 2}, "3 classes, but federation.clients = 2"),
        ({"federation.keep": "best"}, 'federation.keep = "best" keeps the run\'s own model'),
        ({"federation.mode": "async"}, "federation.mode = 'async' does not go with strategy.name = 'feddf'"),
        ({"federation.relays": 2}, "federation.relays = 2: feddf makes its aggregate of single updates"),
        ({"uplink": {"code": "qsgd"}}, "uplink.code = 'qsgd' is for updates of one model"),
        ({"downlink": {"code": "eden"}}, "the server distils the model that clients train from"),
        ({"simulation.attack": {"name": "sign_flip", "clients": 2}}, "simulation.attack is for clients of one model"),
        ({"simulation.engine": "compiled"}, 'simulation.engine = "compiled" trains clients of one model'),
        ({"model.adapt": "head", "model.init": "a.safetensors"}, "model.adapt = 'head' freezes a backbone"),
        ({"data.task": "regression"}, 'data.task = "regression" does not go with'),
        ({"strategy": {"name": "fltrust"}, "federation.mode": "async"}, "does not go with strategy.name = 'fltrust'"),
        ({"strategy": {"name": "fltrust"}, "federation.relays": 2}, "fltrust makes its aggregate of single updates"),
        ({"strategy": {"name": "fltrust"}, "uplink": {"code": "topk"}}, "it compares single updates, and this code keeps too little"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_data_of_the_server_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        experiments.resolve(changed(changes), "experiment")


@pytest.mark.parametrize("strategy", [FEDDF, {"name": "feddf"}, {"name": "fltrust"}])
def test_devices_and_flower_refuse_a_server_that_trains(strategy: dict[str, Any]) -> None:
    given = changed({"strategy": strategy})
    with pytest.raises(
        UserError, match="works in simulations only: a coordinator of devices trains no model"
    ):
        experiments.resolve(given, "experiment", "devices")
    with pytest.raises(UserError, match="Flower's server trains no model in a round"):
        require_possible(experiments.resolve(given, "experiment"))
    with pytest.raises(UserError, match="trains a model on the server in each round"):
        FedloopStrategy(strategy["name"], {})


def test_every_key_of_the_servers_data_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('[server_data]\ndataset = "npz"\npath = "a.npz"\n', "utf-8")
    sets = ["strategy.name=feddf", 'strategy.classes={a = "cnn", b = {name = "mlp", hidden = [3]}}']
    resolved = experiments.load(tmp_path / "my.toml", sets)
    assert resolved.server_data.path == str(tmp_path / "a.npz")
    assert resolved.simulation.engine == "pool"
    (tmp_path / "again.toml").write_text(resolved.to_toml(), "utf-8")
    assert experiments.load(tmp_path / "again.toml") == resolved


def test_a_run_goes_on_only_with_the_same_rows_of_the_server(tmp_path: Path) -> None:
    began = {"experiment": "e", "data": "d", "server_data": "s"}
    checkpoint = Checkpoint(1, {}, State(), {}, {}, began)
    resumption.require_same(checkpoint, {}, began, tmp_path)
    with pytest.raises(UserError, match="the data of the server is not what the run began with"):
        resumption.require_same(checkpoint, {}, began | {"server_data": "other"}, tmp_path)


def test_jobs_check_what_the_servers_data_and_the_classes_name() -> None:
    given = changed({"server_data": {"dataset": "npz", "path": "/etc/a.npz"}})
    given["strategy"] = {"name": "feddf", "classes": {"a": "cnn", "b": "mine:build"}}
    checked = documents._simulation(given)
    assert ("server_data.path", "/etc/a.npz") in checked.files
    assert ("strategy.classes", "mine:build") in checked.code
    assert ("server_data.dataset", "npz") in checked.code


def test_the_command_says_what_a_strategy_needs() -> None:
    shown = run_here("strategies", "fltrust").stdout
    assert "for simulations only" in shown
    assert "needs rows of the server's own: data.public_samples, or the table [server_data]" in shown
    assert "bears any number of malicious updates" in shown
    assert json.loads(run_here("strategies", "feddf", "--json").stdout)["needs_server_data"] is True
