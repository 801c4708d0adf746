"""Self-tests a release in a separate process, so that a runtime that crashes on a file does not crash the daemon.

The child (`edge_client.ota.self_test_worker`) limits its own memory and processor time; this side watches the clock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from edge_client.data.connector import DataConfig
from edge_client.ota.errors import Postponed, Rejected
from edge_client.processes.process import worker_environment
from edge_client.wire.device import ReleaseEvaluation
from edge_client.wire.strict import printable

SECONDS = 120.0
"""Time limit of a self-test with its evaluation, imports included."""

_POLL_SECONDS = 0.2
_LOG_BYTES = 4_096
_EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGXCPU)
"""Signals sent from outside: by a person, by the kernel short of memory, by the processor time limit."""


@dataclass(frozen=True)
class SelfTestJob:
    """The release in `folder` to test.

    Attributes:
        champion: release folder of the active model, to compare with.
        data: the manifest's data set on this device.
        memory_bytes: of the model, as its manifest states it.
    """

    folder: Path
    memory_bytes: int
    champion: Path | None = None
    data: DataConfig | None = None


@dataclass(frozen=True)
class SelfTestResult:
    """The release passed. `note`: why a requested evaluation is missing."""

    golden_accuracy: float | None
    evaluation: ReleaseEvaluation | None = None
    note: str = ""


def run(
    job: SelfTestJob,
    check_cancelled: Callable[[], None] = lambda: None,
    *,
    seconds: float = SECONDS,
    now: Callable[[], float] = time.monotonic,
) -> SelfTestResult:
    """Tests the release in a child process, and evaluates it if there are rows for that.

    Raises:
        Rejected: `self_test`, `bad_artifact`, `wrong_runtime`, `memory`, `crashed`, `too_slow`.
        Postponed: `self_test_broken`: no child can be started, or it failed for a reason of this machine.
    """
    reported: dict[str, Any] = {}
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as log:
        with _child(job, answers, log) as child:
            end = now() + seconds
            while child.poll() is None and now() < end:
                check_cancelled()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_SECONDS)
            timed_out = child.poll() is None
        answers.seek(0)
        for line in answers.read().splitlines(keepends=True):
            if line.endswith(b"\n"):  # not one that its end cut short
                reported |= json.loads(line)
        log.seek(0)
        stderr = log.read()[-_LOG_BYTES:].decode("utf-8", "replace")
    return interpret(reported, child.returncode, timed_out=timed_out, seconds=seconds, stderr=stderr)


def interpret(
    reported: dict[str, Any], status: int, *, timed_out: bool, seconds: float, stderr: str
) -> SelfTestResult:
    """The result that follows from a child's reports and its end.

    Args:
        reported: all its reports in one object. stderr: the end of its standard error.
        status: its exit status, negative for a signal. timed_out: it was killed at the time limit.

    Raises:
        Rejected, Postponed: as `run`.
    """
    if "code" in reported:
        raise Rejected(reported["code"], printable(str(reported["message"]), 300))
    if "later" in reported:
        raise Postponed("self_test_broken", printable(str(reported["later"]), 300))
    if "passed" not in reported:
        _raise_failure(status, timed_out, seconds, stderr)
    if (
        reported.get("at") == "candidate"
        and not timed_out
        and status < 0
        and -status not in _EXTERNAL_SIGNALS
    ):
        raise Rejected(
            "crashed", f"it ended its process with {signal.Signals(-status).name} on this device's own rows"
        )
    note = str(reported.get("note", "")) or ("" if status == 0 else "the evaluation was interrupted")
    sums = reported.get("evaluation")
    evaluation = ReleaseEvaluation(**sums) if sums is not None else None
    return SelfTestResult(reported["passed"]["golden_accuracy"], evaluation, printable(note, 300))


def _raise_failure(status: int, timed_out: bool, seconds: float, stderr: str) -> NoReturn:
    if timed_out:
        raise Rejected("too_slow", f"its self-test was not done after {seconds:g} s")
    if any(text in stderr for text in ("bad_alloc", "annot allocate memory", "MemoryError")):
        raise Rejected("memory", "its self-test needs more memory than its manifest states")
    if status == -signal.SIGXCPU:
        raise Rejected("too_slow", f"its self-test used more than {seconds:g} s of processor time")
    if status == -signal.SIGKILL:
        # Not by this process: by a person, or by the kernel because the machine is out of memory.
        raise Postponed("self_test_broken", "the self-test was killed")
    if status < 0:
        raise Rejected("crashed", f"it ended its process with {signal.Signals(-status).name}")
    last = stderr.strip().splitlines()[-1:] or [f"exit status {status}"]
    raise Postponed("self_test_broken", printable(f"the self-test could not run: {last[0]}"))


@contextmanager
def _child(job: SelfTestJob, answers: IO[bytes], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the child with its job file; both are ended and removed at the end."""
    handle, name = tempfile.mkstemp(prefix=".self-test-", suffix=".json", dir=job.folder.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(job), file, default=str)
        process = _start(name, answers, log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
    finally:
        Path(name).unlink(missing_ok=True)


def _start(job_path: str, answers: IO[bytes], log: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "edge_client.ota.self_test_worker", job_path],
            stdin=subprocess.DEVNULL,
            stdout=answers,
            stderr=log,
            env=worker_environment(),
        )
    except OSError as error:
        raise Postponed("self_test_broken", f"no process can be started: {error.strerror}") from None
