"""Datacenter jobs: pretraining, planning and compression as worker processes.

`run` writes the job file and its arrays into a folder, starts the worker, passes on its progress and returns the contents
of `result.json`. Frameworks are imported in the worker only, and a crash there raises `JobFailed` here. The worker and
everything it starts die with this process, even on SIGKILL, so an interrupted run leaves nothing that holds memory or ports.

The folder is the complete state of a job: `record.json` holds its state, `events.jsonl` its history. If the parent is killed,
the record still reads `started` but nobody holds the lock; `resume` continues such a job from the worker's last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from coordinator.datacenter.documents import write_document
from coordinator.datacenter.job_worker import (
    LOG_NAME,
    JobFailed,
    JobPreempted,
    OnProgress,
    ReadyWorker,
    Stage,
    Supervisor,
    run_worker,
)
from coordinator.datacenter.pretrain_queue import Queue
from coordinator.output_folders import locked
from coordinator.reports.progress import Progress, Quiet
from coordinator.rounds.events import Clock, EventLog, LineFile
from edge_client.files import write_durably

if TYPE_CHECKING:
    from coordinator.datacenter.pretrain_hosts import Hosts

State = Literal["started", "finished", "failed", "preempted"]

_RECORD, _EVENTS, _LOCK, _JOB = "record.json", "events.jsonl", ".job.lock", "job.json"


@dataclass(frozen=True)
class Environment:
    """The environment of a datacenter command.

    Attributes:
        queue: where a pretraining waits for slots; without one it starts at once.
        hosts: where a pretraining trains; without them on this machine.
        supervisor: runs beside the worker of a pretraining that saves its work when it is stopped.
    """

    data_dir: Path | None = None
    progress: Progress = Quiet()  # noqa: RUF009 - stateless
    clock: Clock = lambda: datetime.now(UTC)
    queue: Queue | None = None
    hosts: Hosts | None = None
    supervisor: Supervisor = lambda stop: nullcontext()


@dataclass(frozen=True)
class DatacenterJob:
    """The work of a worker.

    Attributes:
        model: `name`, `input_shape`, `classes` and, where they differ from the defaults, `options`,
            `input_dtype`, `task`.
        arrays: `x_train`, `y_train`, `x_test`, `y_test`; a compression may have `x_extra`, unlabelled. Or the
            folder that holds them.
        options: of the stage, such as `models.pretrain.training.TrainingOptions`.
        params: file to start from.
        processes: of a pretraining.
        plan: of a pretraining, keys of `models.pretrain.plan.ParallelPlan`; empty means data parallel only.
        more: further keys of the job file, such as `checkpoint` of a pretraining and `steps` of a compression.
    """

    stage: Stage
    model: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]] | Path
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    params: Path | None = None
    processes: int = 1
    plan: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """The state of a job, as stored in its folder.

    Attributes:
        state: `started` while it runs, and after its parent was killed; `preempted` after it was told to stop.
        attempts: number of starts.
        started, ended: ISO times of the last attempt.
        reason: why it failed.
    """

    stage: Stage
    processes: int
    state: State
    attempts: int
    started: str
    ended: str = ""
    reason: str = ""


def run(
    job: DatacenterJob,
    folder: Path,
    on_progress: OnProgress = lambda line: None,
    clock: Clock = lambda: datetime.now(UTC),
    supervisor: Supervisor = lambda stop: nullcontext(),
    ready: ReadyWorker | None = None,
) -> dict[str, Any]:
    """Runs `job` in its own process, `ready` if that can, and returns the contents of its `result.json`.

    `folder` then holds `job.json`, `arrays/`, `log.txt`, `result.json` and the stage's files:
    `model.safetensors`, `model.tflite`. Blocks until the worker ends;
    an exception in `on_progress` ends it.

    Raises:
        JobPreempted: the worker was told to stop, and did so before it was done.
        JobFailed: with the worker's own reason, if it reported one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(job.stage, folder):
        (folder / _EVENTS).unlink(missing_ok=True)
        _write_job(job, folder)
        record = Record(job.stage, job.processes, "started", 1, "")
        return _attempt(record, folder, on_progress, clock, supervisor, ready)


