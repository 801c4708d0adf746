"""A refused command leaves its folder as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.errors import RunInterrupted, UserError
from coordinator.output_folders import begin, undone_if_refused


def fail(out: Path, error: Exception, *, begun: bool = False) -> None:
    with pytest.raises(type(error)), undone_if_refused(out, lambda: begun):
        begin(out, "experiment.toml", "")
        (out / "work").mkdir()
        raise error


def test_a_refusal_removes_the_folder_and_those_made_for_it(tmp_path: Path) -> None:
    fail(tmp_path / "runs" / "mine", UserError("wrong"))
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_keeps_folders_that_were_there(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "mine"
    out.mkdir(parents=True)
    fail(out, UserError("wrong"))
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs", out]


@pytest.mark.parametrize("error", [UserError("wrong"), RunInterrupted("disk")])
def test_work_that_can_go_on_is_kept(tmp_path: Path, error: Exception) -> None:
    fail(tmp_path / "mine", error, begun=True)
    assert (tmp_path / "mine" / "experiment.toml").exists()


def test_an_interruption_keeps_the_folder(tmp_path: Path) -> None:
    fail(tmp_path / "mine", RunInterrupted("disk"))
    assert (tmp_path / "mine" / "work").is_dir()
