"""The worker process of a datacenter job: started, followed line by line, and killed with its parent.

A worker prints JSON objects on standard output: progress, `error`, or `status`. Its temporary files lie in a private folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from coordinator.errors import RunInterrupted
from coordinator.storage.private_folders import private_folder
from edge_client.processes.process import FROM_INPUT, worker_environment

Stage = Literal[
    "tokenize",
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
    "convert",
]
OnProgress = Callable[[Mapping[str, Any]], None]
Supervisor = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Runs beside a worker. It receives a function, callable from any thread, that makes the worker save its work and stop."""

LOG_NAME = "log.txt"

_MODULES: Mapping[Stage, str] = {
    "tokenize": "models.datasets.token_files.tokenize_process",
    "load": "models.datasets.job_arrays",
    "check": "models.pretrain.check",
    "plan": "models.pretrain.planner",
    "tune": "models.pretrain.planner.tune",
    "pretrain": "models.pretrain.training_process",
    "serve": "models.pretrain.parameter_server",
    "compress": "models.compress.compression_process",
    "search": "models.compress.search",
    "export": "models.release.inference",
    "keras": "models.release.keras_inference",
    "onnx-export": "models.onnx.export",
    "onnx-import": "models.onnx.import_file",
    "convert": "models.pretrain.convert",
}


class JobFailed(RunInterrupted):
    """A job ended without a result.

    Attributes:
        reason: one sentence for a person.
        summary: the stage and the reason, for output where the log does not remain.
        log: the worker's standard error.
    """

    def __init__(self, stage: Stage, reason: str, log: Path) -> None:
        super().__init__(f"{stage} failed: {reason} (log: {log})")
        self.summary = f"{stage} failed: {reason}"
        self.reason = reason
        self.log = log


class JobPreempted(JobFailed):
    """A job received a signal to stop and saved its work; `jobs.resume` continues it."""

    exit_status = 75


class ReadyWorker:
    """A worker of a pretraining that imports its modules while the data is loaded. It checks jobs, and then trains one.

    Attributes:
        processes: that will train.
        log: its standard error.
    """

    def __init__(self, processes: int, worker: subprocess.Popen[bytes], log: Path) -> None:
        self.processes, self.worker, self.log = processes, worker, log
        self._status: int | None = None

    def takes(self, stage: Stage, processes: int, folder: Path) -> bool:
        """Whether it can run this job; a worker that has ended takes none."""
        fits = stage == "check" or (
            stage == "pretrain" and processes == self.processes and folder == self.log.parent
        )
        return fits and self.worker.poll() is None and self.worker.stdin is not None

    def begin(self, stage: Stage, path: Path) -> None:
        """Gives it the job file `path`; there is none after a `pretrain`."""
        assert self.worker.stdin is not None
        if stage == "pretrain":
            os.truncate(self.log, 0)  # what importing wrote, or an earlier attempt
        with suppress(BrokenPipeError):  # how it ended is seen below
            self.worker.stdin.write(f"{'' if stage == 'pretrain' else stage} {path}\n".encode())
            self.worker.stdin.flush()
            if stage == "pretrain":
                self.worker.stdin.close()

    def lines(self) -> Iterator[dict[str, Any]]:
        """The reports of the job, up to its end."""
        for line in _objects(self.worker.stdout):
            if "ended" in line:
                self._status = int(line["ended"])
                return
            yield line

    def wait(self) -> int:
        """The exit status of the job; that of the process if it ended with it."""
        status, self._status = self._status, None
        return self.worker.wait() if status is None else status


@contextmanager
def ready_worker(processes: int, folder: Path) -> Iterator[ReadyWorker]:
    """A worker for the pretraining in `folder`, which ends with the context."""
    log = folder / LOG_NAME
    with private_folder() as scratch, log.open("ab") as stderr:
        command = _command("pretrain", processes, FROM_INPUT)
        with _started(command, stderr, scratch, stdin=subprocess.PIPE) as worker:
            yield ReadyWorker(processes, worker, log)


