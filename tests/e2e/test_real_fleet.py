"""A real federation on this machine: the demo, and the guide as it is written."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from coordinator.reports import run_files
from models import datasets
from tests.support.cli import CACHE, started

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HANGS_SECONDS = 1500


def test_a_fleet_of_three_runtimes_reaches_what_its_simulation_reaches(tmp_path: Path) -> None:
    with started("demo-fleet", "--out", tmp_path / "demo") as demo:
        assert demo.ended() == 0, demo.errors()
        assert demo.all_gone()
    result = json.loads((tmp_path / "demo" / "demo-fleet.json").read_text())
    assert abs(result["fleet_accuracy"] - result["simulated_accuracy"]) <= 0.01
    assert result["fleet_accuracy"] > 0.9
    assert set(result["runtimes"].values()) == {"litert", "torch", "tensorflow"}
    assert set(result["stopped"].values()) == {0}
    assert len(result["stopped"]) == 5
    report = json.loads((tmp_path / "demo" / "federated" / "report.json").read_text())
    assert [row["accepted"] for row in report["rounds"]] == [4] * 5
    # Each client is scored on its own held-out rows: the spread is not the accuracy of all, repeated.
    rounds = run_files.read_rounds(tmp_path / "demo" / "federated" / "rounds.csv")
    assert len(rounds) == 5
    assert all(
        row["client_accuracy_min"] < row["test_accuracy"] < row["client_accuracy_max"] for row in rounds
    )
    left = {path.name for path in (tmp_path / "demo" / "federated").iterdir()}
    assert left >= {
        "experiment.toml",
        "rounds.csv",
        "events.jsonl",
        "report.json",
        "curves.png",
        "model.safetensors",
    }


@pytest.mark.extended
def test_the_guide_runs_as_written(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "real-fleet.md").read_text("utf-8")
    # Two ports of our own: another coordinator may be served on this machine.
    for port in ("8080", "8443"):
        page = page.replace(port, str(_free_port()))
    operator, device = re.findall(r"127\.0\.0\.1:(\d+)", page)[:2]
    serve, *commands = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (tmp_path / "edge.toml").write_text(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FEDLOOP_HOME": str(tmp_path / "home"),
        "FEDLOOP_OPERATOR": f"127.0.0.1:{operator}",
        "FEDLOOP_DEVICE": f"127.0.0.1:{device}",
        "FEDLOOP_COORDINATOR": f"http://127.0.0.1:{operator}",
        "FEDLOOP_CACHE_DIR": str(CACHE),
        "FEDLOOP_TEST_RUN": uuid.uuid4().hex,
    }
    until_served = f"until (exec 3<>/dev/tcp/127.0.0.1/{operator}) 2>/dev/null; do sleep 0.1; done\n"
    script = "set -e\n" + serve + until_served + "\n".join(commands)
    with (tmp_path / "said").open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = shell.wait(HANGS_SECONDS)
        finally:
            _end(shell.pid)
    words = (tmp_path / "said").read_text()
    assert status == 0, words
    assert "was accepted" in words
    assert "registered as digits:1" in words and "digits:1 @candidate  run, params" in words
    report = json.loads((tmp_path / "runs" / "fleet" / "report.json").read_text())
    on_device = report["rounds"][-1]["on_devices"]
    assert on_device["test_rows"] == 110 and on_device["test_accuracy"] > 0.5
    assert f"accuracy {on_device['test_accuracy']:.4f} on 110 rows whose class is known" in words
    digits = datasets.load("digits", seed=7)
    tested = {row.tobytes() for row in np.rint(16 * digits.x[digits.test].reshape(-1, 64)).astype(int)}
    trained = np.loadtxt(tmp_path / "digits.csv", int, delimiter=",", skiprows=1)[:, :64]
    assert len(trained) == 600 and not any(row.tobytes() in tested for row in trained)
    assert "a test only where no device trains on them" in " ".join(words.split())


def _end(group: int) -> None:
    """Ends the coordinator and the daemon that the guide left in the background."""
    try:
        os.killpg(group, signal.SIGTERM)
        for _ in range(300):
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
        return port
