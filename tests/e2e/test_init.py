"""`fedloop init`: what it writes runs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import assert_refused, report_of, run_cli, run_here


@pytest.mark.slow
def test_files_written_by_init_run(tmp_path: Path) -> None:
    made = run_here("init", "mine", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "cd mine && fedloop simulate experiment.toml" in made.stdout
    done = run_cli("simulate", "experiment.toml", "--out", "run", cwd=tmp_path / "mine")
    assert done.returncode == 0, done.stderr
    report = report_of(tmp_path / "mine" / "run")
    assert report["final"]["test_accuracy"] > 0.8
    assert report["experiment"]["model"] == {"name": "model:build", "hidden": 32}


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("precious")
    assert_refused(run_here("init", cwd=tmp_path), "model.py", "overwritten")
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]
    assert (tmp_path / "model.py").read_text() == "precious"
