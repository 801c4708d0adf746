"""Training in a process of its own, which can be limited, watched and killed without the daemon suffering.

    with TrainingProcess(log, limits) as training:
        done = training.run(job, keep_going)

The child (`edge_client.train.worker`) gets one job at a time over a socket pair as a line of JSON; params, data
and results are files, whose paths the job names. It stays for the next job of the same runtime, because importing
a framework takes longer than a round, and ends by itself when nothing comes for a while.

**Limits.** The child limits its own memory and CPU time by the kernel (see the worker), so that a sudden grab
fails at once. From here its resident memory and the wall clock are watched, every half second.

**Ends.** The child ends when its socket closes, which the kernel does however the daemon ends, and by the kernel's
parent-death signal should it be stuck in foreign code. That signal follows the *thread* that started the child;
so a child is used only by that thread, and another thread gets a fresh one.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from edge_client.connectors import DataConfig
from edge_client.process import worker_environment
from edge_client.wire.device import Decline, ModelRef, RuntimeName

LOOK_SECONDS = 0.5
"""How often a running job is looked at."""

STOP_SECONDS = 2.0
"""How long a child whose socket was closed may take before it is killed."""

_START_SECONDS = 60.0
_LOG_BYTES = 1_000_000
_ANSWER_BYTES = 65_536

Code = Literal[
    "ineligible", "no_data", "wrong_runtime", "no_model", "bad_artifact", "opted_out", "limits", "failed"
]


class Interrupted(Exception):
    """The job was stopped because `keep_going` said so; `reason` is what it said."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TrainingFailed(Exception):
    """The job cannot be done. `words` are for the device's owner, `decline` is for the coordinator.

    They differ where the words may quote data or paths (`told` stands in for them), which are not to leave the device.
    """

    def __init__(self, code: Code, words: str, told: str | None = None) -> None:
        super().__init__(words)
        self.code: Code = code
        self.words = words
        self._told = told

    @property
    def decline(self) -> Decline:
        return Decline(self.code, self._told or self.words)


@dataclass(frozen=True)
class Limits:
    """What a training process may use; 0: no limit.

    Attributes:
        memory_bytes: resident memory.
        cpu_seconds: processor time of one job. seconds: wall-clock time of one job, imports included.
        idle_seconds: how long it is kept for the next job.
    """

    memory_bytes: int
    cpu_seconds: float
    seconds: float
    idle_seconds: float = 60.0


@dataclass(frozen=True)
class Job:
    """One task for the child. Paths to read, but for the last two.

    Attributes:
        params, streams: as safetensors.
        tflite, manifest: for LiteRT.
        message: of a train job the `TaskMessage` as JSON; of an evaluate job empty.
        state_in: what the client rule kept in its last round, if it did.
        state_out: where it leaves what it keeps after this one; written for train jobs whose rule keeps something.
        result: where the result goes: of a train job what is to be uploaded, of an evaluate job JSON with
            `rows`, `labels`, `correct` and `loss_sum`.
    """

    kind: Literal["train", "evaluate"]
    runtime: RuntimeName
    params: Path
    streams: Path | None
    tflite: Path | None
    manifest: Path | None
    model: ModelRef
    message: Mapping[str, Any]
    data: DataConfig
    state_in: Path | None
    state_out: Path
    result: Path


@dataclass(frozen=True)
class Done:
    """What a job took. `peak_memory_bytes`: of the child since it started.

    `treated`: what was done to the result to protect the data, in words; empty: nothing.
    """

    rows: int
    seconds: float
    peak_memory_bytes: int
    treated: tuple[str, ...] = ()


