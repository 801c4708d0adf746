"""Rounds that are much shorter than a commit share one; nothing but the latest of them is lost with the process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from coordinator.reports import run_files
from coordinator.reports.progress import Quiet
from coordinator.rounds.events import EventLog, LineFile, emit_each
from coordinator.rounds.records import Checkpoint, RoundRecord, RunState
from coordinator.runs.simulation_store import CheckpointStore, SimulationStore
from strategies.params import State

RECORD = RoundRecord(1, 2, 1, 0, 1, 0.7, 0.5, 0.75, 0.5, 0.75, 1.0, 10, 20, 1.5, {})


def now() -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Ticking:
    """A clock of which each look takes a tick, so a commit takes one too."""

    seconds: float = 0.0
    tick: float = 0.25

    def __call__(self) -> float:
        self.seconds += self.tick
        return self.seconds


def play(store: SimulationStore, number: int) -> None:
    state = RunState(number, {"w": np.full(3, number, np.float32)}, State({}, {}))
    record = replace(RECORD, round=number)
    store.commit(state, record, {f"client-{number}": {"control": {"w": np.full(1, number, np.float32)}}})
    store.on_committed(record)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def committed_round(out: Path) -> int:
    """Also while a commit goes on, which deletes the files of the one before."""
    number: int = json.loads((out / "checkpoint" / "checkpoint.json").read_bytes())["round"]
    return number


def stored(out: Path) -> Checkpoint:
    checkpoint = CheckpointStore(out / "checkpoint").load()
    assert checkpoint is not None
    return checkpoint


def test_short_rounds_share_a_commit_and_the_end_of_the_run_commits_the_last(tmp_path: Path) -> None:
    with SimulationStore(tmp_path, Quiet(), now, Ticking()) as store:
        seen = []
        for number in range(1, 8):
            play(store, number)
            seen.append(committed_round(tmp_path))
        assert seen[:4] == [1, 1, 1, 1], "a second without a commit is four looks"
        wait_until(lambda: committed_round(tmp_path) > 1)  # without another round
    last = stored(tmp_path)
    assert last.round == 7
    assert sorted(last.client_states) == [f"client-{number}" for number in range(1, 8)]
    assert [row["round"] for row in run_files.read_rounds(tmp_path / "rounds.csv")] == list(range(1, 8))


def test_a_long_round_is_durable_before_the_next_begins(tmp_path: Path) -> None:
    clock = Ticking(tick=0.01)
    with SimulationStore(tmp_path, Quiet(), now, clock) as store:
        for number in (1, 2, 3):
            play(store, number)
            assert stored(tmp_path).round == number
            clock.seconds += RECORD.seconds  # of 150 commits


def test_a_commit_that_fails_beside_the_rounds_ends_the_run_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = CheckpointStore.commit
    failed = Event()

    def fail_once(store: CheckpointStore, checkpoint: Checkpoint) -> None:
        if checkpoint.round > 1 and not failed.is_set():
            failed.set()
            raise OSError("no room")
        commit(store, checkpoint)

    monkeypatch.setattr(CheckpointStore, "commit", fail_once)
    with (
        pytest.raises(OSError, match="no room"),
        SimulationStore(tmp_path, Quiet(), now, Ticking()) as store,
    ):
        for number in range(1, 100):
            last = number
            play(store, number)
            time.sleep(0.001)
    last_stored = stored(tmp_path)
    assert last_stored.round == last < 99
    assert sorted(last_stored.client_states) == sorted(f"client-{number}" for number in range(1, last + 1))


def test_a_killed_run_goes_on_after_the_last_commit_as_if_the_later_rounds_had_not_been(
    tmp_path: Path,
) -> None:
    store = SimulationStore(tmp_path, Quiet(), now, Ticking()).__enter__()
    for number in (1, 2, 3):
        play(store, number)
    again = SimulationStore(tmp_path, Quiet(), now, Ticking())
    assert again.checkpoint is not None and again.checkpoint.round == 1
    with again:
        play(again, 2)
    assert [row["round"] for row in run_files.read_rounds(tmp_path / "rounds.csv")] == [1, 2]
    events = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [line.count("round_committed") for line in events] == [1, 1]


def test_an_error_commits_the_last_finished_round(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), SimulationStore(tmp_path, Quiet(), now, Ticking()) as store:
        play(store, 1)
        play(store, 2)
        raise KeyboardInterrupt
    assert stored(tmp_path).round == 2


def test_events_by_column_are_the_lines_of_single_events(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "client": ["a", 'b"\n', "ü"],
        "seconds": [1.5, float("nan"), 2],
        "reason": [None, "x", "y"],
    }
    logs = [EventLog(LineFile(tmp_path / name), now) for name in ("each", "single")]
    emit_each(logs[0], "update_accepted", {"round": 3}, **columns)
    emit_each(logs[1].__call__, "update_accepted", {"round": 3}, **columns)
    assert (tmp_path / "each").read_text() == (tmp_path / "single").read_text()
    emit_each(logs[0], "nothing", {}, client=[])
    assert len((tmp_path / "each").read_text().splitlines()) == 3
