"""Datacenter jobs: pretraining, planning and compression as worker processes.

`run` writes the job file and its arrays into a folder, starts the worker, hands its progress on as it
comes, and returns what the worker left in `result.json`. Frameworks are imported there and never here, and
a crash there is a `JobFailed` here. The worker and everything it starts die with this process, SIGKILL
included, so an interrupted run leaves nothing behind that holds memory or ports.

The folder is all there is of a job. `record.json` says how far it came, `events.jsonl` what happened. A job whose
starter was killed is `started` in its record while nobody holds its lock: `unfinished` finds it, `resume` takes it
up again, and the worker goes on from its last checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from coordinator.rounds.events import Clock, EventLog, LineFile
from edge_client.files import write_durably
from edge_client.process import worker_environment

Stage = Literal[
    "load",
    "check",
    "plan",
    "tune",
    "pretrain",
    "serve",
    "compress",
    "search",
    "export",
    "keras",
    "onnx-export",
    "onnx-import",
]
State = Literal["started", "finished", "failed", "preempted"]
OnProgress = Callable[[Mapping[str, Any]], None]
Beside = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""What goes on beside a worker. Is given a function, callable from any thread, that has the worker save its work and stop."""

LOG_NAME = "log.txt"
_RECORD, _EVENTS, _LOCK = "record.json", "events.jsonl", ".job.lock"

_MODULES: Mapping[Stage, str] = {
    "load": "models.datasets.worker",
    "check": "models.pretrain.check",
    "plan": "models.pretrain.planner",
    "tune": "models.pretrain.planner.tune",
    "pretrain": "models.pretrain.worker",
    "serve": "models.pretrain.server",
    "compress": "models.compress.worker",
    "search": "models.compress.search",
    "export": "models.export.inference",
    "keras": "models.export.keras_inference",
    "onnx-export": "models.export.onnx_export",
    "onnx-import": "models.export.onnx_import",
}


class JobFailed(RuntimeError):
    """A job ended without a result.

    Attributes:
        reason: one sentence for a person.
        log: the worker's standard error.
    """

    def __init__(self, stage: Stage, reason: str, log: Path) -> None:
        super().__init__(f"{stage} failed: {reason} (log: {log})")
        self.reason = reason
        self.log = log


class JobPreempted(JobFailed):
    """A job made room for another, its work saved; `resume` goes on with it."""


@dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Attributes:
        model: `name`, `input_shape`, `classes` and, where they differ from the defaults, `options`,
            `input_dtype`, `task`.
        arrays: `x_train`, `y_train`, `x_test`, `y_test`; a compression may have `x_extra`, unlabelled. Or the
            folder where they lie.
        options: of the stage, such as `models.pretrain.training.Options`.
        params: what to compress.
        processes: of a pretraining.
        plan: of a pretraining, keys of `models.pretrain.plan.ParallelPlan`; without one all is dp.
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
    """How far a job came, as kept in its folder.

    Attributes:
        state: `started` while it runs, and after its starter was killed; `preempted` when it was asked to stop.
        attempts: how often it was started.
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
    job: Job,
    folder: Path,
    on_progress: OnProgress = lambda line: None,
    clock: Clock = lambda: datetime.now(UTC),
    beside: Beside = lambda stop: nullcontext(),
) -> dict[str, Any]:
    """Runs `job` in a process of its own and gives the contents of its `result.json`.

    `folder` then holds `job.json`, `arrays/`, `log.txt`, `result.json` and the stage's files:
    `model.safetensors`, `model.tflite`. Blocks until the worker ended;
    an exception in `on_progress` ends it.

    Raises:
        JobPreempted: the worker was asked to stop, and did before it was done.
        JobFailed: with the worker's own reason, if it gave one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(job.stage, folder):
        (folder / _EVENTS).unlink(missing_ok=True)
        _write(job, folder)
        return _attempt(
            Record(job.stage, job.processes, "started", 1, ""), folder, on_progress, clock, beside
        )


def resume(
    folder: Path,
    on_progress: OnProgress = lambda line: None,
    clock: Clock = lambda: datetime.now(UTC),
    beside: Beside = lambda stop: nullcontext(),
) -> dict[str, Any]:
    """Takes up the job in `folder`, which `run` began; of a finished one only gives the result.

    Raises:
        JobFailed: as `run`; or there is no job, or somebody else is running it.
    """
    record = read(folder)
    if record is None:
        raise JobFailed("pretrain", f"there is no job in {folder}", folder / LOG_NAME)
    with _locked(record.stage, folder):
        record = read(folder) or record  # another may have finished it meanwhile
        if record.state == "finished":
            return _result(record.stage, folder)
        return _attempt(replace(record, attempts=record.attempts + 1), folder, on_progress, clock, beside)


def read(folder: Path) -> Record | None:
    """The record of the job in `folder`; None where none was ever started."""
    try:
        return Record(**json.loads((folder / _RECORD).read_text("utf-8")))
    except FileNotFoundError:
        return None


def unfinished(root: Path) -> list[Path]:
    """Folders under `root` with jobs that can be resumed: preempted ones, and those whose starter died."""
    found = []
    for path in sorted(root.rglob(_RECORD)):
        record = read(path.parent)
        if record is None or record.state not in ("started", "preempted"):
            continue
        try:
            with _locked(record.stage, path.parent):
                found.append(path.parent)
        except JobFailed:
            continue  # it runs
    return found


