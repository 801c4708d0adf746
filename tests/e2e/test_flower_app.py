"""`fedloop simulate --flower-app`: apps written as Flower's quickstarts are run unmodified.

Their errors, and the processes that run them, are in the hands of the app: it may raise, kill its process, take our names or never
answer.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator import extras
from tests.support.cli import assert_refused, report_of, run_cli, run_here, started

APPS = Path(__file__).parents[1] / "support" / "flower_apps"
MLP, LINEAR = APPS / "mlp", APPS / "linear"

pytestmark = pytest.mark.slow


def run_app(app: Path, out: Path, run_config: str = "", clients: int = 6, workers: int = 2) -> dict[str, Any]:
    """The report of a run that must end well. What the app prints does not come between."""
    sets = ["--set", f"federation.clients={clients}", "--set", f"simulation.workers={workers}"]
    done = run_cli("simulate", "--flower-app", app, "--out", out, "--run-config", run_config, *sets, "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report == {"out": str(out), **report_of(out)}
    return report


def write_app(folder: Path, server: str, client: str, config: str = "") -> Path:
    """An app of two top-level modules."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "own"\nversion = "1"\n[tool.flwr.app]\npublisher = "us"\n[tool.flwr.app.components]\n'
        f'serverapp = "server:app"\nclientapp = "client:app"\n[tool.flwr.app.config]\n{config}\n'
    )
    (folder / "server.py").write_text(server)
    (folder / "client.py").write_text(client)
    return folder


# What an app gets


def test_a_torch_app_gives_the_weights_of_flowers_own_loop(tmp_path: Path) -> None:
    """The twin: Flower's FedAvg over a grid of functions in this process. They add the same ten float32 in another order."""
    run_config = f'fraction-train=1.0 num-server-rounds=2 out="{tmp_path}/w.npz"'
    report = run_app(MLP, tmp_path / "out", run_config, clients=10)
    assert report["messages"] == {"evaluate": {"sent": 10, "failed": 0}, "train": {"sent": 20, "failed": 0}}
    with np.load(tmp_path / "w.npz") as ours:
        for name, expected in mlp_twin(clients=10, rounds=2).items():
            np.testing.assert_allclose(ours[name], expected, rtol=2e-5, atol=1e-6)


@pytest.mark.extended
def test_a_torch_app_may_take_a_strategy_of_fedloop(tmp_path: Path) -> None:
    app = shutil.copytree(MLP, tmp_path / "app")
    server = app / "mlpapp" / "server_app.py"
    text = server.read_text("utf-8")
    text = text.replace("from flwr.serverapp.strategy import FedAvg\n", "import fedloop\n")
    server.write_text(text.replace("= FedAvg(", '= fedloop.flower_strategy("fedavg",'))
    run_app(
        app, tmp_path / "out", f'fraction-train=1.0 num-server-rounds=2 out="{tmp_path}/w.npz"', clients=10
    )
    with np.load(tmp_path / "w.npz") as ours:
        for name, expected in mlp_twin(clients=10, rounds=2).items():
            np.testing.assert_allclose(ours[name], expected, rtol=2e-5, atol=1e-6)


