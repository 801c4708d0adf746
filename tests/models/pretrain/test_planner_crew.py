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

from edge_client import process
from models import job as jobs
from models.job import JobError
from models.pretrain.planner import crew

pytestmark = pytest.mark.slow

HIRE = """
import sys, pathlib
from models import job as jobs
from models.pretrain.planner import crew
with crew.hired(jobs.read(pathlib.Path(sys.argv[1])), 2) as crew:
    print(*(each.pid for each in crew.started), flush=True)
    while True:
        crew.ask("alone", processes=1)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = {"name": "gpt", "input_shape": [16], "classes": 32, "input_dtype": "int32", "task": "next_token"}
    job = {
        "model": {**model, "options": {"width": 16, "layers": 2, "heads": 2}},
        "options": {"batch_size": 4, "steps": 10},
        "plan": {"cp": 1, "zero": 0, "recompute": "none"},
        "planner": {"processes": 2, "measure": 3},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    return tmp_path / "job.json"


def test_the_fastest_measured_of_several_kinds_is_chosen(path: Path) -> None:
    command = [sys.executable, "-P", "-m", "models.pretrain.planner", str(path)]
    subprocess.run(command, check=True, env=process.worker_environment(), stdout=subprocess.PIPE)
    found = json.loads((path.parent / "result.json").read_text())
    measured = [row["measured"] for row in found["ranking"] if row["measured"] is not None]
    assert len(measured) >= 3
    assert measured == sorted(measured) and found["ranking"][0]["measured"] == measured[0]
    assert "measured" in found["explanation"][0]
    degrees = {row["plan"].partition(",")[0] for row in found["ranking"] if row["measured"] is not None}
    assert degrees == {"dp=2", "tp=2", "pp=2"}
    assert all(seconds >= 0 for seconds in found["profile"]["overhead"].values())


def test_a_process_that_dies_is_told_and_no_other_is_left(path: Path) -> None:
    with crew.hired(jobs.read(path), 2) as found:
        pids = [each.pid for each in found.started]
        os.kill(pids[1], signal.SIGKILL)
        found.started[1].wait()
        with pytest.raises(JobError, match="a measuring process failed"):
            found.ask("machine")
    for each in found.started:
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
