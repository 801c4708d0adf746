"""A job's progress, result and reason for failing reach us, and nothing of it outlives us."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy

from coordinator.datacenter import job_worker, jobs
from coordinator.datacenter.job_worker import JobFailed
from coordinator.storage.private_folders import PREFIX
from tests.support.long import extended

MODEL = {"name": "logreg", "input_shape": [4], "classes": 3}


@pytest.fixture(scope="module")
def job() -> jobs.DatacenterJob:
    """Three clouds of points."""
    rng = np.random.default_rng(0)
    y = np.arange(60, dtype=np.int32) % 3
    x = ((rng.normal(size=(3, 4)) * 3)[y] + rng.normal(size=(60, 4))).astype(np.float32)
    arrays = {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}
    return jobs.DatacenterJob("pretrain", MODEL, arrays, {"epochs": 30, "lr": 0.1})


def endless(job: jobs.DatacenterJob) -> jobs.DatacenterJob:
    """One that says it began, and then nothing for minutes: no write to a broken pipe ends it."""
    rows = 500_000
    arrays = {**job.arrays, "x_train": np.zeros((rows, 4), np.float32), "y_train": np.zeros(rows, np.int32)}
    return replace(job, arrays=arrays, options={"batch_size": 2})


def children() -> list[psutil.Process]:
    """Workers of jobs. Other tests of this process may have left a database server running, which stays."""
    below = psutil.Process().children(recursive=True)
    found = [each for each in below if any(word.startswith("models.") for word in words_of(each))]
    return [*found, *ranks(found)]


def ranks(workers: list[psutil.Process]) -> list[psutil.Process]:
    """What workers start: a server that has imported everything, and the processes forked from it."""
    with suppress(psutil.NoSuchProcess):
        return [each for worker in workers for each in worker.children(recursive=True)]
    return []


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; nothing of one that has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def survivors(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Which of them do not end by themselves. They are ended, so that a failing test leaves none either."""
    _, alive = psutil.wait_procs(processes, timeout=600)
    for process in alive:
        process.kill()
    return alive


@pytest.mark.slow
def test_a_teacher_and_its_student_leave_their_params_and_figures(
    job: jobs.DatacenterJob, tmp_path: Path
) -> None:
    lines: list[Mapping[str, Any]] = []
    wide = {"name": "mlp", "input_shape": [4], "classes": 3, "options": {"hidden": [16]}}
    teacher = jobs.run(replace(job, model=wide), tmp_path / "teacher", lines.append)
    assert sorted({line["epoch"] for line in lines}) == list(range(31))
    assert lines[-1]["stage"] == "pretrain"
    assert teacher["test_accuracy"] > 0.8

    arrays = {**job.arrays, "x_extra": job.arrays["x_test"]}
    lines.clear()
    compressed = jobs.run(
        replace(
            job,
            stage="compress",
            model=wide,
            arrays=arrays,
            params=tmp_path / "teacher" / "model.safetensors",
            options={},
            more={"steps": [{"kind": "distil", "student": "logreg"}]},
        ),
        tmp_path / "student",
        lines.append,
    )
    assert lines[0] == {"checked": True}
    assert [line["epoch"] for line in lines if "epoch" in line] == list(range(1, 31))
    source, student = compressed["rows"]
    assert source["accuracy"] == teacher["test_accuracy"]
    assert student["accuracy"] > 0.8
    assert student["facts"]["steps"] == 30 * -(-60 // 16)  # 40 labelled rows and 20 unlabelled
    params = safetensors.numpy.load((tmp_path / "student" / "model.safetensors").read_bytes())
    assert {name: value.shape for name, value in params.items()} == {"fc.bias": (3,), "fc.weight": (3, 4)}
    assert student["parameters"] == 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"options": {"epochs": -1}}, r"job\.json: options\.epochs is -1, expected a whole number from 1"),
        ({"processes": 2, "options": {"shift": 1}}, "no images"),
        (
            {"stage": "compress", "params": Path("/nowhere/teacher.safetensors"), "more": {"steps": []}},
            r"/nowhere/teacher\.safetensors is not a readable \.safetensors file",
        ),
        *extended(
            ({"model": {**MODEL, "name": "logregg"}}, "'logregg' is unknown, did you mean 'logreg'"),
            ({"stage": "compress", "more": {"steps": []}}, "params is missing"),
        ),
    ],
)
def test_a_failed_job_says_why_and_where_its_log_is(
    job: jobs.DatacenterJob, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(JobFailed, match=reason) as failure:
        jobs.run(replace(job, **change), tmp_path)
    assert failure.value.log == tmp_path / "log.txt"
    assert failure.value.log.exists()
    assert "Traceback" not in str(failure.value)


@pytest.mark.slow
def test_a_killed_worker_is_a_failed_job(job: jobs.DatacenterJob, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="ended by SIGKILL"):
        jobs.run(endless(job), tmp_path, lambda line: children()[0].kill())


@pytest.mark.slow
def test_a_killed_rank_is_started_again(job: jobs.DatacenterJob, tmp_path: Path) -> None:
    heard: list[Mapping[str, Any]] = []

    def kill_a_rank(line: Mapping[str, Any]) -> None:
        heard.append(line)
        if len(heard) == 1:
            children()[-1].kill()
        else:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jobs.run(replace(endless(job), processes=2), tmp_path, kill_a_rank)
    assert [line["step"] for line in heard] == [0, 0]
    assert not survivors(children())


@pytest.mark.slow
def test_stopping_to_listen_stops_the_job(job: jobs.DatacenterJob, tmp_path: Path) -> None:
    started: list[psutil.Process] = []

    def interrupt(line: Mapping[str, Any]) -> None:
        started.extend(children())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jobs.run(replace(endless(job), processes=2), tmp_path, interrupt)
    assert len(started) >= 3
    assert not survivors(started)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, *extended(1)])
