"""The summaries of commands: every accuracy comes with its number of rows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.commands import summaries

HERE = Path("runs/here")
STEP = {
    "step": 1, "kind": "quantize", "model": "cnn", "precision": "static-int8", "accuracy": 0.9, "nonzero": 1, "macs": 1,
    "bytes": 10, "compressed_bytes": 9, "latency_us": 1.0, "facts": {},
}  # fmt: skip
TURN = {
    "version": 1, "bytes": 10, "accuracy": 0.9, "rollout": "finished", "device_accuracy": 0.9, "before": 0.8,
    "test_rows": 180, "scored": "of the run's 359 held-out rows", "device_rows": 96,
}  # fmt: skip
LOOP = {"shipped": TURN, "learnt": TURN, "lineage": "", "stopped": {}, "report": "r"}
TRAFFIC = {"runtimes": {}, "bytes_up": 0, "bytes_down": 0, "report": "r"}


def printed(shown: Any) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(shown)
    return text.getvalue()


PRINTED = {
    "pretrain": lambda: summaries.pretraining_summary(
        {
            "final": {"test_accuracy": 0.9, "test_loss": 0.1, "parameters": 3, "model_sha256": "0" * 64},
            "data": {"rows": {"test": 359}}, "steps": 4, "plan": "dp=1", "processes": 1, "about": {"seconds": 1.0},
        },
        HERE,
    ),
    "simulate": lambda: summaries.run_summary(
        {
            "final": {"test_accuracy": 0.9, "test_loss": 0.1, "test_rows": 359, "model_sha256": "0" * 64},
            "rounds": [], "runtimes": {}, "clients": 2, "bytes_up": 0, "bytes_down": 0, "rejections": {},
        },
        HERE,
    ),
    "compress": lambda: summaries.compression_summary(
        {"source": {**STEP, "step": 0}, "steps": [STEP], "test_rows": 180, "scored": "of 359 held-out rows", "notices": []},
        HERE,
    ),
    "demo": lambda: summaries.demo_summary(
        {"stages": [{"name": "a", "accuracy": 0.9, "bytes": 1, "detail": ""}], "test_rows": 359, **TRAFFIC}
    ),
    "demo-fleet": lambda: summaries.fleet_demo_summary(
        {"fleet_accuracy": 0.9, "simulated_accuracy": 0.9, "test_rows": [359, 359], "rounds": 2, "stopped": {}, **TRAFFIC}
    ),
    "demo-loop": lambda: summaries.loop_demo_summary(LOOP),
}  # fmt: skip


@pytest.mark.parametrize("command", PRINTED)
def test_an_accuracy_comes_with_its_number_of_rows(command: str) -> None:
    assert "359 held-out rows" in printed(PRINTED[command]())


def test_an_accuracy_on_devices_comes_with_its_number_of_rows() -> None:
    text = printed(summaries.loop_demo_summary(LOOP))
    assert (
        "on the devices, which share the held-out rows, on 96 of them 0.9000" in text
        and "own rows" not in text
    )


def test_a_quantity_without_figures_shows_its_loss() -> None:
    final = {"test_accuracy": None, "test_loss": 0.5, "test_rows": 7, "model_sha256": "0" * 64}
    report = {
        "final": final,
        "runtimes": {},
        "rounds": [],
        "clients": 2,
        "rejections": {},
        "bytes_up": 0,
        "bytes_down": 0,
    }
    assert "test loss 0.5000 on 7 held-out rows" in summaries.run_summary(report, HERE)
