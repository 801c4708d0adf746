"""`fedloop demo`: the whole loop, and the gain that federated training brings."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from coordinator.accounts.admin_token import read_admin_token
from coordinator.operator.client import OperatorClient
from tests.support.cli import assert_refused, run_here, started

pytestmark = pytest.mark.slow


def test_the_demo_closes_the_loop_shows_the_gain_and_serves_its_models(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with started("demo", "--out", "demo", "--serve", cwd=tmp_path, output=output) as demo:
        assert demo.reaches(lambda: "Ctrl-C stops" in output.read_text()), demo.errors()
        home = tmp_path / "demo" / "served" / "coordinator"
        url = json.loads((home / "serve.json").read_bytes())["operator"]
        assert f"console: {url}\n" in output.read_text()
        require_lineage(OperatorClient(url, read_admin_token(home)))
        demo.send(signal.SIGINT)
        assert demo.ended() == 0
        assert demo.all_gone()
        assert "Traceback" not in demo.errors()

    shown = json.loads((tmp_path / "demo" / "demo.json").read_text())
    stages = {stage["name"]: stage for stage in shown["stages"]}
    assert list(stages) == ["teacher", "student", "student int8", "federated", "federated int8"]
    lines = [line.strip() for line in output.read_text().splitlines()]
    for name, stage in stages.items():
        row = next(line for line in lines if line.startswith(name) and f"{stage['accuracy']:.4f}" in line)
        assert f"{stage['bytes']:,}" in row

    accuracy = {name: stage["accuracy"] for name, stage in stages.items()}
    assert accuracy["federated"] >= accuracy["student"] + 0.02
    assert accuracy["federated int8"] >= accuracy["federated"] - 0.02
    assert stages["student int8"]["bytes"] < stages["student"]["bytes"] < stages["teacher"]["bytes"]
    assert set(shown["runtimes"]) == {"litert", "torch", "tensorflow"}
    assert (tmp_path / shown["report"]).is_file()

    assert_refused(run_here("demo", "--out", "demo", cwd=tmp_path), "not empty")


def require_lineage(client: OperatorClient) -> None:
    """The registry has the model of each stage, made from the one before, back to the data."""
    stages = {each["version"]: each["stage"] for each in client.get("/models/digits/versions")["versions"]}
    assert stages == {
        "digits:1": "pretrain",
        "digits:2": "compress",
        "digits:3": "run",
        "digits:4": "compress",
    }
    edges = client.get("/versions/digits@champion/lineage")["edges"]
    made_from = {(each["parent"], each["child"]) for each in edges if each["relation"] == "params"}
    assert made_from == {("digits:1", "digits:2"), ("digits:2", "digits:3"), ("digits:3", "digits:4")}
    assert any(each["relation"] == "data" and each["child"] == "digits:1" for each in edges)
