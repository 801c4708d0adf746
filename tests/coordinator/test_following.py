"""Following a run: each event once, across restarts of the coordinator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import RunInterrupted
from coordinator.experiments.experiment import resolve
from coordinator.operator import run_follower
from coordinator.operator.client import OperatorClient, Unreachable
from coordinator.reports.progress import Quiet
from coordinator.rounds.records import RoundRecord
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
ENDED = {"id": 11, "time": "2026-01-02T03:04:05.678+00:00"}
FINISHED = {**ENDED, "event": "run_finished"}


class Coordinator(OperatorClient):
    """Answers from a script of events; disconnects after every `patience` of them, and fails `away` connections."""

    def __init__(self, events: list[dict[str, Any]], patience: int = 2, away: int = 3) -> None:
        super().__init__("http://127.0.0.1:1", "token")
        self.requested = 0
        self._script = events
        self._patience = patience
        self._away = away

    def get(self, path: str, **query: Any) -> Any:
        rounds = [record(1), record(2)]
        if path.endswith("/report"):
            final = {"model_sha256": arrays.sha256(MODEL)}
            return {
                "start": {"test_loss": 2.3, "test_accuracy": 0.1},
                "rounds": rounds,
                "final": final,
                "data": {},
            }
        self.requested += 1
        notices = ["as it was asked", *(["as it is prepared"] if self.requested > 1 else [])]
        has_ended = self._script[-1]["event"] in run_follower.ENDS
        return {
            "experiment": EXPERIMENT.model_dump(mode="json", exclude_none=True),
            "notices": notices,
            "finished_at": "2026-01-02T03:04:05.678901Z" if has_ended else None,
        }

    def download(self, path: str) -> bytes:
        return MODEL

    def events(self, path: str, after: int = 0) -> Iterator[dict[str, Any]]:
        left = [event for event in self._script if event["id"] > after]
        if self._away:
            self._away -= 1
            yield from left[: self._patience]
            raise Unreachable("gone")
        yield from left


class Recorder(Quiet):
    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def round(self, record: RoundRecord) -> None:
        self.rounds.append(record.round)


def test_every_event_is_reported_once_across_restarts(tmp_path: Path) -> None:
    recorder = Recorder()
    client = Coordinator([*EVENTS, FINISHED])
    run_follower.follow(client, "r", tmp_path / "out", recorder, wait=lambda seconds: None)
    assert recorder.rounds == [1, 2]
    lines = (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [1, 4, 5, 9, 10, 11]
    assert len((tmp_path / "out" / "rounds.csv").read_text().splitlines()) == 3


def test_the_files_of_a_run_are_those_of_a_simulation(tmp_path: Path) -> None:
    client = Coordinator([*EVENTS, FINISHED])
    run_follower.follow(client, "r", tmp_path / "out", Quiet(), wait=lambda seconds: None)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("experiment.toml", "rounds.csv", "events.jsonl"),
        *("report.json", "curves.png", "model.safetensors"),
    }


def test_a_model_with_another_hash_than_in_the_report_is_not_kept(tmp_path: Path) -> None:
    class Damaged(Coordinator):
        def download(self, path: str) -> bytes:
            return MODEL[:-1] + b"?"

    client = Damaged([*EVENTS, FINISHED])
    with pytest.raises(RunInterrupted, match="does not have the hash in its report"):
        run_follower.follow(client, "r", tmp_path / "out", Quiet(), wait=lambda seconds: None)
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"registered": "digits:3"}, "registered as digits:3"),
        ({"not_registered": "why"}, "not registered: why"),
    ],
)
def test_the_registration_of_the_model_is_reported(
    tmp_path: Path, more: dict[str, str], message: str
) -> None:
    recorder = Recorder()
    client = Coordinator([*EVENTS, {**FINISHED, **more}])
    run_follower.follow(client, "r", tmp_path / "out", recorder, wait=lambda seconds: None)
    assert recorder.notes[-1].endswith(message)


def test_notices_are_shown_as_they_arrive(tmp_path: Path) -> None:
    recorder = Recorder()
    run_follower.follow(
        Coordinator([*EVENTS, FINISHED]), "r", tmp_path / "out", recorder, wait=lambda seconds: None
    )
    assert recorder.notes[:2] == ["as it was asked", "as it is prepared"]


WAITING = {"id": 2, "event": "round_waiting", "round": 1, "eligible": 1, "wanted": 10, "least": 1, "enrolled": 3, "seconds": 60}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "1 of 3 enrolled devices can take part, 10 are wanted; it begins with the eligible ones in 60 s"),
        ({"least": 2}, "1 of 3 enrolled devices can take part, 10 are wanted; it begins when 2 can"),
        ({"eligible": 0, "seconds": 0}, "0 of 3 enrolled devices can take part, 10 are wanted; it begins when 1 can"),
        ({"eligible": 0, "enrolled": 0}, "no device is enrolled; admit one"),
    ],
)  # fmt: skip
def test_a_waiting_round_is_reported(tmp_path: Path, more: dict[str, int], message: str) -> None:
    recorder = Recorder()
    client = Coordinator([EVENTS[0], {**WAITING, **more}, *EVENTS[1:], FINISHED])
    run_follower.follow(client, "r", tmp_path / "out", recorder, wait=lambda seconds: None)
    assert f"round 1 waits: {message}" in recorder.notes[1]


def test_a_waiting_round_names_the_devices_that_cannot_take_part(tmp_path: Path) -> None:
    blocked = [
        {"device": "0123456789", "name": "pump-7", "reasons": ["ineligible: on battery", "it was revoked"]}
    ]
    recorder = Recorder()
    event = {**WAITING, "blocked": blocked, "unnamed": 2}
    client = Coordinator([EVENTS[0], event, *EVENTS[1:], FINISHED])
    run_follower.follow(client, "r", tmp_path / "out", recorder, wait=lambda seconds: None)
    assert recorder.notes[2:4] == [
        "  pump-7 (01234567): ineligible: on battery; it was revoked",
        "  and 2 more; why one of them cannot: fedloop device why DEVICE",
    ]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({**ENDED, "event": "run_failed", "error": "no such data"}, "failed: no such data"),
        ({**ENDED, "event": "run_cancelled"}, "was cancelled"),
    ],
)
def test_an_unfinished_run_is_reported(tmp_path: Path, last: dict[str, Any], message: str) -> None:
    with pytest.raises(RunInterrupted, match=message):
        run_follower.follow(
            Coordinator([*EVENTS, last]), "r", tmp_path / "out", Quiet(), wait=lambda seconds: None
        )


def test_a_run_that_was_cancelled_and_resumed_is_followed_to_its_end(tmp_path: Path) -> None:
    before = "2026-01-02T03:04:01.000+00:00"
    cut = [
        {"id": 2, "event": "run_cancelled", "time": before},
        {"id": 3, "event": "run_taken_up", "round": 0},
    ]
    client = Coordinator([EVENTS[0], *cut, *EVENTS[1:], FINISHED])
    recorder = Recorder()
    run_follower.follow(client, "r", tmp_path / "out", recorder, wait=lambda seconds: None)
    assert recorder.rounds == [1, 2]
    assert "the run was resumed behind round 0" in recorder.notes


def test_following_ends_when_the_coordinator_stays_unreachable(tmp_path: Path) -> None:
    waited: list[float] = []
    client = Coordinator(EVENTS, patience=0, away=10**6)
    with pytest.raises(RunInterrupted, match="fedloop run --follow r"):
        run_follower.follow(client, "r", tmp_path / "out", Quiet(), wait=waited.append)
    assert sum(waited) == pytest.approx(600)