def mlp_twin(clients: int, rounds: int) -> dict[str, np.ndarray]:
    import torch
    from flwr.serverapp.strategy import FedAvg

    from tests.support.flower import Client, Tensors, params_after_each_round

    sys.path.insert(0, str(MLP))
    try:
        from mlpapp import task
    finally:
        sys.path.remove(str(MLP))

    def client(partition: int) -> Client:
        def train(server_round: int, received: Tensors) -> tuple[Tensors, int]:
            net = task.Net()
            net.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in received.items()})
            task.train(net, task.load_data(partition, 20, "mlp"), epochs=1, lr=0.05)
            return {name: value.numpy() for name, value in net.state_dict().items()}, task.SAMPLES

        return train

    torch.manual_seed(0)
    initial = {name: value.numpy().copy() for name, value in task.Net().state_dict().items()}
    everybody = [client(partition) for partition in range(clients)]
    return params_after_each_round(FedAvg(fraction_evaluate=0.0), initial, everybody, rounds)[-1]


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the linear app writes, with two workers. Its own modules are called `models`, `strategies`, `coordinator` and `edge_client`."""
    folder = tmp_path_factory.mktemp("linear")
    run_app(LINEAR, folder / "out", f'out="{folder}/app.json"')
    document: dict[str, Any] = json.loads((folder / "app.json").read_text())
    return document


def test_a_client_keeps_its_state_whichever_worker_it_meets(linear: dict[str, Any]) -> None:
    assert [each["before"] for each in linear["rounds"]] == [[0] * 6, [1] * 6, [2] * 6]
    assert len({worker for each in linear["rounds"] for worker in each["workers"]}) == 2


def test_the_number_of_workers_changes_no_bit(linear: dict[str, Any], tmp_path: Path) -> None:
    run_app(LINEAR, tmp_path / "out", f'out="{tmp_path}/app.json"', workers=1)
    assert json.loads((tmp_path / "app.json").read_text())["w"] == linear["w"]


def test_the_run_configuration_changes_what_the_app_computes(linear: dict[str, Any], tmp_path: Path) -> None:
    run_config = f'out="{tmp_path}/app.json" num-server-rounds=1 model.features=3'
    assert run_app(LINEAR, tmp_path / "out", run_config)["run_config"]["model.features"] == 3
    written = json.loads((tmp_path / "app.json").read_text())
    assert (len(written["w"]), len(written["rounds"])) == (3, 1)


def test_a_failing_client_is_an_error_reply_and_the_round_goes_on(tmp_path: Path) -> None:
    """Partition 1 raises, 2 kills its worker every time, 3 once; the rest keeps its state."""
    run_config = f'out="{tmp_path}/app.json" faults="raise:1 die:2 die-once:3" num-server-rounds=2'
    report = run_app(LINEAR, tmp_path / "out", run_config)
    assert report["messages"] == {"train": {"sent": 12, "failed": 4}}
    assert {(each["partition_id"], each["code"], each["reason"]) for each in report["failures"]} == {
        (1, 2, "ValueError: partition 1 has no data (client_app.py, line 36)"),
        (2, 0, "the worker process of this client ended by SIGKILL, twice"),
    }
    written = json.loads((tmp_path / "app.json").read_text())
    assert [each["before"] for each in written["rounds"]] == [[0] * 4, [1] * 4]


# The grid, as an app sees it

_GRID_SERVER = """
import json, os
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

def say(grid, node, text, kind="query", **options):
    return Message(RecordDict({"c": ConfigRecord({"text": text})}), node, kind, **options)

@app.main()
def main(grid, context):
    fifo, seen = context.run_config["fifo"], {}
    nodes = list(grid.get_node_ids())
    first, second = nodes[:2]
    seen["nodes"] = len(nodes), len(list(grid.get_nodes())), len(set(nodes))

    ids = list(grid.push_messages([say(grid, first, "a"), say(grid, 12345, "nobody"), say(grid, second, "b")]))
    replies = []
    while left := set(ids) - {each.metadata.reply_to_message_id for each in replies}:
        replies += grid.pull_messages(left)
    seen["pushed"] = len(ids), sorted(each.content["c"]["text"] for each in replies)
    seen["answered"] = sorted(each.metadata.reply_to_message_id for each in replies) == sorted(ids)
    seen["pulled again"] = [(each.error.code, each.metadata.reply_to_message_id in ids) for each in grid.pull_messages(ids)]

    twice = [say(grid, first, "1"), say(grid, first, "2"), say(grid, second, "3")]
    seen["in order"] = [each.content["c"]["history"] for each in grid.send_and_receive(twice)]

    seen["late"] = len(list(grid.send_and_receive([say(grid, first, "wait", "train.slow")], timeout=0.05)))
    expired = list(grid.send_and_receive([say(grid, first, "behind it", ttl=0.05)]))
    seen["expired"] = [(each.error.code, each.metadata.src_node_id == first) for each in expired]
    with open(fifo, "w"):
        pass

    kinds = [("train", "x"), ("query.none", "x"), ("evaluate", "mine"), ("query", "not a reply"), ("query", "config"), ("query", "exit")]
    errors = grid.send_and_receive([say(grid, second, text, kind) for kind, text in kinds])
    seen["errors"] = [(each.error.code, each.error.reason) for each in errors]
    seen["history"] = [each.content["c"]["history"] for each in grid.send_and_receive([say(grid, second, "end")])]
    made = grid.create_message(RecordDict({"c": ConfigRecord({"text": "made"})}), "query", first, "7", ttl=60.0)
    (reply,) = grid.send_and_receive([made])
    seen["made"] = reply.content["c"]["text"], reply.metadata.group_id, reply.metadata.run_id == grid.run.run_id == context.run_id
    try:
        grid.push_messages([reply])
    except ValueError as error:
        seen["a reply"] = str(error)[:15]
    Path(context.run_config["out"]).write_text(json.dumps(seen))
