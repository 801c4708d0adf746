"""`fedloop demo`: the whole loop, and the gain that federated training brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import assert_refused, run_cli, run_here

pytestmark = pytest.mark.slow


def test_the_demo_closes_the_loop_and_shows_the_gain(tmp_path: Path) -> None:
    done = run_cli("demo", "--out", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr

    shown = json.loads((tmp_path / "demo" / "demo.json").read_text())
    stages = {stage["name"]: stage for stage in shown["stages"]}
    assert list(stages) == ["teacher", "student", "student int8", "federated", "federated int8"]
    lines = [line.strip() for line in done.stdout.splitlines()]
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
