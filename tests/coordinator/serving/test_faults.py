"""What a server of models survives: SIGKILLs of workers, of the coordinator and of itself, moved aliases, bad versions."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.operator import version_files
from coordinator.operator.client import connect
from edge_client.infer.runtime import load
from tests.coordinator.registry.test_commands import served
from tests.support import serving_load as loads
from tests.support.released import digits, release_folder
from tests.support.serving import Background, Server, logits_of, rows, serving, torch_model

pytestmark = pytest.mark.slow

CONNECTIONS = 8


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_model(tmp_path_factory.mktemp("models") / "mlp")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serving") / "home") as running:
        yield running


def until_set(event: threading.Event) -> bool:
    return event.is_set()


def under_load(
    server: Server, requests: list[bytes], stop: threading.Event, *, keeps: bool = False
) -> Background:
    return Background(
        lambda: asyncio.run(
            loads.closed_loop(server.port, requests, CONNECTIONS, until=stop.is_set, keeps=keeps)
        )
    )


def test_killed_workers_lose_no_request(server: Server, mlp: Path) -> None:
    server.deployed("killed", mlp, workers={"min": 2, "max": 2})
    x = rows(1)
    expected = logits_of(server.infer("killed", x)[1])
    stop = threading.Event()
    load = under_load(server, [loads.json_request("/v2/models/killed/infer", x)], stop, keeps=True)
    for count in range(1, 21):
        until = time.monotonic() + 60
        while (now := server.status("killed"))["workers"] < 2 and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(now["pids"][count % 2], signal.SIGKILL)
        while server.status("killed")["worker_restarts"] < count and time.monotonic() < until:
            time.sleep(0.005)
    stop.set()
    found = load.result()
    assert found.failed == 0
    assert server.status("killed")["worker_restarts"] == 20
    assert len(found.bodies) > 100
    for _, body in found.bodies:
        assert np.allclose(logits_of(json.loads(body)), expected, atol=1e-6)


def test_killed_front_serves_the_same_again(tmp_path: Path, mlp: Path) -> None:
    home = tmp_path / "home"
    x = rows(3)
    with serving(home) as first:
        first.deployed("digits", mlp, slo_ms=500, workers={"min": 0, "max": 2})
        answer = first.infer("digits", x)[1]
        workers = first.status("digits")["pids"]
        first.process.kill()
        first.process.wait()
        until = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    with serving(home) as second:
        assert second.infer("digits", x) == (200, answer)
        status = second.status("digits")
        assert (status["slo_ms"], status["min_workers"], status["max_workers"]) == (500, 0, 2)


def test_alias_that_moves_under_load(tmp_path: Path) -> None:
    """Twenty moves between two versions, one of a version that fails its golden rows, and a coordinator that is killed."""
    home = tmp_path / "coordinator"
    x = digits()[0][:1]
    folders = [
        release_folder(tmp_path / f"r{number}", number, kind)
        for number, kind in ((1, "first"), (2, "second"))
    ]
    answers = {str(number): load(folder).predict(x) for number, folder in enumerate(folders, 1)}
    golden = json.loads((folders[0] / "manifest.json").read_text())
    golden["golden"]["logits"][0][0] += 1.0
    golden["version"] = 3
    bad = release_folder(tmp_path / "r3", 3)
    (bad / "manifest.json").write_text(json.dumps(golden))
    with served(home) as process, serving(tmp_path / "home", "--follow-seconds", "0.1") as server:
        client = connect()
        for folder in (*folders, bad):
            version_files.add(client, "digits", *version_files.gather(folder))
        client.put("/models/digits/aliases/champion", {"version": 1})
        server.deployed("digits", "digits@champion")
        stop = threading.Event()
        request = loads.json_request("/v2/models/digits/versions/champion/infer", x)
        load_ = under_load(server, [request], stop, keeps=True)
        for move in range(20):
            wanted = 2 - move % 2
            client.put("/models/digits/aliases/champion", {"version": wanted})
            wait_for_version(server, str(wanted))
        client.put("/models/digits/aliases/champion", {"version": 3})
        until = time.monotonic() + 30
        while not (reason := server.status("digits")["reason"]) and time.monotonic() < until:
            time.sleep(0.05)
        assert "logits of row 0" in reason and "version 1 stays" in reason
        process.kill()
        process.wait()
        time.sleep(1)
        assert server.infer("digits", x)[0] == 200
        stop.set()
        found = load_.result()
    assert found.failed == 0
    versions = set()
    for _, body in found.bodies:
        answer = json.loads(body)
        versions.add(answer["model_version"])
        assert np.array_equal(logits_of(answer), answers[answer["model_version"]])
    assert versions == {"1", "2"}
    with serving(tmp_path / "home", "--coordinator", "http://127.0.0.1:9") as again:
        assert again.infer("digits", x)[1]["model_version"] == "1"


def wait_for_version(server: Server, number: str) -> None:
    until = time.monotonic() + 60
    while server.status("digits")["version"] != number:
        assert time.monotonic() < until, server.status("digits")
        time.sleep(0.02)
