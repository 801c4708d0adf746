"""Workers under requests that end, hang or fail them; workers that come and go with the load; files that were replaced."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from coordinator.serving.resources.processes import cpu_seconds
from models import zoo
from tests.support import serving_load as loads
from tests.support.hostile_model import FAILS, HANGS, KILLS
from tests.support.long import extended
from tests.support.released import release_folder
from tests.support.serving import Background, Server, logits_of, rows, serving, torch_model

pytestmark = pytest.mark.slow

OWN = "tests.support.hostile_model:build"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serving")
    with serving(folder / "home", "--allow-code", OWN, PYTHONPATH=str(Path.cwd())) as running:
        running.deployed("own", torch_model(folder / "own", OWN), slo_ms=60_000)
        yield running


def wait_until(is_true: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.02)


def with_first(number: float) -> npt.NDArray[np.float32]:
    x = rows(1)
    x[0, 0, 0] = number
    return x


def test_a_request_that_ends_its_worker_is_refused_and_its_company_answered(server: Server) -> None:
    good = rows(1)
    expected = logits_of(server.infer("own", good)[1])
    before = server.status("own")["worker_restarts"]
    company = [Background(lambda: server.infer("own", good)) for _ in range(6)]
    status, error = server.infer("own", with_first(KILLS))
    assert (status, error["code"]) == (500, "worker_died")
    for each in company:
        answered, answer = each.result()
        assert answered == 200
        assert np.allclose(logits_of(answer), expected, atol=1e-5)
    assert server.status("own")["worker_restarts"] == before + 2


def test_a_worker_that_hangs_is_ended(server: Server) -> None:
    before = server.status("own")["worker_restarts"]
    hanging = Background(lambda: server.infer("own", with_first(HANGS)))
    time.sleep(0.2)
    assert server.infer("own", rows(1))[0] == 200  # waits for the worker that follows
    status, error = hanging.result()
    assert (status, error["code"]) == (500, "worker_died")
    assert server.status("own")["worker_restarts"] == before + 2


def test_a_batch_that_fails_is_tried_singly(server: Server) -> None:
    before = server.status("own")["worker_restarts"]
    company = [Background(lambda: server.infer("own", rows(1))) for _ in range(6)]
    status, error = server.infer("own", with_first(FAILS))
    assert (status, error["code"]) == (500, "model_failed")
    assert "these rows are too hard" in error["error"]
    assert [each.result()[0] for each in company] == [200] * 6
    assert server.status("own")["worker_restarts"] == before


def test_code_of_ones_own_needs_leave(tmp_path: Path) -> None:
    with serving(tmp_path / "home", PYTHONPATH=str(Path.cwd())) as other:
        status, error = other.deploy("own", torch_model(tmp_path / "own", OWN))
        assert status == 400
        assert f"--allow-code {OWN}" in error["error"]


def test_workers_come_with_the_load_and_go_without(server: Server, tmp_path: Path) -> None:
    """0 -> 4 -> 0, no request failed; a deployment without traffic starts none."""
    model = torch_model(tmp_path / "r", "resnet8", input_shape=[28, 28])
    settings = {"slo_ms": 400, "max_batch": 4, "idle_seconds": 0.5, "workers": {"min": 0, "max": 4}}
    server.deployed("elastic", model, **settings)
    server.deployed("quiet", model, **settings)
    wait_until(lambda: server.status("elastic")["workers"] == 0)
    stop = threading.Event()
    request = loads.json_request("/v2/models/elastic/infer", rows(4, (28, 28)), timeout=60_000_000)
    load = Background(lambda: asyncio.run(loads.closed_loop(server.port, [request], 64, until=stop.is_set)))
    try:
        wait_until(lambda: server.status("elastic")["workers"] == 4)
    finally:
        stop.set()
    found = load.result()
    assert found.failed == 0
    assert found.seconds
    wait_until(lambda: server.status("elastic")["workers"] == 0)
    assert server.status("quiet")["workers"] == 0
    status, _ = server.infer("elastic", rows(1, (28, 28)))  # held until a worker has started
    assert status == 200
    now = server.status("elastic")
    assert now["opened_in_seconds"] > 0
    assert sum(map(cpu_seconds, now["pids"])) < 0.5, "forked workers import nothing"


def test_a_full_queue_refuses_and_says_when_to_come_back(server: Server, tmp_path: Path) -> None:
    model = torch_model(tmp_path / "r", "resnet8", input_shape=[28, 28])
    server.deployed("full", model, max_batch=4, max_queue=8, slo_ms=60_000)
    request = loads.json_request("/v2/models/full/infer", rows(4, (28, 28)))
    found = asyncio.run(loads.closed_loop(server.port, [request], 32, total=200))
    assert set(found.statuses) == {200, 429}
    assert found.lost == 0


def test_replaced_files_are_not_served(server: Server, tmp_path: Path) -> None:
    release = release_folder(tmp_path / "release", 1)
    other = release_folder(tmp_path / "other", 1, "second")
    server.deployed("release", release)
    before = server.infer("release", rows(1, (64,)))
    shutil.copy(other / "model.tflite", release / "model.tflite")
    status, error = server.deploy("release", release)
    assert status == 400
    assert "model.tflite" in error["error"]
    assert server.infer("release", rows(1, (64,))) == before


def test_a_full_disk_leaves_what_is_served(tmp_path: Path) -> None:
    """The list of deployments cannot be written: the change is refused, and what was there answers."""
    home = tmp_path / "home"
    model = torch_model(tmp_path / "mlp")
    with serving(home) as server:
        server.deployed("digits", model)
        kept = (home / "deployments.json").read_text()
        (home / "deployments.json").unlink()
        (home / "deployments.json").mkdir()  # as good as a full disk, for root too
        status, error = server.deploy("more", model)
        assert (status, error["code"]) == (507, "disk_full")
        assert server.infer("digits", rows(1))[0] == 200
        (home / "deployments.json").rmdir()
        (home / "deployments.json").write_text(kept)
        server.deployed("more", model)
        assert set(json.loads((home / "deployments.json").read_text())["deployment"]) == {"digits", "more"}


@pytest.mark.parametrize("backend", ["torch", "channels_last", "onnx", *extended("compiled")])
def test_every_backend_answers_the_same(server: Server, tmp_path: Path, backend: str) -> None:
    model = torch_model(tmp_path / "r", "resnet8", input_shape=[28, 28])
    x = rows(5, (28, 28))
    expected = load_torch(model, x)
    status = server.deployed("backend", model, backend=backend, max_batch=8, slo_ms=60_000)
    assert status["backend"] == backend
    assert np.allclose(logits_of(server.infer("backend", x)[1]), expected, atol=1e-4)


def test_dtypes_and_devices(server: Server, tmp_path: Path) -> None:
    model = torch_model(tmp_path / "mlp")
    x = rows(3)
    expected = load_torch(model, x)
    server.deployed("half", model, dtype="bfloat16")
    found = logits_of(server.infer("half", x)[1])
    assert np.allclose(found, expected, atol=0.05) and not np.array_equal(found, expected)
    if not torch.cuda.is_available():
        status, error = server.deploy("gpu", model, device="cuda")
        assert status == 400 and "finds no GPU" in error["error"]
    status, error = server.deploy("release", release_folder(tmp_path / "release", 1), dtype="bfloat16")
    assert status == 400 and "PyTorch" in error["error"]


def load_torch(folder: Path, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The logits of a model's folder, computed here."""
    described = json.loads((folder / "model.json").read_text())
    spec = zoo.get(
        described["name"],
        input_shape=tuple(described["input_shape"]),
        classes=described["classes"],
        **described["options"],
    )
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = spec.build(0).eval()(torch.from_numpy(x)).numpy()
    return logits


def test_code_within_an_adapted_model_needs_leave_too(tmp_path: Path) -> None:
    """A version may name its base in its options: workers build no code that was not allowed, wherever it is named."""
    folder = torch_model(tmp_path / "own")
    described = json.loads((folder / "model.json").read_text())
    options = {
        "base": OWN,
        "base_options": {},
        "adapt": "head",
        "backbone": str(folder / "model.safetensors"),
    }
    (folder / "model.json").write_text(json.dumps({**described, "name": "adapted", "options": options}))
    with serving(tmp_path / "home", PYTHONPATH=str(Path.cwd())) as other:
        status, error = other.deploy("own", folder)
        assert status == 400
        assert "is not among the code that this process may run" in error["error"]