def _attempt(
    record: Record, folder: Path, on_progress: OnProgress, clock: Clock, beside: Beside
) -> dict[str, Any]:
    """Starts the worker once, and keeps record of how it ended."""
    lines = LineFile(folder / _EVENTS)
    emit = EventLog(lines, clock)
    record = replace(record, state="started", started=clock().isoformat(), ended="", reason="")

    def ended(state: State, reason: str = "") -> None:
        _keep(replace(record, state=state, ended=clock().isoformat(), reason=reason), folder)
        emit(f"job_{state}", stage=record.stage, **({"reason": reason} if reason else {}))

    def heard(line: Mapping[str, Any]) -> None:
        emit("progress", **line)
        on_progress(line)

    try:
        _keep(record, folder)
        emit("job_started" if record.attempts == 1 else "job_resumed", stage=record.stage)
        try:
            _work(record, folder, heard, beside)
            result = _result(record.stage, folder)
        except JobPreempted:
            ended("preempted")
            raise
        except JobFailed as failure:
            ended("failed", failure.reason)
            raise
        except BaseException:  # Ctrl-C, or whoever listens has enough
            ended("preempted")
            raise
        ended("finished")
        return result
    finally:
        lines.close()


def _work(record: Record, folder: Path, on_progress: OnProgress, beside: Beside) -> None:
    log = folder / LOG_NAME
    (folder / "result.json").unlink(missing_ok=True)
    errors: list[str] = []
    preempted, asked = False, threading.Event()
    command = _command(record.stage, record.processes, folder.absolute() / "job.json")
    with log.open("wb") as stderr, _started(command, stderr) as worker, beside(_stopping(worker, asked)):
        for line in _objects(worker.stdout):
            if "error" in line:
                errors.append(str(line["error"]))
            elif line.get("status") == "preempted":
                preempted = True
            elif line.get("status") == "restarting":
                errors.clear()  # its processes start again, from their last checkpoint
                preempted = False
            else:
                on_progress(line)
        status = worker.wait()
    # one that is asked before its first step ends as it can, and has nothing to save
    if (preempted and not errors) or (status and asked.is_set()):
        raise JobPreempted(record.stage, "it was asked to make room and saved its work", log)
    if status or errors:
        # when one rank fails the others fail because of it: the first reason is the cause
        raise JobFailed(record.stage, errors[0] if errors else _last_words(status, log), log)


def _stopping(worker: subprocess.Popen[bytes], asked: threading.Event) -> Callable[[], None]:
    def stop() -> None:
        asked.set()
        worker.terminate()

    return stop


def _result(stage: Stage, folder: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobFailed(
            stage, f"the worker ended well but left no result: {error}", folder / LOG_NAME
        ) from error
    return result


def _write(job: Job, folder: Path) -> None:
    """The job file, with its arrays and no others beside it."""
    arrays = folder / "arrays"
    if isinstance(job.arrays, Path):
        arrays = job.arrays
    else:
        arrays.mkdir(exist_ok=True)
        for earlier in arrays.glob("*.npy"):
            earlier.unlink()
        for name, array in job.arrays.items():
            np.save(arrays / f"{name}.npy", array, allow_pickle=False)
    settings: dict[str, Any] = {
        "model": dict(job.model),
        "arrays": str(arrays.absolute()) if isinstance(job.arrays, Path) else "arrays",
        "out": ".",
        "seed": job.seed,
        "options": dict(job.options),
        **job.more,
    }
    if job.plan:
        settings["plan"] = dict(job.plan)
    if job.params is not None:
        settings["params"] = str(job.params.absolute())
    write_durably(folder / "job.json", (json.dumps(settings, indent=2) + "\n").encode())


def _command(stage: Stage, processes: int, path: Path) -> list[str]:
    # -P keeps the working directory off sys.path, where a user may have a models.py of their own
    python = [sys.executable, "-P", "-m"]
    if stage == "pretrain" and processes > 1:
        return [*python, "models.pretrain.launch", str(processes), str(path)]
    return [*python, _MODULES[stage], str(path)]


def _keep(record: Record, folder: Path) -> None:
    write_durably(folder / _RECORD, (json.dumps(asdict(record), indent=2) + "\n").encode())


@contextmanager
def _locked(stage: Stage, folder: Path) -> Iterator[None]:
    """Keeps a second process off the job; the kernel lets go of the lock when this one ends."""
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobFailed(
                stage, f"another process is running the job in {folder}", folder / LOG_NAME
            ) from None
        yield


@contextmanager
def _started(command: list[str], stderr: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The worker, killed on the way out if it still runs.

    It has a session of its own, so that Ctrl-C in a terminal reaches us alone and we end it.
    """
    worker = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=worker_environment(),
        start_new_session=True,
    )
    try:
        yield worker
    finally:
        worker.kill()  # what it started itself dies with it, see edge_client.process
        worker.wait()
        if worker.stdout is not None:
            worker.stdout.close()


def _objects(stream: IO[bytes] | None) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of `stream`; torchrun prints others."""
    for line in stream or ():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _last_words(status: int, log: Path) -> str:
    """Why a worker ended that said nothing itself."""
    if status < 0:
        name = signal.Signals(-status).name
        return f"the worker was ended by {name}" + ("; was memory short?" if name == "SIGKILL" else "")
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"the worker exited with status {status}" + (f": {lines[-1].strip()}" if lines else "")
