"""Shadows and canaries: what they answer, what is counted, and that they never harm the deployment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.operator import version_files
from coordinator.operator.client import connect
from tests.coordinator.registry.test_commands import served
from tests.support.released import digits, release_folder
from tests.support.serving import Server, logits_of, rows, serving, torch_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serving") / "home") as running:
        yield running


def test_a_shadow_is_compared_and_answers_nobody(server: Server, tmp_path: Path) -> None:
    first, same = torch_model(tmp_path / "first"), torch_model(tmp_path / "same")
    other = torch_model(tmp_path / "other", seed=1)
    x = rows(20)
    server.deployed("plain", first)
    expected = server.infer("plain", x)
    for shadow, least, most in ((same, 1.0, 1.0), (other, 0.0, 0.9)):
        server.deployed("digits", first, shadow=str(shadow))
        for _ in range(10):
            assert server.infer("digits", x) == (200, {**expected[1], "model_name": "digits"})
        until = time.monotonic() + 60
        while (figures := server.status("digits")["shadow"])["rows"] < 200 and time.monotonic() < until:
            time.sleep(0.05)
        assert (figures["requests"], figures["failed"], figures["left_out_rows"]) == (10, 0, 0)
        assert least <= figures["agreement"] <= most
        assert (figures["mean_difference"] == 0) == (shadow is same)


def test_a_shadow_that_does_not_fit_changes_nothing(server: Server, tmp_path: Path) -> None:
    first = torch_model(tmp_path / "first")
    other = torch_model(tmp_path / "other", input_shape=[4, 4])
    server.deployed("unfit", first, shadow=str(other))
    assert server.infer("unfit", rows(2))[0] == 200
    assert server.status("unfit")["shadow"]["failed"] == 1
    server.deployed("missing", first, shadow=str(tmp_path / "nowhere"))
    assert server.infer("missing", rows(2))[0] == 200
    assert "nowhere" in server.status("missing")["shadow"]["reason"]


def test_a_canary_answers_its_share(server: Server, tmp_path: Path) -> None:
    first, second = torch_model(tmp_path / "first"), torch_model(tmp_path / "second", seed=1)
    server.deployed("split", first, canary={"model": str(second), "share": 0.25})
    x = rows(3)
    answers: dict[str, list[np.ndarray]] = {}
    for _ in range(40):
        status, answer = server.infer("split", x)
        assert status == 200
        answers.setdefault(answer["model_version"], []).append(logits_of(answer))
    status = server.status("split")
    own, canary = status["version"], status["canary"]["version"]
    assert {number: len(found) for number, found in answers.items()} == {own: 30, canary: 10}
    assert all(np.array_equal(each, found[0]) for found in answers.values() for each in found)
    assert status["canary"]["requests"] == 10
    pinned = {
        server.infer("split", x, f"/v2/models/split/versions/{own}/infer")[1]["model_version"]
        for _ in range(8)
    }
    assert pinned == {own}
    status_code, error = server.deploy(
        "split", first, shadow="a", canary={"model": str(second), "share": 0.5}
    )
    assert status_code == 400 and "a shadow and a canary" in error["error"]


def test_figures_of_a_shadow_return_to_the_registry(tmp_path: Path) -> None:
    x = digits()[0][:20]
    with served(tmp_path / "coordinator"), serving(tmp_path / "home", "--follow-seconds", "0.1") as server:
        client = connect()
        for number, kind in ((1, "first"), (2, "second")):
            folder = release_folder(tmp_path / f"r{number}", number, kind)
            version_files.add(client, "digits", *version_files.gather(folder))
        client.put("/models/digits/aliases/champion", {"version": 1})
        client.put("/models/digits/aliases/candidate", {"version": 2})
        server.deployed("digits", "digits@champion", shadow="digits@candidate")
        assert server.infer("digits", x)[0] == 200
        until = time.monotonic() + 30
        while "shadow" not in (metrics := client.get("/versions/digits:2")["metrics"]):
            assert time.monotonic() < until
            time.sleep(0.2)
        assert metrics["shadow"]["rows"] == 20
        assert 0 < metrics["shadow"]["agreement"] <= 1
