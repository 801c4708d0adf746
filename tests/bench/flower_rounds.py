"""Rounds of Flower 1.41's SuperLink and SuperNodes on loopback, with clients that send back what they got.

The peer of `tests.bench.rounds`: real processes, no encryption, a strategy that does nothing but average.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_BIN = Path(sys.executable).parent
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
_TENSORS = 10

_PYPROJECT = """
[project]
name = "noop"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "noop.server:app"
clientapp = "noop.client:app"
[tool.flwr.app.config]
values = 0
rounds = 0
out = ""
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
"""

_CLIENT = """
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content=content, reply_to=message)
"""

_SERVER = f"""
import json, time
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    values, rounds = int(context.run_config["values"]), int(context.run_config["rounds"])
    arrays = ArrayRecord({{f"w{{i}}": Array(np.zeros(values // {_TENSORS}, np.float32)) for i in range({_TENSORS})}})
    marks = [time.monotonic()]

    class Timed(FedAvg):
        def aggregate_train(self, number, replies):
            averaged = super().aggregate_train(number, replies)
            marks.append(time.monotonic())
            return averaged

    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds)
    with open(context.run_config["out"], "w") as file:
        json.dump([later - before for before, later in zip(marks, marks[1:])], file)
"""


@contextmanager
def federation(folder: Path, clients: int = 2) -> Iterator[Path]:
    """A SuperLink and its SuperNodes, up for as long as the context; gives the folder of the app."""
    _write(folder)
    link_port, *node_ports = _free_ports(1 + clients)
    config = f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "127.0.0.1:{link_port}"\ninsecure = true\n'
    (folder / "home" / "config.toml").write_text(config)
    link = f"flower-superlink --insecure --host 127.0.0.1 --port {link_port} --disable-runtime-dependency-installation"
    node = f"flower-supernode --insecure --superlink 127.0.0.1:{link_port} --host 127.0.0.1 --port"
    started: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "flower.log").open("wb") as log:
            for command in (link, *(f"{node} {port}" for port in node_ports)):
                started.append(_start(command.split(), folder, log.fileno()))
                _listening(link_port, folder / "flower.log")
        yield folder / "app"
    finally:
        _end(started)


def seconds_per_round(app: Path, values: int, rounds: int) -> list[float]:
    """How long each of `rounds` took, for a model of `values` float32 numbers in ten tensors."""
    out = app.parent / "rounds.json"
    out.unlink(missing_ok=True)
    settings = f'values={values} rounds={rounds} out="{out}"'
    done = subprocess.run(
        [_BIN / "flwr", "run", app, "local", "--stream", "--run-config", settings],
        env=_environment(app.parent),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    if not out.exists():
        raise RuntimeError(f"Flower did not finish:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    measured: list[float] = json.loads(out.read_text())
    return measured


def _write(folder: Path) -> None:
    package = folder / "app" / "noop"
    package.mkdir(parents=True)
    (folder / "home").mkdir()
    (folder / "app" / "pyproject.toml").write_text(_PYPROJECT)
    for name, text in (("__init__", ""), ("client", _CLIENT), ("server", _SERVER)):
        (package / f"{name}.py").write_text(text)


def _start(command: list[str], folder: Path, log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [_BIN / command[0], *command[1:]],
        env=_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """Kills all, and what they started in sessions of its own."""
    tree = [each for process in started for each in psutil.Process(process.pid).children(recursive=True)]
    for process in started:
        process.kill()
    for each in tree:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    for process in started:
        process.wait()


def _environment(folder: Path) -> dict[str, str]:
    # Its own commands start others by name.
    path = f"{_BIN}:{os.environ['PATH']}"
    return {**os.environ, **_QUIET, "FLWR_HOME": str(folder / "home"), "PATH": path}


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _listening(port: int, log: Path) -> None:
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"Flower's SuperLink does not listen:\n{log.read_text()[-3000:]}")