def resume(
    folder: Path,
    on_progress: OnProgress = lambda line: None,
    clock: Clock = lambda: datetime.now(UTC),
    supervisor: Supervisor = lambda stop: nullcontext(),
    ready: ReadyWorker | None = None,
) -> dict[str, Any]:
    """Continues the job in `folder` that `run` started; returns the stored result of a finished one.

    Raises:
        JobFailed: as `run`; or there is no job, or another process is running it.
    """
    record = read(folder)
    if record is None:
        raise JobFailed("pretrain", f"there is no job in {folder}", folder / LOG_NAME)
    with _locked(record.stage, folder):
        record = read(folder) or record  # another process may have finished it meanwhile
        if record.state == "finished":
            return _result(record.stage, folder)
        record = replace(record, attempts=record.attempts + 1)
        return _attempt(record, folder, on_progress, clock, supervisor, ready)


def reconfigure(job: DatacenterJob, folder: Path) -> None:
    """Replaces the job in `folder` by `job`, which `resume` then continues even if the old one had finished.

    An unchanged job keeps its state. The arrays of `job` are in another folder.

    Raises:
        JobFailed: another process is running it.
    """
    with _locked(job.stage, folder):
        record, path, content = read(folder), folder / _JOB, _job_file(job)
        if record is not None and not (path.exists() and path.read_bytes() == content):
            _write_record(replace(record, processes=job.processes, state="preempted"), folder)
            write_durably(path, content)


def read(folder: Path) -> Record | None:
    """The record of the job in `folder`; None if none was started."""
    try:
        return Record(**json.loads((folder / _RECORD).read_text("utf-8")))
    except FileNotFoundError:
        return None


def _attempt(
    record: Record,
    folder: Path,
    on_progress: OnProgress,
    clock: Clock,
    supervisor: Supervisor,
    ready: ReadyWorker | None,
) -> dict[str, Any]:
    lines = LineFile(folder / _EVENTS)
    emit = EventLog(lines, clock)
    record = replace(record, state="started", started=clock().isoformat(), ended="", reason="")

    def end(state: State, reason: str = "") -> None:
        _write_record(replace(record, state=state, ended=clock().isoformat(), reason=reason), folder)
        emit(f"job_{state}", stage=record.stage, **({"reason": reason} if reason else {}))

    def forward(line: Mapping[str, Any]) -> None:
        emit("progress", **line)
        on_progress(line)

    try:
        _write_record(record, folder)
        emit("job_started" if record.attempts == 1 else "job_resumed", stage=record.stage)
        try:
            (folder / "result.json").unlink(missing_ok=True)
            run_worker(record.stage, record.processes, folder, forward, supervisor, ready)
            result = _result(record.stage, folder)
        except JobPreempted:
            end("preempted")
            raise
        except JobFailed as failure:
            end("failed", failure.reason)
            raise
        except BaseException:  # Ctrl-C, or an exception in `on_progress`
            end("preempted")
            raise
        end("finished")
        return result
    finally:
        lines.close()


def _result(stage: Stage, folder: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobFailed(
            stage, f"the worker succeeded but left no result: {error}", folder / LOG_NAME
        ) from error
    return result


def _write_job(job: DatacenterJob, folder: Path) -> None:
    """Writes the job file and exactly its arrays into `folder`."""
    if not isinstance(job.arrays, Path):
        arrays = folder / "arrays"
        arrays.mkdir(mode=0o700, exist_ok=True)
        # It holds rows of data: readable by the owner only, even if an earlier version created it. A sandbox refuses chmod.
        if arrays.stat().st_mode & 0o077:
            arrays.chmod(0o700)
        for earlier in arrays.glob("*.npy"):
            earlier.unlink()
        for name, array in job.arrays.items():
            np.save(arrays / f"{name}.npy", array, allow_pickle=False)
    write_durably(folder / _JOB, _job_file(job))


def _job_file(job: DatacenterJob) -> bytes:
    settings: dict[str, Any] = {
        "model": dict(job.model),
        "arrays": str(job.arrays.absolute()) if isinstance(job.arrays, Path) else "arrays",
        "out": ".",
        "seed": job.seed,
        "options": dict(job.options),
        **job.more,
    }
    if job.plan:
        settings["plan"] = dict(job.plan)
    if job.params is not None:
        settings["params"] = str(job.params.absolute())
    return (json.dumps(settings, indent=2) + "\n").encode()


def _write_record(record: Record, folder: Path) -> None:
    write_document(folder / _RECORD, asdict(record))


def _locked(stage: Stage, folder: Path) -> AbstractContextManager[None]:
    """Keeps other processes off the job."""
    taken = JobFailed(stage, f"another process is running the job in {folder}", folder / LOG_NAME)
    return locked(folder / _LOCK, taken)
