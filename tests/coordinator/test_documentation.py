"""`fedloop docs` reads pages without a network; the site builds without a broken link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer.main
from hatchling.builders.wheel import WheelBuilder

from coordinator.commands import cli
from coordinator.reference import pages as reference
from coordinator.server.console import BUILT
from tests.support.cli import FEDLOOP, run_here
from tests.support.require import require

ROOT = Path(__file__).parents[2]


def test_every_guide_is_listed_and_shown() -> None:
    listed = run_here("docs").stdout
    for path in (ROOT / "docs").glob("*.md"):
        if path.stem == "index":
            continue
        assert f"\n{path.stem} " in f"\n{listed}"
    shown = run_here("docs", "docs/rollouts.md")
    assert shown.returncode == 0
    assert "fedloop rollout start" in shown.stdout


def test_reference_pages_are_made_from_the_code_and_explain_every_key() -> None:
    command = typer.main.get_command(cli.app)
    pages = {name: make() for name, make in reference.pages({"fedloop": command}).items()}
    listed = run_here("docs").stdout
    assert all(f"{reference.FOLDER}/{name}" in listed for name in pages)
    assert "min_battery_percent" in pages["device-keys"]
    unexplained = re.findall(
        r"^\| `\w+` \|.*\|  \|$", pages["device-keys"] + pages["strategy-options"], re.MULTILINE
    )
    assert unexplained == []
    assert "| `norm` | `group`, `batch` | `group` |" in pages["model-options"]


def test_the_notebook_is_a_page_too() -> None:
    shown = run_here("docs", "first-federation").stdout
    assert shown.startswith("# A first federation\n")
    assert "```python\nimport numpy as np\n" in shown


def test_a_page_is_complete_on_a_narrow_terminal() -> None:
    narrow = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "60", "PAGER": "cat"}
    done = subprocess.run(
        [FEDLOOP, "docs", "architecture"], env={**os.environ, **narrow}, capture_output=True, text=True
    )
    assert "edge_client/daemon/" in done.stdout
    assert "…" not in done.stdout


def test_an_unknown_page_is_refused_with_the_nearest_name() -> None:
    refused = run_here("docs", "real-flet")
    assert refused.returncode == 2
    assert "did you mean 'real-fleet'?" in refused.stderr


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "cache")]
    built = subprocess.run(
        [*command, "-b", "html", "docs", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "site/reference/fedloop.html").read_text("utf-8")
    assert "compress-search" in reference
    keys = (tmp_path / "site/reference/experiment-keys.html").read_text("utf-8")
    assert "clients_per_round" in keys


def test_a_wheel_carries_the_pages_and_the_console(tmp_path: Path) -> None:
    path = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        assert "coordinator/docs/real-fleet.md" in names
        if not (BUILT / "index.html").is_file():
            require("console", "`make web` did not build the console")
        page = wheel.read("coordinator/console/index.html").decode()
        loaded = re.findall(r'(?:src|href)="/(assets/[^"]+)"', page)
        assert {Path(each).suffix for each in loaded} == {".js", ".css", ".svg"}
        for each in (*loaded, *(f"assets/{path.name}" for path in (BUILT / "assets").iterdir())):
            assert f"coordinator/console/{each}" in names
        assert not [each for each in names if each.startswith("web/")]
