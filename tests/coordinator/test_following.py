"""Following a run: each event once, across a coordinator that goes away and comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import following
from coordinator.errors import RunInterrupted
from coordinator.experiment import resolve
from coordinator.operator_client import OperatorClient, Unreachable
from coordinator.progress import Quiet
from coordinator.rounds.engine import RoundRecord
from edge_client.wire import arrays

EXPERIMENT = resolve({"federation": {"rounds": 2}}, "test", "devices")


def record(number: int) -> dict[str, Any]:
    figures = RoundRecord(number, 2, 2, 0, 0, 1.0, 0.5, 0.75, 0.5, 0.75, 1.0, 10, 20, 1.5, {})
    return vars(figures)


EVENTS: list[dict[str, Any]] = [
    {"id": 1, "event": "run_created"},
    {"id": 4, "event": "run_started", "test_loss": 2.3, "test_accuracy": 0.1},
    {"id": 5, "event": "round_committed", **record(1), "per_site": {}},
    {"id": 9, "event": "run_resumed", "round": 1},
    {"id": 10, "event": "round_committed", **record(2)},
]
MODEL = arrays.encode({})
FINISHED = {"id": 11, "event": "run_finished"}


class Coordinator(OperatorClient):
    """Answers from a script of events; goes away after every `patience` of them, and `away` times for good measure."""

    def __init__(self, events: list[dict[str, Any]], patience: int = 2, away: int = 3) -> None:
        super().__init__("http://127.0.0.1:1", "token")
        self._script = events
        self._patience = patience
        self._away = away

    def get(self, path: str, **query: Any) -> Any:
        rounds = [record(1), record(2)]
        if path.endswith("/report"):
            final = {"model_sha256": arrays.sha256(MODEL)}
            return {"start": {"test_loss": 2.3, "test_accuracy": 0.1}, "rounds": rounds, "final": final}
        return {"experiment": EXPERIMENT.model_dump(mode="json", exclude_none=True), "notices": []}

    def download(self, path: str) -> bytes:
        return MODEL

    def events(self, path: str, after: int = 0) -> Iterator[dict[str, Any]]:
        left = [event for event in self._script if event["id"] > after]
        if self._away:
            self._away -= 1
            yield from left[: self._patience]
            raise Unreachable("gone")
        yield from left


class Told(Quiet):
    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.notes: list[str] = []

    def note(self, words: str) -> None:
        self.notes.append(words)

    def round(self, record: RoundRecord) -> None:
        self.rounds.append(record.round)


def test_every_event_is_told_once_across_restarts(tmp_path: Path) -> None:
    told = Told()
    client = Coordinator([*EVENTS, FINISHED])
    following.follow(client, "r", tmp_path / "out", told, wait=lambda seconds: None)
    assert told.rounds == [1, 2]
    lines = (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [1, 4, 5, 9, 10, 11]
    assert len((tmp_path / "out" / "rounds.csv").read_text().splitlines()) == 3


def test_what_is_left_is_what_a_simulation_leaves(tmp_path: Path) -> None:
    client = Coordinator([*EVENTS, FINISHED])
    following.follow(client, "r", tmp_path / "out", Quiet(), wait=lambda seconds: None)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("experiment.toml", "rounds.csv", "events.jsonl"),
        *("report.json", "curves.png", "model.safetensors"),
    }


def test_a_model_that_is_not_what_the_report_says_is_not_kept(tmp_path: Path) -> None:
    class Damaged(Coordinator):
        def download(self, path: str) -> bytes:
            return MODEL[:-1] + b"?"

    client = Damaged([*EVENTS, FINISHED])
    with pytest.raises(RunInterrupted, match="another hash than its report says"):
        following.follow(client, "r", tmp_path / "out", Quiet(), wait=lambda seconds: None)
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"registered": "digits:3"}, "registered as digits:3"),
        ({"not_registered": "why"}, "not registered: why"),
    ],
)
def test_what_became_of_the_model_in_the_registry_is_told(
    tmp_path: Path, more: dict[str, str], words: str
) -> None:
    told = Told()
    client = Coordinator([*EVENTS, {**FINISHED, **more}])
    following.follow(client, "r", tmp_path / "out", told, wait=lambda seconds: None)
    assert told.notes[-1].endswith(words)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"id": 11, "event": "run_failed", "error": "no such data"}, "failed: no such data"),
        ({"id": 11, "event": "run_cancelled"}, "was cancelled"),
    ],
)
def test_a_run_that_did_not_finish_is_told_as_such(tmp_path: Path, last: dict[str, Any], words: str) -> None:
    with pytest.raises(RunInterrupted, match=words):
        following.follow(
            Coordinator([*EVENTS, last]), "r", tmp_path / "out", Quiet(), wait=lambda seconds: None
        )


def test_a_coordinator_that_stays_away_is_given_up(tmp_path: Path) -> None:
    waited: list[float] = []
    client = Coordinator(EVENTS, patience=0, away=10**6)
    with pytest.raises(RunInterrupted, match="fedloop run --follow r"):
        following.follow(client, "r", tmp_path / "out", Quiet(), wait=waited.append)
    assert sum(waited) == pytest.approx(600)
