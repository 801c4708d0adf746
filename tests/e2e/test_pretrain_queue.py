"""Two `fedloop pretrain` on the slots of one: the more urgent has its turn, and the other loses nothing."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from coordinator.datacenter.job_worker import Supervisor
from coordinator.datacenter.pretrain_queue import Queue
from tests.support.cli import Started, assert_refused, options, report_of, run_cli, run_here, started
from tests.support.pretraining import training
from tests.support.processes import HANGS_SECONDS

pytestmark = pytest.mark.slow

STEPS = 400


def requested(queue: Path, out: Path, steps: int) -> list[str | Path]:
    small = options(("model.name=mlp", f"train.steps={steps}", "checkpoint.every=1000"))
    return ["pretrain", "--plan", "dp=2", "--slots", "2", "--queue", queue, "--out", out, *small]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "curve.jsonl").read_text().splitlines()]


def is_training(command: Started, out: Path) -> bool:
    """Whether it reaches its first steps."""
    return command.reaches(lambda: (out / "curve.jsonl").exists() and len(losses(out)) >= 10)


@pytest.mark.extended
def test_the_urgent_one_preempts_and_the_other_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    queue, patient, urgent = (tmp_path / name for name in ("queue", "patient", "urgent"))
    with started(*requested(queue, patient, STEPS)) as first:
        assert is_training(first, patient)
        still = psutil.Process(first.process.pid).children(recursive=True)
        for process in still:  # however fast it is, it has not ended when the other comes
            process.suspend()
        with started(*requested(queue, urgent, 20), "--priority", "5") as second:
            assert second.reaches((queue / "00000002.waiting").exists)
            for process in still:
                process.resume()
            assert second.ended() == 0, second.errors()
        assert first.ended() == 0, first.errors()
        output = " ".join(first.errors().split())
    assert re.search("making room for .*urgent .priority 5.*waiting: 2 of 2.*its turn", output)
    events = [json.loads(line)["event"] for line in (patient / "events.jsonl").read_text().splitlines()]
    received = [event for event in events if event != "progress"]
    assert received == ["job_started", "job_preempted", "job_resumed", "job_finished"]
    assert report_of(patient)["attempts"] == 2 and report_of(urgent)["attempts"] == 1
    assert [path.name for path in queue.iterdir()] == [".lock"]

    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(patient / "job.json", alone)
    with training(alone / "job.json", 2) as undisturbed:
        assert undisturbed.ended() == 0
    assert len(losses(patient)) == STEPS
    assert losses(patient) == pytest.approx(losses(alone), abs=1e-5)


@pytest.mark.extended
def test_ctrl_c_while_waiting_leaves_the_queue_and_says_how_to_go_on(tmp_path: Path) -> None:
    queue, out = tmp_path / "queue", tmp_path / "later"
    with occupied(queue), started(*requested(queue, out, 20)) as waiting:
        assert waiting.reaches((queue / "00000002.waiting").exists)
        waiting.send(signal.SIGINT)
        assert waiting.ended() == 1
        assert f"fedloop pretrain --resume {out}" in " ".join(waiting.errors().split())
        assert [path.name for path in queue.glob("0*")] == ["00000001.running"]
    done = run_cli("pretrain", "--resume", out, "--slots", "2", "--queue", queue)
    assert done.returncode == 0, done.stderr
    assert "waiting" not in done.stderr
    assert len(losses(out)) == 20


def test_impossible_trainings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    queue, out = tmp_path / "queue", tmp_path / "out"
    assert_refused(run_here(*requested(queue, out, 20), "--slots", "1"), "needs 2 processes", "--slots is 1")
    none = run_here(*requested(queue, out, 20), "--set", "checkpoint.every=0")
    assert_refused(none, "no checkpoints", "checkpoint.every above 0")
    assert_refused(run_here("pretrain", "--priority", "5", "--out", out), "--priority needs --slots")
    assert not out.exists()


@contextmanager
def occupied(queue: Path) -> Iterator[None]:
    """This process has all slots meanwhile."""
    begun, over = threading.Event(), threading.Event()

    def hold(supervisor: Supervisor) -> None:
        begun.set()
        over.wait()

    thread = threading.Thread(target=lambda: Queue(queue, 2).run("tests", 2, hold))
    thread.start()
    assert begun.wait(HANGS_SECONDS)
    try:
        yield
    finally:
        over.set()
        thread.join()
