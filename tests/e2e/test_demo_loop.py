"""The whole cycle in one command: devices run the model that they trained, and its lineage is complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HANGS_SECONDS = 800


def test_the_cycle_closes(tmp_path: Path) -> None:
    out = tmp_path / "loop"
    with started("demo-loop", "--out", out) as demo:
        assert demo.process.wait(HANGS_SECONDS) == 0, demo.errors()
        assert demo.all_gone()
    result = json.loads((out / "demo-loop.json").read_text())
    shipped, learnt = result["shipped"], result["learnt"]
    assert shipped["rollout"] == learnt["rollout"] == "finished"
    assert isinstance(learnt["device_rows"], int)
    assert learnt["device_accuracy"] > learnt["before"] + 0.02
    assert learnt["accuracy"] > shipped["accuracy"] + 0.02
    assert set(result["stopped"].values()) == {0}
    for device in ("north", "east", "south", "west"):
        slots = out / "fleet" / "devices" / device / "state" / "releases" / "digits"
        pointer = json.loads((slots / "pointer.json").read_text())
        assert pointer[pointer["active"]]["version"] == learnt["version"]
    lineage = result["lineage"]
    places = [
        lineage.index(word) for word in ("data ", "pretrain", "compress", "release", "run ", "@champion")
    ]
    assert places == sorted(places)