"""

_GRID_CLIENT = """
import sys
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(message, context):
    text = message.content["c"]["text"]
    if text == "exit":
        sys.exit(3)
    if text == "config":
        context.run_config["fifo"] = "another"
    history = [*context.state["h"]["texts"], text] if "h" in context.state else [text]
    context.state["h"] = ConfigRecord({"texts": history})
    content = RecordDict({"c": ConfigRecord({"text": text, "history": history})})
    return Message(content, message.metadata.src_node_id, "query") if text == "not a reply" else Message(content, reply_to=message)

@app.train("slow")
def slow(message, context):
    with open(context.run_config["fifo"]) as fifo:
        fifo.read()
    return Message(message.content, reply_to=message)

@app.evaluate()
def evaluate(message, context):
    return {"mine": 1}
"""


def test_the_grid_answers_as_flowers_does(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    app = write_app(tmp_path / "app", _GRID_SERVER, _GRID_CLIENT, 'fifo = ""\nout = ""')
    run_app(app, tmp_path / "out", f'fifo="{tmp_path}/fifo" out="{tmp_path}/seen.json"', clients=4)
    seen = json.loads((tmp_path / "seen.json").read_text())
    history = seen.pop("history")
    codes, reasons = zip(*seen.pop("errors"), strict=True)
    assert seen == {
        "nodes": [4, 4, 4],
        "pushed": [2, ["a", "b"]],
        "answered": True,
        "pulled again": [[3, True], [3, True]],
        "in order": [["a", "1"], ["a", "1", "2"], ["b", "3"]],
        "late": 0,
        "expired": [[3, True]],
        "made": ["made", "7", True],
        "a reply": "Invalid message",
    }
    assert codes == (2, 2, 2, 2, 0, 0)
    assert history == [["b", "3", "end"]]  # a call that failed leaves no state
    for reason, expected in zip(
        reasons, ["No train function", "No query function", "returned a dict", "is no reply", "read-only", "SystemExit: 3"],
        strict=True,
    ):  # fmt: skip
        assert expected in reason


_LEGACY_SERVER = """
import json
import shutil
from pathlib import Path
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp
from flwr.common import parameters_to_ndarrays

class Keeping(FedAvg):
    def aggregate_fit(self, server_round, results, failures):
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        Path(self.out).write_text(json.dumps([len(results), len(failures), parameters_to_ndarrays(parameters)[0].tolist()]))
        return parameters, metrics

def server_fn(context):
    strategy = Keeping(min_available_clients=4)
    strategy.out = context.run_config["out"]
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))

app = ServerApp(server_fn=server_fn)
"""

_LEGACY_CLIENT = """
import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

class Client(NumPyClient):
    def __init__(self, partition):
        self.partition = partition

    def get_parameters(self, config):
        return [np.zeros(3)]

    def fit(self, parameters, config):
        if self.partition == 3:
            raise ValueError("no")
        return [parameters[0] + self.partition], 10, {}

    def evaluate(self, parameters, config):
        return 0.5, 10, {"accuracy": 0.5}

def client_fn(context):
    return Client(context.node_config["partition-id"]).to_client()

