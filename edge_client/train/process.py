"""Training in a separate process, which can be limited, watched and killed without harming the daemon.

    with closing(TrainingProcess(log, limits)) as training:
        done = training.run(job, stop_reason)

The child (`edge_client.train.child_process`) receives one job at a time over a socket pair (`edge_client.processes.channel`) as
JSON; params, data and results are files named by the job. It stays for the next job of the same runtime, because importing a framework
takes longer than a round, and exits when no job arrives for a while.

**Limits.** The child has the kernel limit its memory and CPU time (see the worker), so that a sudden allocation
fails at once. The parent checks its resident memory and the wall clock every half second.

**End.** The child exits when its socket closes, which the kernel does however the daemon ends, and by the kernel's
parent-death signal if it is stuck in foreign code. That signal is tied to the *thread* that started the child, so
a child is used only by that thread, and another thread gets a new one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from edge_client.data import DataConfig
from edge_client.processes.channel import Closed, receive_frame, send_frame
from edge_client.processes.process import worker_environment
from edge_client.wire.device import Decline, DeclineCode, ModelRef, RuntimeName, TaskKind

POLL_SECONDS = 0.5
"""How often a running job is checked."""

STOP_SECONDS = 2.0
"""How long a child may take to exit after its socket was closed, before it is killed."""

_START_SECONDS = 60.0
_LOG_BYTES = 1_000_000
_LOG_TAIL_BYTES = 65_536


class Interrupted(Exception):
    """The job was stopped for `reason`, as `stop_reason` returned it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TrainingFailed(Exception):
    """The job cannot be done. `message` is for the device's owner, `decline` for the coordinator.

    They differ if the message may quote data or paths, which must not leave the device: `public_message` replaces it.
    """

    def __init__(self, code: DeclineCode, message: str, public_message: str | None = None) -> None:
        super().__init__(message)
        self.code: DeclineCode = code
        self.message = message
        self._public_message = public_message

    @property
    def decline(self) -> Decline:
        return Decline(self.code, self._public_message or self.message)


@dataclass(frozen=True)
class Limits:
    """Limits of a training process; 0: no limit.

    Attributes:
        memory_bytes: resident memory.
        cpu_seconds: processor time of one job.
        seconds: wall-clock time of one job, imports included.
        idle_seconds: how long the process waits for the next job.
    """

    memory_bytes: int
    cpu_seconds: float
    seconds: float
    idle_seconds: float = 60.0


@dataclass(frozen=True)
class TrainingJob:
    """One task for the child. All paths but the last two are read.

    Attributes:
        params, streams: as safetensors; None for a statistics job.
        tflite, manifest: for LiteRT.
        schema: how a table is read; None: as `data` says.
        message: the `TaskMessage` of a train job as JSON, the `StatisticsRequest` of a statistics job; else empty.
        state_in: the client rule's state after its last round, if any.
        state_out: where to write the client rule's next state, if it keeps any.
        result: where to write the result: the upload of a train job; JSON with `rows`, `labels`, `correct` and
            `loss_sum` of an evaluate job; a `StatisticsResult` of a statistics job.
    """

    kind: TaskKind
    runtime: RuntimeName
    params: Path | None
    streams: Path | None
    tflite: Path | None
    manifest: Path | None
    model: ModelRef
    message: Mapping[str, Any]
    data: DataConfig
    state_in: Path | None
    state_out: Path
    result: Path
    schema: Path | None = None


@dataclass(frozen=True)
class Done:
    """Measurements of a finished job. `peak_memory_bytes`: of the child since it started.

    `treated`: descriptions of the protection applied to the result; empty: none.
    """

    rows: int
    seconds: float
    peak_memory_bytes: int
    treated: tuple[str, ...] = ()


