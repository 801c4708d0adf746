"""A job outlives whoever started it: its folder says how far it came, and it goes on from there."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from coordinator.datacenter import job_worker, jobs
from coordinator.datacenter.job_worker import JobFailed, JobPreempted

CLOCK = datetime(2030, 1, 1, tzinfo=UTC)
STARTER = """
import json, sys, numpy as np
from pathlib import Path
from coordinator.datacenter import jobs
folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
arrays = dict(np.load(folder / "arrays.npz"))
jobs.run(jobs.DatacenterJob("pretrain", arrays=arrays, **settings), folder / "job", lambda line: print(line["step"], flush=True))
"""


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    y = np.arange(400, dtype=np.int32) % 3
    x = ((rng.normal(size=(3, 4)) * 3)[y] + rng.normal(size=(400, 4))).astype(np.float32)
    return {"x_train": x[:300], "y_train": y[:300], "x_test": x[300:], "y_test": y[300:]}


def settings(steps: int, processes: int) -> dict[str, Any]:
    return {
        "model": {"name": "mlp", "input_shape": [4], "classes": 3},
        "options": {"steps": steps, "batch_size": 16, "lr": 0.01},
        "seed": 3,
        "processes": processes,
        "plan": {"dp": processes},
        "more": {"checkpoint": {"every": 40, "background": False}},
    }


def script(folder: Path, program: str) -> Path:
    path = folder / "worker.py"
    path.write_text(program)
    return path


def plain(folder: Path) -> jobs.DatacenterJob:
    return jobs.DatacenterJob("check", {}, {})


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_training_whose_starter_was_killed_ends_as_if_it_had_not_been(
    tmp_path: Path, processes: int
) -> None:
    requested = settings(480, processes)
    full = jobs.run(jobs.DatacenterJob("pretrain", arrays=arrays(), **requested), tmp_path / "whole")
    np.savez(tmp_path / "arrays.npz", **arrays())
    with subprocess.Popen(
        [sys.executable, "-P", "-c", STARTER, tmp_path, json.dumps(requested)], stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout is not None
        while int(starter.stdout.readline()) < 100:
            pass
        tree = psutil.Process(starter.pid).children(recursive=True)
        with pytest.raises(JobFailed, match="another process is running the job"):
            jobs.resume(tmp_path / "job")
        starter.kill()
    psutil.wait_procs(tree, timeout=600)
    folder = tmp_path / "job"
    record = jobs.read(folder)
    assert record is not None and record.state == "started"
    assert (folder / "record.json").exists() and not (folder / "result.json").exists()

    heard: list[int] = []
    resumed = jobs.resume(folder, lambda line: heard.append(line["step"]))

    assert 80 <= heard[0] < 480 and heard[0] % 40 == 0  # from a checkpoint, not from the start
    assert resumed["losses"] == full["losses"]
    assert resumed["model_sha256"] == full["model_sha256"]
    record = jobs.read(folder)
    assert record is not None and (record.state, record.attempts) == ("finished", 2)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    received = [event["event"] for event in events if event["event"] != "progress"]
    assert received == ["job_started", "job_resumed", "job_finished"]


def test_a_finished_job_gives_its_result_again_without_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = script(tmp_path, f"open({str(tmp_path / 'job' / 'result.json')!r}, 'w').write('{{\"a\": 1}}')")
    monkeypatch.setattr(job_worker, "_command", lambda stage, processes, path: [sys.executable, str(program)])
    assert jobs.run(plain(tmp_path), tmp_path / "job", clock=lambda: CLOCK) == {"a": 1}
    program.unlink()
    assert jobs.resume(tmp_path / "job") == {"a": 1}
    record = jobs.read(tmp_path / "job")
    assert record == jobs.Record("check", 1, "finished", 1, CLOCK.isoformat(), CLOCK.isoformat())


def test_a_failed_job_is_kept_with_its_reason_and_is_not_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = script(tmp_path, 'print(\'{"error": "no such model"}\')')
    monkeypatch.setattr(job_worker, "_command", lambda stage, processes, path: [sys.executable, str(program)])
    with pytest.raises(JobFailed):
        jobs.run(plain(tmp_path), tmp_path / "job")
    record = jobs.read(tmp_path / "job")
    assert record is not None and (record.state, record.reason) == ("failed", "no such model")


def test_a_job_that_made_room_is_preempted_and_can_be_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = script(tmp_path, 'import sys; print(\'{"status": "preempted"}\'); sys.exit(75)')
    monkeypatch.setattr(job_worker, "_command", lambda stage, processes, path: [sys.executable, str(program)])
    with pytest.raises(JobPreempted, match="saved its work"):
        jobs.run(plain(tmp_path), tmp_path / "job")
    record = jobs.read(tmp_path / "job")
    assert record is not None and record.state == "preempted"


def test_two_cannot_run_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = script(tmp_path, "import time; print('{}', flush=True); time.sleep(600)")
    monkeypatch.setattr(job_worker, "_command", lambda stage, processes, path: [sys.executable, str(program)])

    def again(line: object) -> None:
        jobs.resume(tmp_path / "job")

    with pytest.raises(JobFailed, match="another process is running the job"):
        jobs.run(plain(tmp_path), tmp_path / "job", again)


def test_there_is_nothing_to_resume_where_no_job_was(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="there is no job in"):
        jobs.resume(tmp_path)
