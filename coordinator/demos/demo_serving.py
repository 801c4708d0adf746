"""`fedloop demo-serving`: a model is served while a better one is trained, compared beside it, and put in its place under load.

    1. pretrain   a model of digits on a small public part of the data; it becomes digits@champion
    2. serve      it, with requests from 8 connections from then on until the end
    3. federate   devices train it on rows that never leave them; the result is registered as digits@candidate
    4. shadow     the candidate gets the same rows, and its answers are compared
    5. promote    digits@champion means the candidate; requests go on

Prints every command. `demo-serving.json` holds the result.
"""

from __future__ import annotations

import asyncio
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tomlkit

from coordinator.datacenter.documents import read_document, write_document
from coordinator.demos.demo_fleet import NAME, PUBLIC_SAMPLES, SEED, SITES, device_config, site_data
from coordinator.demos.fedloop_commands import BIN, FedloopCommands
from coordinator.demos.local_fleet import Daemon, LocalFleet, free_address, local_fleet
from coordinator.errors import RunInterrupted
from coordinator.output_folders import require_new
from coordinator.reports.progress import Progress
from coordinator.serving.measuring.load import Load, closed_loop, json_request
from coordinator.serving.paths import ADDRESS_FILE
from edge_client.files import write_durably
from models import datasets

CHAMPION, CANDIDATE = f"{NAME}@champion", f"{NAME}@candidate"
CONNECTIONS = 8
_SHADOWED_ROWS = 1000
_WAIT_SECONDS = 120.0
_EXPERIMENT: dict[str, Any] = {
    "name": "demo-serving",
    "seed": SEED,
    "data": {"dataset": NAME},
    "model": {"name": "cnn", "init": CHAMPION, "register": CANDIDATE},
    "federation": {"clients": len(SITES), "rounds": 8, "runtimes": {"litert": 1.0}},
    "local": {"epochs": 3, "batch_size": 16, "lr": 0.05},
}


def demo_serving(
    out: Path, progress: Progress, show: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Runs the demo into the new or empty folder `out`; returns the contents of `demo-serving.json`. Calls `show` with every command.

    Raises:
        UserError: `out` is not empty.
        RunInterrupted: a command or a process failed; the message says which, and why.
    """
    require_new(out)
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with local_fleet(out / "fleet") as fleet:
        for name, share in zip(SITES, site_data(), strict=True):
            fleet.add(name, device_config("litert"), share).start()
        fedloop = FedloopCommands(fleet, out, show)
        progress.stage(f"1/5 pretraining on {PUBLIC_SAMPLES} public rows")
        rows = f"data.public_samples={PUBLIC_SAMPLES}"
        fedloop(
            *(
                "pretrain",
                "--set",
                "model.name=cnn",
                "--set",
                rows,
                "--set",
                "train.epochs=40",
                "--out",
                "teacher",
            )
        )
        fedloop("model", "add", "teacher", "--name", NAME)
        fedloop("model", "alias", f"{NAME}:1", "champion")
        progress.stage(f"2/5 serving {CHAMPION} to {CONNECTIONS} connections")
        with _server(fleet, out, show) as home:
            fedloop("serving", "deploy", NAME, CHAMPION, "--slo-ms", "1000", "--home", home)
            with _load(home) as load:
                document = _replace(fedloop, home, progress)
            document |= {"requests": len(load.seconds) + load.failed, "failed": load.failed}
            document["median_ms"] = round(1000 * float(np.median(load.seconds)), 2)
        document["stopped"] = fleet.stop()
    path = out / "demo-serving.json"
    document["report"] = str(path)
    write_document(path, document)
    return document


def _replace(fedloop: FedloopCommands, home: Path, progress: Progress) -> dict[str, Any]:
    """Trains the candidate, compares it and puts it in the champion's place."""
    progress.stage("3/5 training on the devices")
    write_durably(fedloop.folder / "experiment.toml", tomlkit.dumps(_EXPERIMENT).encode())
    fedloop("run", "experiment.toml", "--out", "federated")
    progress.stage("4/5 comparing the candidate with the champion on the same rows")
    fedloop(*("serving", "deploy", NAME, CHAMPION, "--slo-ms", "1000", "--shadow", CANDIDATE, "--home", home))
    shadowed = _wait(fedloop, home, lambda each: each["shadow"].get("rows", 0) >= _SHADOWED_ROWS)
    progress.stage("5/5 promoting the candidate, under load")
    candidate = fedloop.json("model", "show", CANDIDATE)
    fedloop("model", "alias", f"{NAME}:{candidate['number']}", "champion")
    promoted = _wait(fedloop, home, lambda each: each["version"] == str(candidate["number"]))
    accuracy = {
        "champion": read_document(fedloop.folder / "teacher" / "report.json")["final"]["test_accuracy"],
        "candidate": read_document(fedloop.folder / "federated" / "report.json")["final"]["test_accuracy"],
    }
    return {
        "champion": shadowed["version"],
        "candidate": promoted["version"],
        "accuracy": accuracy,
        "agreement": shadowed["shadow"]["agreement"],
        "shadowed_rows": shadowed["shadow"]["rows"],
    }


def _wait(fedloop: FedloopCommands, home: Path, holds: Callable[[Any], bool]) -> dict[str, Any]:
    """The status of the deployment once this holds of it."""
    until = time.monotonic() + _WAIT_SECONDS
    while True:
        (status,) = fedloop.json("serving", "status", "--home", home)["deployments"]
        if holds(status):
            found: dict[str, Any] = status
            return found
        if time.monotonic() > until:
            raise RunInterrupted(f"the deployment does not get on: {status['reason'] or status}")
        time.sleep(0.5)


@contextmanager
def _server(fleet: LocalFleet, out: Path, show: Callable[[str], None]) -> Iterator[Path]:
    """`fedloop serving start`; its home."""
    home = out / "serving"
    command = ["serving", "start", "--home", str(home), "--listen", free_address()]
    show(shlex.join(["fedloop", *command]))
    environment = {"FEDLOOP_HOME": str(fleet.home), "FEDLOOP_COORDINATOR": fleet.operator_url}
    server = Daemon([str(BIN / "fedloop"), *command], out / "serving.log", environment)
    server.start()
    try:
        until = time.monotonic() + _WAIT_SECONDS
        while not (home / ADDRESS_FILE).exists():
            if not server.is_running() or time.monotonic() > until:
                raise RunInterrupted(f"the server does not start: {server.tail()}")
            time.sleep(0.1)
        yield home
    finally:
        server.stop()


@contextmanager
def _load(home: Path) -> Iterator[Load]:
    """Requests of one row each, until the block ends."""
    port = int(str(read_document(home / ADDRESS_FILE)["url"]).rpartition(":")[2])
    dataset = datasets.load(NAME, seed=SEED)
    x = dataset.x[dataset.test]
    path = f"/v2/models/{NAME}/infer"
    requests = [json_request(path, x[at : at + 1]) for at in range(len(x))]
    ended, load = threading.Event(), Load()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            lambda: asyncio.run(closed_loop(port, requests, CONNECTIONS, until=ended.is_set))
        )
        try:
            yield load
        finally:
            ended.set()
            vars(load).update(vars(running.result()))
