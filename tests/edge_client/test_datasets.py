"""Counting rows: beside the daemon, within its limits, no more often than the data changes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from edge_client.data import DataConfig, preview
from edge_client.data.preview import RECOUNT_SECONDS, RowCounts
from tests.support.training_jobs import install_plug_in, naughty


def table(folder: Path, rows: int) -> DataConfig:
    path = folder / "digits.csv"
    path.write_text("a,digit\n" + "".join(f"{n},{n % 3}\n" for n in range(rows)))
    return DataConfig("csv", path, {"label": "digit", "held_out": 0.0})


@pytest.mark.slow
def test_rows_are_counted_and_what_cannot_be_read_is_reported(tmp_path: Path) -> None:
    found = preview.look({"digits": table(tmp_path, 7), "none": DataConfig("csv", tmp_path / "none")}, 0)
    assert found["digits"] == 7
    assert isinstance(found["none"], str)


@pytest.mark.slow
def test_counting_keeps_to_the_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install_plug_in(tmp_path / "site")))
    tables = {"large": naughty("grab"), "digits": table(tmp_path, 7)}
    found = preview.look(tables, 200_000_000)
    assert found == {"large": "reading it needs more memory than limits.memory_bytes", "digits": 7}


class Counted:
    """`look` that is told what to find, and may take its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows, self.times, self.go_on = 12, 0, threading.Event()
        self.go_on.set()
        self.reported = threading.Event()
        self.seconds = 1000.0
        monkeypatch.setattr(preview, "look", self._look)

    def counts(self, tables: dict[str, DataConfig]) -> RowCounts:
        return RowCounts(tables, lambda: self.seconds, changed=self.reported.set)

    def _look(self, tables: dict[str, DataConfig], memory_bytes: int) -> dict[str, int | str]:
        self.times += 1
        assert self.go_on.wait(60)
        return dict.fromkeys(tables, self.rows)


def test_they_are_counted_again_when_the_file_changed_or_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, digits = Counted(monkeypatch), table(tmp_path, 7)
    rows = counted.counts({"digits": digits})
    assert rows() == rows() == {"digits": 12}
    assert counted.times == 1
    assert digits.path is not None
    os.utime(digits.path, ns=(1, 1))
    rows()
    assert counted.times == 1  # data that changes all the time is not counted all the time
    counted.seconds += 60
    rows()
    rows()
    assert counted.times == 2
    counted.seconds += RECOUNT_SECONDS
    rows()
    assert counted.times == 3


def test_a_count_that_takes_long_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    monkeypatch.setattr(preview, "PATIENCE_SECONDS", 0.01)
    counted.go_on.clear()
    rows = counted.counts({"digits": table(tmp_path, 7)})
    assert rows() == rows() == {}
    assert counted.times == 1
    counted.go_on.set()
    assert counted.reported.wait(60)
    assert rows() == {"digits": 12}
