"""The offline queue: bounded, durable, whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.outbox import MAX_RESULTS, Ledger, Outbox, OutboxFull, PendingResult, to_drop
from edge_client.state import State
from edge_client.wire.device import BlobRef, ModelRef, TaskOffer


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    opened = State(tmp_path)
    yield opened
    opened.close()


def offer(task: str, deadline_seconds: float = 100.0) -> TaskOffer:
    model = ModelRef("cnn", {}, (1,), 2, "float32", "classification")
    blob = BlobRef("a" * 64, 1)
    return TaskOffer(
        task,
        "train",
        "run",
        "demo",
        1,
        "litert",
        "digits",
        {},
        model,
        blob,
        None,
        None,
        None,
        60.0,
        deadline_seconds,
        1,
    )


def put(
    outbox: Outbox, folder: Path, task: str, size: int, now: float, deadline_seconds: float = 100.0
) -> list[str]:
    result = folder / "result"
    result.write_bytes(b"x" * size)
    _, gone = outbox.store(offer(task, deadline_seconds), result, None, deflate=False, now=now)
    return [each.task for each in gone]


def test_results_of_rounds_that_are_over_go_first(state: State, tmp_path: Path) -> None:
    outbox = Outbox(state, 1000)
    assert put(outbox, tmp_path, "old", 400, now=0.0, deadline_seconds=1000.0) == []
    assert put(outbox, tmp_path, "over", 400, now=10.0, deadline_seconds=5.0) == []
    assert put(outbox, tmp_path, "new", 400, now=20.0) == ["over"]
    assert [each.task for each in outbox.pending()] == ["old", "new"]
    assert sorted(path.name for path in outbox.folder.iterdir()) == ["new.result", "old.result"]


def test_a_result_larger_than_the_outbox_is_refused(state: State, tmp_path: Path) -> None:
    with pytest.raises(OutboxFull, match="2000 bytes"):
        put(Outbox(state, 1000), tmp_path, "big", 2000, now=0.0)


def test_the_number_of_results_is_bounded(state: State, tmp_path: Path) -> None:
    outbox = Outbox(state, 10**6)
    for number in range(MAX_RESULTS + 3):
        put(outbox, tmp_path, f"t{number:03}", 1, now=float(number), deadline_seconds=1e6)
    assert outbox.pending()[0].task == "t003"
    assert len(outbox.pending()) == MAX_RESULTS


@given(
    st.lists(st.tuples(st.integers(0, 500), st.floats(0, 100), st.floats(0, 200)), min_size=1, max_size=80),
    st.integers(500, 3000),
)
def test_remaining_results_fit_and_include_the_newest(
    rows: list[tuple[int, float, float]], max_bytes: int
) -> None:
    waiting = [
        PendingResult(f"t{n}", "r", "r", 1, "train", size, "", size, "identity", stored, closes)
        for n, (size, stored, closes) in enumerate(rows)
    ]
    gone = to_drop(waiting, waiting[-1], max_bytes=max_bytes, now=100.0)
    stay = [row for row in waiting if row not in gone]
    assert waiting[-1] in stay
    assert sum(row.size_bytes for row in stay) <= max_bytes
    assert len(stay) <= MAX_RESULTS


def test_a_crash_leaves_no_rubbish_and_no_half_result(state: State, tmp_path: Path) -> None:
    outbox = Outbox(state, 10**6)
    put(outbox, tmp_path, "whole", 10, now=0.0)
    put(outbox, tmp_path, "cut", 10, now=1.0)
    outbox.path("cut").write_bytes(b"xx")
    outbox.path("without-row").write_bytes(b"xx")
    assert [each.task for each in outbox.sweep()] == ["cut"]
    assert [path.name for path in outbox.folder.iterdir()] == ["whole.result"]


def test_the_ledger_is_only_added_to(state: State, tmp_path: Path) -> None:
    outbox, ledger = Outbox(state, 10**6), Ledger(state)
    put(outbox, tmp_path, "one", 10, now=0.0)
    (waiting,) = outbox.pending()
    for _ in range(3):
        ledger.record(waiting, outbox.path("one"), now=5.0)
        ledger.record_outcome(waiting, "delivered", now=6.0)
    (entry,) = ledger.entries()
    assert (entry.at, entry.size_bytes, entry.sha256, entry.outcome) == (5.0, 10, waiting.sha256, "delivered")
    with pytest.raises(Exception, match="only added to"):
        state.connection.execute("UPDATE ledger SET size_bytes = 1")


def test_payloads_are_kept_within_bounds_and_entries_beyond(state: State, tmp_path: Path) -> None:
    outbox, ledger = Outbox(state, 10**6), Ledger(state, payload_bytes=25)
    for number in range(4):
        (tmp_path / "result").write_bytes(bytes([number]) * 10)
        waiting, _ = outbox.store(
            offer(f"t{number}"), tmp_path / "result", None, deflate=False, now=float(number)
        )
        ledger.record(waiting, outbox.path(waiting.task), now=float(number))
        outbox.drop(waiting)
    assert [entry.payload_kept for entry in ledger.entries()] == [False, False, True, True]
    assert ledger.payload(ledger.entry(4)) == bytes([3]) * 10
