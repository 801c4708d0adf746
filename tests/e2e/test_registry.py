"""The guide to the registry, as it is written: a real model from its pretraining to its release."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.coordinator.registry.test_commands import fedloop, served
from tests.support.cli import CACHE, run_cli

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "registry.md"


@pytest.mark.extended
def test_the_guide_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = "".join(re.findall(r"```sh\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)).splitlines()
    assert len(commands) > 10
    cache = {"FEDLOOP_CACHE_DIR": str(CACHE)}
    monkeypatch.chdir(tmp_path)
    with served(tmp_path / "home"):
        for command in commands:
            program, first, *arguments = shlex.split(command)
            assert program == "fedloop"
            if first == "model":
                fedloop(*arguments)
            else:
                done = run_cli(first, *arguments, env=cache)
                assert done.returncode == 0, (command, done.stderr)
        graph = json.loads(fedloop("lineage", "digits:1", "--json").stdout)
    assert [(edge["parent"], edge["child"]) for edge in graph["edges"] if edge["relation"] == "params"] == [
        ("digits:1", "digits:2"),
        ("digits:2", "digits:3"),
    ]
    left = json.loads((tmp_path / "champion" / "manifest.json").read_text())
    assert (left["model"], left["version"]) == ("digits", 3)
