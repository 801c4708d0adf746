"""Worker processes report in lines, fail in one sentence and do not outlive their parent."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.processes.process import PARENT_VARIABLE


def start(tmp_path: Path, body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a worker whose `work(path, report)` has the given body."""
    code = f"import os\nfrom edge_client.processes import process\ndef work(path, report):\n    {body}\nprocess.serve(work)\n"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "job.json")],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_only_reports_reach_standard_output(tmp_path: Path) -> None:
    done = start(tmp_path, "print('from python'); os.system('echo from C'); report(step=1)")
    assert done.returncode == 0
    assert done.stdout == '{"step": 1}\n'
    assert "from python" in done.stderr
    assert "from C" in done.stderr


def test_an_error_of_ours_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    done = start(tmp_path, "from models.job import JobError; raise JobError('epochs is -1')")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"error": "epochs is -1"}
    assert done.stderr == ""


@pytest.mark.parametrize("error", ["ValueError", "ZeroDivisionError"])
def test_any_other_error_leaves_its_traceback_in_the_log(tmp_path: Path, error: str) -> None:
    done = start(tmp_path, f"raise {error}('inside')")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"error": f"{error}: inside"}
    assert "Traceback" in done.stderr


def test_a_worker_whose_parent_is_already_gone_does_nothing(tmp_path: Path) -> None:
    orphan = start(tmp_path, "report(step=1)", **{PARENT_VARIABLE: "1"})
    assert (orphan.returncode, orphan.stdout) == (1, "")
    child = start(tmp_path, "report(step=1)", **{PARENT_VARIABLE: str(os.getpid())})
    assert (child.returncode, child.stdout) == (0, '{"step": 1}\n')


def test_a_bound_program_dies_with_whoever_started_it() -> None:
    parent = (
        "import os, subprocess, sys\n"
        "from edge_client.processes import process\n"
        "child = subprocess.Popen(process.tie_to_parent(['/bin/sleep', '1000']), env=process.worker_environment())\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        child = int(started.stdout.readline())
        with_pid = os.pidfd_open(child)
        started.kill()
        assert select.select([with_pid], [], [], 60)[0], "the child lives on"
        os.close(with_pid)
