"""Processes that measure for the planner: what they find decides, and none outlives whoever started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edge_client.processes import process
from models import job as jobs
from models.job import JobError
from models.pretrain.planner import bench_workers

pytestmark = pytest.mark.slow

HIRE = """
import sys, pathlib
from models import job as jobs
from models.pretrain.planner import bench_workers
with bench_workers.start(jobs.read(pathlib.Path(sys.argv[1])), 2) as workers:
    print(*(each.pid for each in workers.processes), flush=True)
    while True:
        workers.request("alone", processes=1)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = {"name": "gpt", "input_shape": [16], "classes": 32, "input_dtype": "int32", "task": "next_token"}
    job = {
        "model": {**model, "options": {"width": 16, "layers": 2, "heads": 2}},
        "options": {"batch_size": 4, "steps": 10},
        "plan": {"cp": 1, "zero": 0, "activation_checkpoint": "none"},
        "planner": {"processes": 2, "measure": 4},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    return tmp_path / "job.json"


@pytest.mark.extended
def test_the_fastest_measured_of_several_kinds_is_chosen(path: Path) -> None:
    command = [sys.executable, "-P", "-m", "models.pretrain.planner", str(path)]
    subprocess.run(command, check=True, env=process.worker_environment(), stdout=subprocess.PIPE)
    found = json.loads((path.parent / "result.json").read_text())
    measured = [row["measured"] for row in found["ranking"] if row["measured"] is not None]
    assert len(measured) >= 3
    assert measured == sorted(measured) and found["ranking"][0]["measured"] == measured[0]
    assert "measured" in found["explanation"][0]
    degrees = {row["plan"].partition(",")[0] for row in found["ranking"] if row["measured"] is not None}
    assert {"dp=2", "tp=2", "pp=2"} <= degrees  # and dp=1 where one process is faster than two
    assert all(seconds >= 0 for seconds in found["profile"]["overhead"].values())


@pytest.mark.extended
def test_measuring_ends_after_a_turn_that_took_long_enough(path: Path) -> None:
    with bench_workers.start(jobs.read(path), 1) as workers:
        parameters = {"plans": ["dp=1"], "turns": 3, "race": False, "batch_size": 2}
        assert len(workers.request("steps", **parameters, enough_seconds=0.0)["dp=1"]) == 2
        assert len(workers.request("steps", **parameters, enough_seconds=1e9)["dp=1"]) == 6


def test_a_process_that_dies_is_reported_and_no_other_is_left(path: Path) -> None:
    with bench_workers.start(jobs.read(path), 2) as workers:
        pids = [each.pid for each in workers.processes]
        os.kill(pids[1], signal.SIGKILL)
        workers.processes[1].wait()
        with pytest.raises(JobError, match="a measuring process failed"):
            workers.request("machine")
    for each in workers.processes:
        assert each.returncode is not None


def test_processes_die_with_a_planner_that_is_killed(path: Path) -> None:
    command = [sys.executable, "-P", "-c", HIRE, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as planner:
        assert planner.stdout is not None
        pids = [int(pid) for pid in planner.stdout.readline().split()]
        planner.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() and not _zombie(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