app = ClientApp(client_fn=client_fn)
"""


def test_an_app_of_server_fn_and_client_fn_runs(tmp_path: Path) -> None:
    """Flower sends its messages from a thread per client. Three of four clients train: the mean of 0, 1 and 2, twice."""
    app = write_app(tmp_path / "app", _LEGACY_SERVER, _LEGACY_CLIENT, 'out = ""')
    run_app(app, tmp_path / "out", f'out="{tmp_path}/w.json"', clients=4)
    trained, failed, weights = json.loads((tmp_path / "w.json").read_text())
    assert (trained, failed) == (3, 1)
    assert weights == pytest.approx([2.0] * 3)  # Flower adds in the order in which its threads end


# How a run ends


@pytest.mark.parametrize(
    ("server", "client", "message"),
    [
        ("import nothing_of_this_name", "", "ModuleNotFoundError: No module named 'nothing_of_this_name' (server.py, line 1)"),
        ("app = 5", _LEGACY_CLIENT, "serverapp = 'server:app': expected a ServerApp, found a int"),
        (_LEGACY_SERVER, "", "clientapp = 'client:app': client has no 'app'"),
        (_LEGACY_SERVER, "import os; os._exit(9)", "clientapp: the process that loads it ended with status 9"),
    ],
    ids=["import", "type", "attribute", "exit"],
)  # fmt: skip
def test_an_app_that_cannot_be_loaded_is_refused(
    tmp_path: Path, server: str, client: str, message: str
) -> None:
    app = write_app(tmp_path / "app", server, client)
    done = run_cli("simulate", "--flower-app", app, "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{app}/pyproject.toml: tool.flwr.app.components." in done.stderr.splitlines()[-1]
    assert done.stderr.endswith(f"{message}\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero (server.py, line 6)"),
        ("import os; os.kill(os.getpid(), 9)", "its process was ended by SIGKILL"),
    ],
    ids=["raises", "is killed"],
)
def test_a_failing_server_is_reported(tmp_path: Path, body: str, problem: str) -> None:
    server = f"from flwr.serverapp import ServerApp\napp = ServerApp()\n@app.main()\ndef main(grid, context):\n    print('begun', flush=True)\n    {body}\n"
    app = write_app(tmp_path / "app", server, _LEGACY_CLIENT)
    done = run_cli("simulate", "--flower-app", app, "--out", tmp_path / "out", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "begun" in done.stderr
    assert f"ServerApp of own ended early: {problem}; report in" in done.stderr
    assert report_of(tmp_path / "out")["state"] == "failed"


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """An app whose server waits for ever once all clients have answered, and the file that it writes then."""
    server = (
        "import os, signal\nfrom flwr.app import Message, RecordDict\nfrom flwr.serverapp import ServerApp\napp = ServerApp()\n"
        "@app.main()\ndef main(grid, context):\n"
        "    list(grid.send_and_receive([Message(RecordDict(), node, 'query') for node in grid.get_node_ids()]))\n"
        "    open(context.run_config['ready'], 'w').close()\n    signal.pause()\n"
    )
    client = (
        "from flwr.app import Message\nfrom flwr.clientapp import ClientApp\napp = ClientApp()\n"
        "@app.query()\ndef query(message, context):\n    return Message(message.content, reply_to=message)\n"
    )
    ready = tmp_path / "ready"
    yield write_app(tmp_path / "app", server, client, f'ready = "{ready}"'), ready


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_command_is_stopped(
    endless: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    app, ready = endless
    with started("simulate", "--flower-app", app, "--out", tmp_path / "out") as run:
        assert run.reaches(ready.exists), run.errors()
        assert len(run.alive()) == 3 + len(os.sched_getaffinity(0))
        run.send(number) if number == signal.SIGKILL else run.send_group(number)
        run.ended()
        assert run.all_gone()


# What is refused before anything starts


def test_options_of_an_experiment_are_refused(tmp_path: Path) -> None:
    assert_refused(run_here("simulate", "my.toml", "--flower-app", LINEAR), "omit EXPERIMENT")
    done = run_here("simulate", "--flower-app", LINEAR, "--data-dir", tmp_path, "--mlflow", "x")
    assert_refused(done, "omit --data-dir and --mlflow")
    assert_refused(run_here("simulate", "--run-config", "lr=1"), "--flower-app")
    environment = {"FEDLOOP_DATA_DIR": str(tmp_path)}
    done = run_here("simulate", "--flower-app", LINEAR, "--set", "local.lr=1", env=environment)
    assert_refused(done, "--set local.lr", "federation.clients", "--run-config")
    assert_refused(run_here("simulate", "--flower-app", LINEAR, "--set", "federation.clients=0"), "from 1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert_refused(run_here("simulate", "--flower-app", LINEAR, "--out", tmp_path / "full"), "not empty")


@pytest.mark.parametrize(
    ("version", "found"), [(None, "is not installed"), ("1.20.0", "flwr 1.20.0 is installed")]
)
def test_another_flower_or_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None, found: str
) -> None:
    monkeypatch.setattr(extras, "installed_version", lambda distribution: version)
    done = run_here("simulate", "--flower-app", LINEAR, "--out", tmp_path / "out")
    assert_refused(done, found, "pip install 'fedloop[flower]'")