def test_nothing_of_a_job_outlives_a_killed_parent(
    job: jobs.DatacenterJob, tmp_path: Path, processes: int
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import json, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from coordinator.datacenter import jobs\n"
        "model, options, processes, folder = json.loads(sys.argv[1])\n"
        "arrays = dict(np.load(folder + '/arrays.npz'))\n"
        "job = jobs.DatacenterJob('pretrain', model, arrays, options, processes=processes)\n"
        "jobs.run(job, Path(folder) / 'job', lambda line: print(line, flush=True))\n"
    )
    lasting = endless(job)
    np.savez(tmp_path / "arrays.npz", **lasting.arrays)
    settings = json.dumps([MODEL, lasting.options, processes, str(tmp_path)])
    with subprocess.Popen(
        [sys.executable, "-P", str(script), settings], stdout=subprocess.PIPE, env=dict(os.environ)
    ) as parent:
        assert parent.stdout is not None
        assert b"epoch" in parent.stdout.readline()  # it trains
        tree = psutil.Process(parent.pid).children(recursive=True)
        assert len(tree) >= (1 if processes == 1 else 3)  # torchrun's agent and two ranks
        parent.kill()
    assert not survivors(tree)


def test_results_of_an_earlier_job_are_not_taken_for_this_ones(
    job: jobs.DatacenterJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "result.json").write_text('{"test_accuracy": 1.0}')
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays" / "x_extra.npy").touch()
    monkeypatch.setattr(
        job_worker,
        "_command",
        lambda stage, processes, path: [sys.executable, "-c", "print('[1]'); print('no JSON')"],
    )
    with pytest.raises(JobFailed, match="left no result"):
        jobs.run(job, tmp_path)
    assert {path.stem for path in (tmp_path / "arrays").iterdir()} == set(job.arrays)


def test_a_worker_without_a_reason_is_quoted_from_its_log(
    job: jobs.DatacenterJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys; print('no room left', file=sys.stderr); print(file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(
        job_worker, "_command", lambda stage, processes, path: [sys.executable, "-c", program]
    )
    with pytest.raises(JobFailed, match=r"exited with status 3: no room left"):
        jobs.run(job, tmp_path)


@pytest.mark.slow
def test_temporary_files_of_a_worker_lie_in_a_private_folder(job: jobs.DatacenterJob, tmp_path: Path) -> None:
    found: list[Path] = []

    def heard(line: Mapping[str, Any]) -> None:
        (worker,) = children()
        place = Path(worker.environ()["TMPDIR"])
        assert place.name.startswith(PREFIX) and stat.S_IMODE(place.stat().st_mode) == 0o700
        found.append(place)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jobs.run(endless(job), tmp_path, heard)

    assert found and not found[0].exists()
