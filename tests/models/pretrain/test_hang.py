"""A training that stands still ends, and says who was waited for."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from models.pretrain.recovery import hang
from models.pretrain.recovery.hang import Watchdog
from models.pretrain.recovery.statuses import HUNG
from tests.support import pretraining


def record(step: int, called: int, last: str = "gloo:all_reduce") -> dict[str, Any]:
    return {"step": step, "called": called, "last": {"profiling_name": last}}


def test_a_process_that_left_no_record_is_named() -> None:
    messages = hang.diagnosis({0: record(4, 9), 2: record(4, 9)}, 4, 60)
    assert "step 5 did not end within 60 s" in messages
    assert "ranks 1, 3 did not respond" in messages
    assert "gloo:all_reduce" in messages


@pytest.mark.parametrize("late", [record(3, 9), record(4, 8)])
def test_else_who_has_done_least_is_named(late: dict[str, Any]) -> None:
    assert "waited for rank 1," in hang.diagnosis({0: record(4, 9), 1: late}, 2, 60)


def test_nobody_is_named_where_all_are_alike() -> None:
    messages = hang.diagnosis({0: record(4, 9), 1: record(4, 9)}, 2, 60)
    assert "rank 0" not in messages
    assert "rank 1" not in messages


def test_watch_ends_a_process_without_steps_and_leaves_its_stacks(tmp_path: Path) -> None:
    messages: list[str] = []
    watch = Watchdog(tmp_path, 0, 1, 0.05, messages.append)
    watch.heartbeat(0)
    watch._thread.join()
    assert "step 1 did not end" in messages[0]
    assert "Current thread" in (tmp_path / "hang-rank0.txt").read_text()
    assert (
        test_watch_ends_a_process_without_steps_and_leaves_its_stacks.__name__
        in (tmp_path / "hang-rank0.txt").read_text()
    )


def test_watch_that_is_closed_ends_nothing(tmp_path: Path) -> None:
    messages: list[str] = []
    watch = Watchdog(tmp_path, 0, 1, 1000, messages.append)
    watch.heartbeat(0)
    watch.close()
    assert not messages
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.extended
def test_a_stopped_process_is_named_and_the_job_ends(tmp_path: Path) -> None:
    job = pretraining.write_job(tmp_path, steps=20_000)
    pretraining.change(job, hang_seconds=6, checkpoint={"every": 1000})
    with pretraining.training(job, 2) as agent:
        agent.reaches(1)
        workers = agent.workers
        pretraining.kill(workers[1], signal.SIGSTOP)
        assert agent.ended() not in (0, HUNG)
        assert not any(pretraining.is_alive(worker) for worker in workers)
    (error,) = [line["error"] for line in agent.lines if "error" in line]
    (waited,) = [rank for rank in (0, 1) if (tmp_path / f"hang-rank{rank}.json").exists()]
    assert f"rank {1 - waited} did not respond, as if suspended" in error
    assert "gloo:all_reduce" in error
    assert "train_step" in (tmp_path / f"hang-rank{waited}.txt").read_text()
