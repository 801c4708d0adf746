"""What a relay keeps on its disk: an update survives the process, and goes when it is of no more use."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import asdict
from pathlib import Path

import pytest

from edge_client.relay.expected import Expected
from edge_client.relay.folding import CannotFold, fold
from edge_client.relay.inflation import BadEncoding
from edge_client.relay.intake import Rejection
from edge_client.relay.updates import FORGET_SECONDS, HashMismatch, KeptUpdate, KeptUpdates
from edge_client.wire import arrays
from edge_client.wire.arrays import StoredArrays
from edge_client.wire.device import ModelRef, TaskOffer, UploadStart
from edge_client.wire.relays import Figures, FoldRequest, Member, RelayedTask
from tests.support.federation import PARAMS, task, update

MESSAGE = task("device-1").message
SENT = update({"w": PARAMS["w"]})
RESULT = arrays.encode_result(MESSAGE, SENT)
MODEL = ModelRef("logreg", {}, (2,), 3, "float32", "classification")
OFFER = TaskOffer(
    task="task-1",
    kind="train",
    run="run-1",
    run_name="a run",
    round=3,
    runtime="litert",
    dataset="rows",
    message=MESSAGE.to_json(),
    model=MODEL,
    params=None,
    streams=None,
    artifact=None,
    manifest=None,
    lease_seconds=60,
    deadline_seconds=60,
    result_limit_bytes=9999,
)
EXPECTED = Expected({"delta/w": (2, 3)}, 9999)
TASK = RelayedTask(OFFER, True, asdict(EXPECTED))


def start_of(payload: bytes, **changed: object) -> UploadStart:
    values = {"size_bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    return UploadStart(**{**values, "decoded_bytes": len(payload), **changed})  # type: ignore[arg-type]


def receive(files: KeptUpdate, payload: bytes = RESULT, **changed: object) -> Figures | Rejection:
    files.begin(TASK, start_of(payload, **changed))
    files.append([payload[files.offset :]])
    return files.finish()


def test_an_update_is_there_after_a_restart_with_its_figures(tmp_path: Path) -> None:
    figures = receive(KeptUpdates(tmp_path).of("task-1"))
    assert isinstance(figures, Figures)
    assert (figures.num_examples, figures.norm) == (SENT.num_examples, SENT.norm)
    again = KeptUpdates(tmp_path).of("task-1")
    assert again.figures == figures
    assert again.read().delta["w"].tobytes() == SENT.delta["w"].tobytes()


def test_an_upload_resumes_where_it_stopped_and_begins_anew_if_other_bytes_are_announced(
    tmp_path: Path,
) -> None:
    files = KeptUpdates(tmp_path).of("task-1")
    files.begin(TASK, start_of(RESULT))
    files.append([RESULT[:10], RESULT[10:30]])
    again = KeptUpdates(tmp_path).of("task-1")
    again.begin(TASK, start_of(RESULT))
    assert again.offset == 30
    again.begin(TASK, start_of(RESULT + b"x"))
    assert again.offset == 0


def test_a_deflated_update_is_kept_inflated(tmp_path: Path) -> None:
    sent = zlib.compress(RESULT)
    files = KeptUpdates(tmp_path).of("task-1")
    figures = receive(files, sent, decoded_bytes=len(RESULT), encoding="deflate")
    assert isinstance(figures, Figures)
    assert figures.sha256 == hashlib.sha256(RESULT).hexdigest() and files.path.read_bytes() == RESULT


def test_other_bytes_than_announced_and_wrong_results_are_not_kept(tmp_path: Path) -> None:
    files = KeptUpdates(tmp_path).of("task-1")
    with pytest.raises(HashMismatch):
        receive(files, sha256="0" * 64)
    with pytest.raises(BadEncoding, match="inflates to more than"):
        receive(files, zlib.compress(RESULT), decoded_bytes=len(RESULT) - 1, encoding="deflate")
    verdict = receive(files, arrays.encode_result(task("device-2").message, SENT))
    assert isinstance(verdict, Rejection) and verdict.reason == "wrong_task"
    assert files.figures is None


def test_one_thread_at_a_time_has_the_files_of_a_task(tmp_path: Path) -> None:
    kept = KeptUpdates(tmp_path)
    with kept.locked("task-1") as mine, kept.locked("task-1") as other, kept.locked("task-2") as another:
        assert mine is not None and other is None and another is not None
    with kept.locked("task-1") as again:
        assert again is not None


def test_updates_of_earlier_rounds_and_of_runs_long_silent_are_deleted(tmp_path: Path) -> None:
    now = [0.0]
    kept = KeptUpdates(tmp_path, lambda: now[0])
    receive(kept.of("task-1"))
    now[0] = kept.of("task-1").folder.stat().st_mtime
    kept.forget("run-1", 3)
    kept.forget("run-2", 9)
    assert kept.of("task-1").figures is not None
    kept.forget("run-1", 4)
    assert kept.of("task-1").figures is None
    receive(kept.of("task-1"))
    now[0] += FORGET_SECONDS + 60
    kept.forget()
    assert kept.size_bytes() == 0


def test_a_fold_is_refused_if_an_update_is_damaged_or_the_strategy_unknown(tmp_path: Path) -> None:
    kept = KeptUpdates(tmp_path / "updates")
    receive(kept.of("task-1"))
    request = FoldRequest("fedavg", {}, 4, 5, None, (Member(4, "task-1"),))
    digest = fold(request, "task-9", kept, tmp_path / "answer")
    stored = StoredArrays(arrays.FilePayload(tmp_path / "answer"))
    assert hashlib.sha256((tmp_path / "answer").read_bytes()).hexdigest() == digest
    assert stored.header.values == {"task": "task-9"} and list(stored) == ["0/delta/w"]
    assert (stored["0/delta/w"] == SENT.num_examples * SENT.delta["w"].astype("f8")).all()
    unknown = FoldRequest("fedtomorrow", {}, 4, 5, None, (Member(4, "task-1"),))
    with pytest.raises(CannotFold, match="does not know what to fold"):
        fold(unknown, "task-9", kept, tmp_path / "answer")
    content = bytearray(kept.of("task-1").path.read_bytes())
    content[-1] ^= 1
    kept.of("task-1").path.write_bytes(content)
    with pytest.raises(CannotFold, match="it has lost the update at position 4"):
        fold(request, "task-9", kept, tmp_path / "answer")
