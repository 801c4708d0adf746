"""`fedloop demo-serving`: a model is served under load while its successor is trained, compared and promoted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import started

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(900)]
HANGS_SECONDS = 800


def test_no_request_fails_while_the_candidate_becomes_champion(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    with started("demo-serving", "--out", out) as command:
        assert command.process.wait(HANGS_SECONDS) == 0, command.errors()
        assert command.all_gone()
    demo = json.loads((out / "demo-serving.json").read_text())
    assert (demo["champion"], demo["candidate"], demo["failed"]) == ("1", "2", 0)
    assert demo["requests"] > 1000
    assert demo["shadowed_rows"] >= 1000
    assert 0.5 < demo["agreement"] <= 1
    assert demo["accuracy"]["candidate"] > demo["accuracy"]["champion"] - 0.05
    assert not any(demo["stopped"].values())