class TrainingProcess:
    """At most one child, started by the first job. Not thread-safe."""

    def __init__(self, log: Path, limits: Limits) -> None:
        self._log = log
        self._limits = limits
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._child.process.pid if self._child is not None and self._child.is_running else None

    def run(self, job: TrainingJob, stop_reason: Callable[[], str | None]) -> Done:
        """Runs the job; its result files are durable when this returns.

        Raises:
            Interrupted: `stop_reason`, called every half second, returned a reason.
            TrainingFailed: the job failed, exceeded a limit or crashed.
        """
        child = self._start(job)
        try:
            answer = self._answer(child, stop_reason)
        except BaseException:
            self.close()
            raise
        if "code" in answer:
            raise TrainingFailed(answer["code"], answer["message"], answer["public_message"])
        return Done(answer["rows"], answer["seconds"], answer["peak_memory_bytes"], tuple(answer["treated"]))

    def close(self) -> None:
        """Ends the child, if there is one, within seconds. `run` starts a new one."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _start(self, job: TrainingJob) -> _Child:
        """A child that has accepted the job: the existing one if it fits and is alive, else a new one."""
        child = self._child
        if child is not None and child.fits(job) and child.send(job):
            return child
        self.close()
        self._child = child = _Child(self._log, self._limits, job.runtime)
        if not child.send(job):
            last_line, message = child.last_log_line(), "the training process does not start"
            self.close()
            raise TrainingFailed("failed", f"{message}: {last_line}", message)
        return child

    def _answer(self, child: _Child, stop_reason: Callable[[], str | None]) -> dict[str, Any]:
        begun = time.monotonic()
        while True:
            answer = child.answer(POLL_SECONDS)
            if answer is not None:
                return answer
            reason = stop_reason()
            if reason is not None:
                raise Interrupted(reason)
            _require_memory(child, self._limits)
            if 0 < self._limits.seconds < time.monotonic() - begun:
                raise TrainingFailed("limits", f"not done after limits.seconds = {self._limits.seconds:g}")


class _Child:
    """One process and its socket."""

    def __init__(self, log: Path, limits: Limits, runtime: str) -> None:
        self.runtime = runtime
        self._limits = limits
        self._log = log
        self._thread = threading.get_ident()
        ours, theirs = socket.socketpair()
        with theirs, _log_file(log) as output:
            self._log_start = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "edge_client.train.child_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=worker_environment(),
            )
        self._socket = ours
        # Reaps the child whenever it ends, also if it idled out and no job arrives for weeks.
        threading.Thread(target=self.process.wait, name="training process", daemon=True).start()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def fits(self, job: TrainingJob) -> bool:
        return job.runtime == self.runtime and self._thread == threading.get_ident()

    def send(self, job: TrainingJob) -> bool:
        """Sends the job; False if the child has exited, which an idle one may do at any moment."""
        try:
            self._socket.settimeout(_START_SECONDS)
            document = {"job": asdict(job), "limits": asdict(self._limits)}
            send_frame(self._socket, {}, [json.dumps(document, default=str).encode()])
            return self._receive(_START_SECONDS) == {"taken": True}
        except (Closed, TimeoutError):
            return False

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """The answer, or None if it takes longer.

        Raises:
            TrainingFailed: the child ended without an answer.
        """
        try:
            return self._receive(seconds)
        except TimeoutError:
            return None
        except Closed:
            raise self._crash_error() from None

    def end(self) -> None:
        self._socket.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def resident_bytes(self) -> int:
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0  # it ended; the closed socket shows it

    def last_log_line(self) -> str:
        """The last line of this child's part of the log."""
        lines = self._log_text().strip().splitlines()
        return lines[-1] if lines else f"exit status {self.process.returncode}"

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next message. Raises: Closed; TimeoutError: none began within this time."""
        self._socket.settimeout(seconds)
        with suppress(ConnectionError):  # `receive_frame` reports it
            self._socket.recv(1, socket.MSG_PEEK)
        self._socket.settimeout(None)
        return receive_frame(self._socket).values

    def _crash_error(self) -> TrainingFailed:
        status = self.process.wait()
        limits, log = self._limits, self._log_text()
        if status == -signal.SIGXCPU:
            return TrainingFailed("limits", f"it used more than limits.cpu_seconds = {limits.cpu_seconds:g}")
        if status == -signal.SIGKILL:
            return TrainingFailed("limits", "the training process was killed, most likely for lack of memory")
        if any(text in log for text in ("bad_alloc", "annot allocate memory", "MemoryError")):
            return TrainingFailed("limits", describe_memory_limit(limits))
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        message = f"the training process ended with {how}"
        return TrainingFailed("failed", f"{message}: {self.last_log_line()}", message)

    def _log_text(self) -> str:
        with suppress(OSError), self._log.open("rb") as log:
            log.seek(max(self._log_start, os.fstat(log.fileno()).st_size - _LOG_TAIL_BYTES))
            return log.read().decode("utf-8", "replace")
        return ""


def describe_memory_limit(limits: Limits) -> str:
    return f"it needs more memory than limits.memory_bytes = {limits.memory_bytes}"


def _require_memory(child: _Child, limits: Limits) -> None:
    if not limits.memory_bytes:
        return
    resident = child.resident_bytes()
    if resident > limits.memory_bytes:
        raise TrainingFailed("limits", f"{describe_memory_limit(limits)}: {resident} bytes were resident")


def _log_file(log: Path) -> Any:
    """The log, open to append, readable by its owner only; starts over when it has grown large."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_BYTES:
            log.unlink()
    return os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