class TrainingProcess:
    """At most one child, started when the first job comes. Not for several threads at once."""

    def __init__(self, log: Path, limits: Limits) -> None:
        self._log = log
        self._limits = limits
        self._child: _Child | None = None

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return self._child.process.pid if self._child is not None and self._child.is_running else None

    def run(self, job: Job, keep_going: Callable[[], str | None]) -> Done:
        """Does the job; its result files are durable when this returns.

        Raises:
            Interrupted: `keep_going`, asked every half second, gave a reason.
            TrainingFailed: it could not be done, exceeded a limit or crashed.
        """
        child = self._started(job)
        try:
            answer = self._answer(child, keep_going)
        except BaseException:
            self.close()
            raise
        if "code" in answer:
            raise TrainingFailed(answer["code"], answer["words"], answer["told"])
        return Done(answer["rows"], answer["seconds"], answer["peak_memory_bytes"], tuple(answer["treated"]))

    def close(self) -> None:
        """Ends the child, if there is one, within seconds. It can be started again by `run`."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _started(self, job: Job) -> _Child:
        """A child that has taken the job: the one from before where it fits and lives, else a fresh one."""
        child = self._child
        if child is not None and child.suits(job) and child.take(job):
            return child
        self.close()
        self._child = child = _Child(self._log, self._limits, job.runtime)
        if not child.take(job):
            words, told = child.last_words(), "the training process does not start"
            self.close()
            raise TrainingFailed("failed", f"{told}: {words}", told)
        return child

    def _answer(self, child: _Child, keep_going: Callable[[], str | None]) -> dict[str, Any]:
        begun = time.monotonic()
        while True:
            answer = child.answer(LOOK_SECONDS)
            if answer is not None:
                return answer
            reason = keep_going()
            if reason is not None:
                raise Interrupted(reason)
            _require_memory(child, self._limits)
            if 0 < self._limits.seconds < time.monotonic() - begun:
                raise TrainingFailed("limits", f"not done after limits.seconds = {self._limits.seconds:g}")


class _Child:
    """One process and the socket to it."""

    def __init__(self, log: Path, limits: Limits, runtime: str) -> None:
        self.runtime = runtime
        self._limits = limits
        self._log = log
        self._thread = threading.get_ident()
        self._received = b""
        ours, theirs = socket.socketpair()
        with theirs, _log_file(log) as output:
            self._log_start = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "edge_client.train.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=worker_environment(),
            )
        self._socket = ours
        # Whenever the child ends it is reaped, also when it idled out and no job comes for weeks.
        threading.Thread(target=self.process.wait, name="training process", daemon=True).start()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def suits(self, job: Job) -> bool:
        return job.runtime == self.runtime and self._thread == threading.get_ident()

    def take(self, job: Job) -> bool:
        """Hands it the job; False where it has ended, which an idle child may do at any moment."""
        try:
            self._socket.settimeout(_START_SECONDS)
            self._socket.sendall(json.dumps(_as_json(job, self._limits), default=str).encode() + b"\n")
            return self._line(_START_SECONDS) == {"taken": True}
        except OSError:
            return False

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Its answer, or None when it takes longer.

        Raises:
            TrainingFailed: it ended without one.
        """
        try:
            line = self._line(seconds)
        except TimeoutError:
            return None
        if line is None:
            raise self._crashed()
        return line

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
            return 0  # it ended; its socket tells

    def last_words(self) -> str:
        """The last line of this child's part of the log."""
        lines = self._said().strip().splitlines()
        return lines[-1] if lines else f"exit status {self.process.returncode}"

    def _line(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None where the socket was closed. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while b"\n" not in self._received:
            self._socket.settimeout(max(0.001, end - time.monotonic()))
            try:
                part = self._socket.recv(_ANSWER_BYTES)
            except ConnectionError:
                return None
            if not part:
                return None
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _crashed(self) -> TrainingFailed:
        status = self.process.wait()
        limits, said = self._limits, self._said()
        if status == -signal.SIGXCPU:
            return TrainingFailed("limits", f"it used more than limits.cpu_seconds = {limits.cpu_seconds:g}")
        if status == -signal.SIGKILL:
            return TrainingFailed("limits", "the training process was killed, most likely for want of memory")
        if any(word in said for word in ("bad_alloc", "annot allocate memory", "MemoryError")):
            return TrainingFailed("limits", memory_words(limits))
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        told = f"the training process ended with {how}"
        return TrainingFailed("failed", f"{told}: {self.last_words()}", told)

    def _said(self) -> str:
        with suppress(OSError), self._log.open("rb") as log:
            log.seek(max(self._log_start, os.fstat(log.fileno()).st_size - _ANSWER_BYTES))
            return log.read().decode("utf-8", "replace")
        return ""


def memory_words(limits: Limits) -> str:
    return f"it needs more memory than limits.memory_bytes = {limits.memory_bytes}"


def _require_memory(child: _Child, limits: Limits) -> None:
    if not limits.memory_bytes:
        return
    resident = child.resident_bytes()
    if resident > limits.memory_bytes:
        raise TrainingFailed("limits", f"{memory_words(limits)}: {resident} bytes were resident")


def _as_json(job: Job, limits: Limits) -> dict[str, Any]:
    """Both as JSON kinds; paths are absolute, whatever the child's folder is."""
    document = {
        name: str(value.absolute()) if isinstance(value, Path) else value for name, value in vars(job).items()
    }
    data = job.data
    return {
        **document,
        "model": {**vars(job.model), "options": dict(job.model.options)},
        "message": dict(job.message),
        "data": {
            "kind": data.kind,
            "path": str(data.path.absolute()) if data.path is not None else None,
            "options": dict(data.options),
        },
        "limits": vars(limits),
    }


def _log_file(log: Path) -> Any:
    """The log, open to append, for its owner only; begun anew when it has grown large."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_BYTES:
            log.unlink()
    return os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