def run_worker(
    stage: Stage,
    processes: int,
    folder: Path,
    on_progress: OnProgress,
    supervisor: Supervisor,
    ready: ReadyWorker | None = None,
) -> None:
    """Runs the worker of the job in `folder` until it ends; one that is `ready`, if that can run the job.

    Raises:
        JobPreempted: the worker was told to stop and saved its work.
        JobFailed: it reported an error or exited with one.
    """
    log, path = folder / LOG_NAME, folder.absolute() / "job.json"
    if ready is not None and ready.takes(stage, processes, folder):
        ready.begin(stage, path)
        _follow(stage, ready.worker, ready.lines(), ready.wait, ready.log, on_progress, supervisor)
        return
    with (
        private_folder() as scratch,
        log.open("wb") as stderr,
        _started(_command(stage, processes, str(path)), stderr, scratch) as worker,
    ):
        _follow(stage, worker, _objects(worker.stdout), worker.wait, log, on_progress, supervisor)


def _follow(
    stage: Stage,
    worker: subprocess.Popen[bytes],
    lines: Iterator[dict[str, Any]],
    wait: Callable[[], int],
    log: Path,
    on_progress: OnProgress,
    supervisor: Supervisor,
) -> None:
    errors: list[str] = []
    preempted, stopping = False, threading.Event()
    with supervisor(_stop_function(worker, stopping)):
        for line in lines:
            if "error" in line:
                errors.append(str(line["error"]))
            elif line.get("status") == "preempted":
                preempted = True
            elif line.get("status") == "restarting":
                errors.clear()  # its processes restart from their last checkpoint
                preempted = False
            else:
                on_progress(line)
        status = wait()
    # A worker that is stopped before its first step may exit with any status; it has nothing to save.
    if (preempted and not errors) or (status and stopping.is_set()):
        raise JobPreempted(stage, "it received a signal to stop, and saved its work", log)
    if status or errors:
        # When one rank fails, the others fail because of it: the first reason is the cause.
        raise JobFailed(stage, errors[0] if errors else exit_reason(status, log), log)


def _command(stage: Stage, processes: int, path: str) -> list[str]:
    # -P keeps the working directory, where a user may have a models.py, off sys.path
    python = [sys.executable, "-P", "-m"]
    if stage == "pretrain" and path != FROM_INPUT and "hosts" in json.loads(Path(path).read_bytes()):
        return [*python, "models.pretrain.hosts", path]
    if stage == "pretrain" and processes > 1:
        return [*python, "models.pretrain.launch", str(processes), path]
    return [*python, _MODULES[stage], path]


@contextmanager
def _started(
    command: list[str], stderr: IO[bytes], scratch: Path, stdin: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """The worker, killed on exit if it still runs. Its temporary files, which may hold rows, lie in `scratch`.

    It runs in its own session, so Ctrl-C in a terminal reaches only this process, which then kills the worker.
    """
    worker = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=worker_environment() | {"TMPDIR": str(scratch)},
        start_new_session=True,
    )
    try:
        yield worker
    finally:
        worker.kill()  # its own children die with it, see edge_client.processes.process
        worker.wait()
        for stream in (worker.stdin, worker.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def _stop_function(worker: subprocess.Popen[bytes], stopping: threading.Event) -> Callable[[], None]:
    def stop() -> None:
        stopping.set()
        worker.terminate()

    return stop


def _objects(stream: IO[bytes] | None) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of `stream`; torchrun prints other lines too."""
    for line in stream or ():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def exit_reason(status: int, log: Path) -> str:
    """A clause that says how a worker without a message of its own ended. `log`: its standard error."""
    if status < 0:
        name = signal.Signals(-status).name
        return f"the worker was ended by {name}" + ("; was memory short?" if name == "SIGKILL" else "")
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"the worker exited with status {status}" + (f": {lines[-1].strip()}" if lines else "")
