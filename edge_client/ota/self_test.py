"""Self-tests a release in a separate process, so that a runtime that crashes on a file does not crash the daemon.

    python -P -m edge_client.ota.self_test JOB.json

writes one JSON object per line: `{"passed": …}` once the golden answers are right on this runtime, or what is wrong; then,
if the device has held-out rows of the manifest's data set, how the new model and the active one perform on them. The child
has the kernel limit its own memory and processor time; the parent watches the clock.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from edge_client.data import DataConfig
from edge_client.ota.errors import Postponed, Rejected
from edge_client.processes.process import (
    Report,
    limit_memory,
    lower_priority,
    serve,
    set_soft_limit,
    worker_environment,
)
from edge_client.wire.device import ReleaseEvaluation
from edge_client.wire.strict import printable

if TYPE_CHECKING:
    from edge_client.infer.runtime import LoadedRelease

SECONDS = 120.0
"""Time limit of a self-test with its evaluation, imports included."""

BASE_BYTES = 512 * 1024 * 1024
"""Memory for Python, numpy, the runtime and the rows, in addition to the model's as its manifest states it."""

EVALUATED_ROWS = 10_000
_BATCH = 64
_POLL_SECONDS = 0.2
_LOG_BYTES = 4_096
_LARGEST_LOSS = 1e30
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
    with tempfile.TemporaryFile() as log, _child(job, log.fileno()) as child:
        end = now() + seconds
        try:
            for line in _lines(child):
                if line is not None:
                    reported |= line
                check_cancelled()
                if now() >= end:
                    break
            timed_out = child.poll() is None and now() >= end
        finally:
            child.kill()
        status = child.wait()
        log.seek(0)
        stderr = log.read()[-_LOG_BYTES:].decode("utf-8", "replace")
    return interpret(reported, status, timed_out=timed_out, seconds=seconds, stderr=stderr)


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
def _child(job: SelfTestJob, log: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the child with its job file; both are removed at the end."""
    handle, name = tempfile.mkstemp(prefix=".self-test-", suffix=".json", dir=job.folder.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(_as_json(job), file, default=str)
        process = _start(name, log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    finally:
        Path(name).unlink(missing_ok=True)


def _start(job_path: str, log: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "edge_client.ota.self_test", job_path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=worker_environment(),
        )
    except OSError as error:
        raise Postponed("self_test_broken", f"no process can be started: {error.strerror}") from None


def _lines(child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any] | None]:
    """The child's lines as they arrive; None at first and at every poll. Ends with the child."""
    assert child.stdout is not None
    handle, received = child.stdout.fileno(), b""
    yield None
    while True:
        if not select.select([handle], [], [], _POLL_SECONDS)[0]:
            yield None
            continue
        part = os.read(handle, 65_536)
        if not part:
            child.wait()
            return
        *lines, received = (received + part).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _as_json(job: SelfTestJob) -> dict[str, Any]:
    return {
        "folder": str(job.folder.absolute()),
        "memory_bytes": job.memory_bytes,
        "champion": str(job.champion.absolute()) if job.champion is not None else None,
        "data": job.data.to_json() if job.data is not None else None,
    }


# -- in the child --


def _work(job: Path, report: Report) -> None:
    import resource

    document = json.loads(job.read_bytes())
    lower_priority()
    limit_memory(document["memory_bytes"] + BASE_BYTES)
    set_soft_limit(resource.RLIMIT_CPU, int(SECONDS))
    candidate = _load_and_test(Path(document["folder"]), report)
    if candidate is None or document["data"] is None:
        return
    report(at="data")
    try:
        examples = _examples(document["data"], candidate)
    except ValueError as error:
        report(note=f"not evaluated: {error}")
        return
    if examples is None:
        return
    report(at="candidate")
    own = _evaluate(candidate, *examples)
    if not own["labels"]:
        report(note="not evaluated: no label of its rows is one of the model's classes", at="done")
        return
    report(evaluation=own, at="champion")
    champion = _champion(document["champion"], report)
    if champion is not None and champion.manifest.input == candidate.manifest.input:
        theirs = _evaluate(champion, *examples)
        report(
            evaluation={
                **own,
                "champion_correct": theirs["correct"],
                "champion_loss_sum": theirs["loss_sum"],
            }
        )


def _load_and_test(folder: Path, report: Report) -> LoadedRelease | None:
    """The loaded release, once its answers are right; None after reporting a failure."""
    from edge_client.infer import golden_check, runtime
    from edge_client.train.golden import SelfTestFailed
    from edge_client.wire.manifest import ManifestError

    try:
        loaded = runtime.load(folder)
    except runtime.NoRuntime as missing:
        report(later=str(missing))  # a problem of this machine; what ran here before will run again
        return None
    except ManifestError as error:
        report(code="bad_artifact", message=str(error))
        return None
    try:
        accuracy = golden_check.require(loaded)
    except SelfTestFailed as error:
        report(code="self_test", message=str(error))
        return None
    except golden_check.NotEnoughMemory as error:
        report(later=str(error))  # within the limit, but not free now
        return None
    except ManifestError as error:
        report(code="wrong_runtime", message=str(error))
        return None
    except (RuntimeError, ValueError) as error:
        # The interpreter opens the file and cannot run it.
        report(code="bad_artifact", message=f"this runtime cannot run it: {error}")
        return None
    report(passed={"golden_accuracy": accuracy})
    return loaded


def _examples(data: dict[str, Any], candidate: LoadedRelease) -> tuple[Any, Any] | None:
    """Held-out rows and labels as the model takes them; None if there are none.

    Raises:
        ValueError: the data does not match its description or the model.
    """
    from edge_client.data import open_data
    from edge_client.infer.runtime import check_rows

    held_out = open_data(DataConfig.from_json(data)).held_out()
    if not len(held_out):
        return None
    return check_rows(held_out.x[:EVALUATED_ROWS], candidate.manifest), held_out.y[:EVALUATED_ROWS]


def _champion(folder: str | None, report: Report) -> LoadedRelease | None:
    from edge_client.infer import runtime
    from edge_client.wire.manifest import ManifestError

    if folder is None:
        return None
    try:
        return runtime.load(Path(folder))
    except ManifestError as error:
        report(note=f"the active model cannot be loaded: {error}")
        return None


def _evaluate(loaded: LoadedRelease, x: Any, y: Any) -> dict[str, Any]:
    """Counts of labels and correct ones, and cross-entropy, over all rows; labels that are no class do not count."""
    import numpy as np

    from edge_client.data.examples import PADDING
    from edge_client.train.evaluation import merge, score

    known = np.where((y >= 0) & (y < loaded.manifest.classes), y, PADDING)
    total = merge(
        score(loaded.predict(x[start : start + _BATCH]), known[start : start + _BATCH])
        for start in range(0, len(x), _BATCH)
    )
    # JSON has no infinity, so an infinite or NaN loss becomes the largest.
    loss = total.loss_sum if total.loss_sum < _LARGEST_LOSS else _LARGEST_LOSS
    return {"labels": int(total.labels.sum()), "correct": int(total.correct.sum()), "loss_sum": loss}


if __name__ == "__main__":
    serve(_work)
