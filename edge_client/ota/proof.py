"""The self-test of a release in a process of its own: a runtime that crashes on a file does not take the daemon along.

    python -P -m edge_client.ota.proof JOB.json

says one line of JSON at a time: `{"passed": …}` once the golden answers are right on this very runtime, or what is wrong;
then, where the device has rows of the manifest's data set held out, how the new model and the one before it do on them.
The child limits its own memory and processor time by the kernel; the clock is watched from here.
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

from edge_client.connectors import DataConfig
from edge_client.ota.trouble import PutOff, Unfit
from edge_client.process import Report, limit_memory, serve, soften, step_back, worker_environment
from edge_client.wire.device import ReleaseEvaluation
from edge_client.wire.strict import printable

if TYPE_CHECKING:
    from edge_client.infer.runtime import Loaded

SECONDS = 120.0
"""What a self-test with its evaluation may take, imports included."""

BASE_BYTES = 512 * 1024 * 1024
"""Memory for Python, numpy, the runtime and the rows, beside what the manifest says of the model."""

EVALUATED_ROWS = 10_000
_BATCH = 64
_LOOK_SECONDS = 0.2
_LOG_BYTES = 4_096
_WORST = 1e30
_NOT_ITS_OWN = (signal.SIGKILL, signal.SIGXCPU)
"""Signals that come from elsewhere: a person, the kernel where memory is short, the limit of processor time."""


@dataclass(frozen=True)
class Question:
    """What to find out about the release in `folder`.

    Attributes:
        champion: release folder of the model that runs now, to compare with.
        data: what the manifest's data set is on this device.
        memory_bytes: of the model, as its manifest says.
    """

    folder: Path
    memory_bytes: int
    champion: Path | None = None
    data: DataConfig | None = None


@dataclass(frozen=True)
class Proof:
    """It passed. `note`: why there is no evaluation, in words, where one was asked for."""

    golden_accuracy: float | None
    evaluation: ReleaseEvaluation | None = None
    note: str = ""


def prove(
    question: Question,
    going: Callable[[], None] = lambda: None,
    *,
    seconds: float = SECONDS,
    now: Callable[[], float] = time.monotonic,
) -> Proof:
    """Has the release tested, and evaluated where there is something to evaluate it on.

    Raises:
        Unfit: `self_test`, `bad_artifact`, `wrong_runtime`, `memory`, `crashed`, `too_slow`.
        PutOff: `self_test_broken`: no child can be started, or it broke for a reason of this machine's.
    """
    told: dict[str, Any] = {}
    with tempfile.TemporaryFile() as log, _child(question, log.fileno()) as child:
        end = now() + seconds
        try:
            for line in _lines(child):
                if line is not None:
                    told |= line
                going()
                if now() >= end:
                    break
            late = child.poll() is None and now() >= end
        finally:
            child.kill()
        status = child.wait()
        log.seek(0)
        said = log.read()[-_LOG_BYTES:].decode("utf-8", "replace")
    return judged(told, status, late=late, seconds=seconds, said=said)


def judged(told: dict[str, Any], status: int, *, late: bool, seconds: float, said: str) -> Proof:
    """What follows from how a child ended.

    Args:
        told: all that it reported. said: the end of its standard error.
        status: its exit status, negative for a signal. late: it was ended because its time was up.

    Raises:
        Unfit, PutOff: as `prove`.
    """
    if "code" in told:
        raise Unfit(told["code"], printable(str(told["words"]), 300))
    if "later" in told:
        raise PutOff("self_test_broken", printable(str(told["later"]), 300))
    if "passed" not in told:
        _refuse(status, late, seconds, said)
    if told.get("at") == "candidate" and not late and status < 0 and -status not in _NOT_ITS_OWN:
        raise Unfit(
            "crashed", f"it ended its process with {signal.Signals(-status).name} on this device's own rows"
        )
    note = str(told.get("note", "")) or ("" if status == 0 else "the evaluation broke off")
    found = told.get("evaluation")
    evaluation = ReleaseEvaluation(**found) if found is not None else None
    return Proof(told["passed"]["golden_accuracy"], evaluation, printable(note, 300))


def _refuse(status: int, late: bool, seconds: float, said: str) -> NoReturn:
    if late:
        raise Unfit("too_slow", f"its self-test was not done after {seconds:g} s")
    if any(words in said for words in ("bad_alloc", "annot allocate memory", "MemoryError")):
        raise Unfit("memory", "its self-test needs more memory than its manifest says")
    if status == -signal.SIGXCPU:
        raise Unfit("too_slow", f"its self-test used more than {seconds:g} s of processor time")
    if status == -signal.SIGKILL:
        # Not by us: by a person, or by the kernel because the machine has no memory left.
        raise PutOff("self_test_broken", "the self-test was killed")
    if status < 0:
        raise Unfit("crashed", f"it ended its process with {signal.Signals(-status).name}")
    last = said.strip().splitlines()[-1:] or [f"exit status {status}"]
    raise PutOff("self_test_broken", printable(f"the self-test could not be done: {last[0]}"))


@contextmanager
def _child(question: Question, log: int) -> Iterator[subprocess.Popen[bytes]]:
    """The process, and its job file. Both are gone afterwards."""
    handle, name = tempfile.mkstemp(prefix=".proof-", suffix=".json", dir=question.folder.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(_as_json(question), file, default=str)
        process = _started(name, log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    finally:
        Path(name).unlink(missing_ok=True)


def _started(job: str, log: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "edge_client.ota.proof", job],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=worker_environment(),
        )
    except OSError as error:
        raise PutOff("self_test_broken", f"no process can be started: {error.strerror}") from None


def _lines(child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any] | None]:
    """Its lines as they come, None at first and every now and then; ends with the child."""
    assert child.stdout is not None
    handle, received = child.stdout.fileno(), b""
    yield None
    while True:
        if not select.select([handle], [], [], _LOOK_SECONDS)[0]:
            yield None
            continue
        part = os.read(handle, 65_536)
        if not part:
            child.wait()
            return
        *lines, received = (received + part).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _as_json(question: Question) -> dict[str, Any]:
    data = question.data
    return {
        "folder": str(question.folder.absolute()),
        "memory_bytes": question.memory_bytes,
        "champion": str(question.champion.absolute()) if question.champion is not None else None,
        "data": None
        if data is None
        else {
            "kind": data.kind,
            "path": str(data.path.absolute()) if data.path is not None else None,
            "options": dict(data.options),
        },
    }


# -- in the child --


def _work(job: Path, report: Report) -> None:
    import resource

    document = json.loads(job.read_bytes())
    step_back()
    limit_memory(document["memory_bytes"] + BASE_BYTES)
    soften(resource.RLIMIT_CPU, int(SECONDS))
    candidate = _tested(Path(document["folder"]), report)
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
    own = _sums(candidate, *examples)
    if not own["labels"]:
        report(note="not evaluated: no label of its rows is one of the model's classes", at="done")
        return
    report(evaluation=own, at="champion")
    champion = _champion(document["champion"], report)
    if champion is not None and champion.manifest.input == candidate.manifest.input:
        theirs = _sums(champion, *examples)
        report(
            evaluation={
                **own,
                "champion_correct": theirs["correct"],
                "champion_loss_sum": theirs["loss_sum"],
            }
        )


def _tested(folder: Path, report: Report) -> Loaded | None:
    """The release, loaded and with right answers; None where it was reported unfit."""
    from edge_client.infer import runtime, selftest
    from edge_client.train.golden import SelfTestFailed
    from edge_client.wire.manifest import ManifestError

    try:
        loaded = runtime.load(folder)
    except runtime.NoRuntime as missing:
        report(later=str(missing))  # about this machine, and what ran here before will run again
        return None
    except ManifestError as error:
        report(code="bad_artifact", words=str(error))
        return None
    try:
        accuracy = selftest.require(loaded)
    except SelfTestFailed as error:
        report(code="self_test", words=str(error))
        return None
    except selftest.TooLittleMemory as error:
        report(later=str(error))  # so much is allowed, and not free at this hour
        return None
    except ManifestError as error:
        report(code="wrong_runtime", words=str(error))
        return None
    except (RuntimeError, ValueError) as error:
        # What an interpreter says of a file that it opens and cannot run.
        report(code="bad_artifact", words=f"this runtime cannot run it: {error}")
        return None
    report(passed={"golden_accuracy": accuracy})
    return loaded


def _examples(data: dict[str, Any], candidate: Loaded) -> tuple[Any, Any] | None:
    """Held-out rows and labels, as the model takes them; None where there are none.

    Raises:
        ValueError: the data is not as described, or not what the model takes.
    """
    from edge_client.connectors import open_data
    from edge_client.infer.runtime import checked_rows

    path = Path(data["path"]) if data["path"] is not None else None
    held_out = open_data(DataConfig(data["kind"], path, data["options"])).held_out()
    if not len(held_out):
        return None
    return checked_rows(held_out.x[:EVALUATED_ROWS], candidate.manifest), held_out.y[:EVALUATED_ROWS]


def _champion(folder: str | None, report: Report) -> Loaded | None:
    from edge_client.infer import runtime
    from edge_client.wire.manifest import ManifestError

    if folder is None:
        return None
    try:
        return runtime.load(Path(folder))
    except ManifestError as error:
        report(note=f"the model before it cannot be loaded: {error}")
        return None


def _sums(loaded: Loaded, x: Any, y: Any) -> dict[str, Any]:
    """Labels, correct ones and cross-entropy over all rows, in float64; rows' labels that are padding do not count."""
    import numpy as np

    from edge_client.train.trainer import PADDING

    labels, correct, loss = 0, 0, 0.0
    for at in range(0, len(x), _BATCH):
        logits = loaded.predict(x[at : at + _BATCH]).astype(np.float64)
        flat, wanted = logits.reshape(-1, logits.shape[-1]), np.asarray(y[at : at + _BATCH]).reshape(-1)
        kept = (wanted != PADDING) & (wanted >= 0) & (wanted < flat.shape[-1])
        flat, wanted = flat[kept], wanted[kept]
        highest = flat.max(-1)
        spread = np.log(np.exp(flat - highest[:, None]).sum(-1)) + highest
        loss += float((spread - flat[np.arange(len(flat)), wanted]).sum())
        correct += int((flat.argmax(-1) == wanted).sum())
        labels += int(kept.sum())
    # JSON has no infinity: a model that is infinitely wrong is as wrong as can be said.
    loss = loss if loss < _WORST else _WORST
    return {"labels": labels, "correct": correct, "loss_sum": loss}


if __name__ == "__main__":
    serve(_work)
