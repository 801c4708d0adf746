"""Datacenter jobs: pretraining, distillation and quantization as worker processes.

`run` writes the job file and its arrays into a folder, starts the worker, hands its progress on as it
comes, and returns what the worker left in `result.json`. Frameworks are imported there and never here, and
a crash there is a `JobFailed` here. The worker and everything it starts die with this process, SIGKILL
included, so an interrupted run leaves nothing behind that holds memory or ports.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from edge_client.process import worker_environment

Stage = Literal["pretrain", "distil", "quantize"]
OnProgress = Callable[[Mapping[str, Any]], None]

LOG_NAME = "log.txt"


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


@dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Attributes:
        model: `name`, `input_shape`, `classes` and, where they differ from the defaults, `options`,
            `input_dtype`, `task`. Of a distillation: the student.
        arrays: `x_train`, `y_train`, `x_test`, `y_test`; a distillation may have `x_extra`, unlabelled.
        options: of the stage: `models.pretrain.optimizers.Options`, `models.compress.distil.Options` or
            `models.compress.quantize.Options`.
        params: what to quantize.
        teacher: model and params to distil from.
        processes: of a pretraining.
        plan: of a pretraining, keys of `models.pretrain.plan.ParallelPlan`; without one all is dp.
    """

    stage: Stage
    model: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    params: Path | None = None
    teacher: tuple[Mapping[str, Any], Path] | None = None
    processes: int = 1
    plan: Mapping[str, Any] = field(default_factory=dict)


def run(job: Job, folder: Path, on_progress: OnProgress = lambda line: None) -> dict[str, Any]:
    """Runs `job` in a process of its own and gives the contents of its `result.json`.

    `folder` then holds `job.json`, `arrays/`, `log.txt`, `result.json` and the stage's files:
    `model.safetensors`, or `model_fp32.tflite` and `model_int8.tflite`. Blocks until the worker ended;
    an exception in `on_progress` ends it.

    Raises:
        JobFailed: with the worker's own reason, if it gave one.
    """
    path = _written(job, folder)
    log = folder / LOG_NAME
    (folder / "result.json").unlink(missing_ok=True)
    errors: list[str] = []
    with log.open("wb") as stderr, _started(_command(job, path), stderr) as worker:
        for line in _objects(worker.stdout):
            if "error" in line:
                errors.append(str(line["error"]))
            else:
                on_progress(line)
        status = worker.wait()
    if status or errors:
        # when one rank fails the others fail because of it: the first reason is the cause
        raise JobFailed(job.stage, errors[0] if errors else _last_words(status, log), log)
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobFailed(job.stage, f"the worker ended well but left no result: {error}", log) from error
    return result


def _written(job: Job, folder: Path) -> Path:
    """The job file, with its arrays and no others beside it."""
    arrays = folder / "arrays"
    arrays.mkdir(parents=True, exist_ok=True)
    for earlier in arrays.glob("*.npy"):
        earlier.unlink()
    for name, array in job.arrays.items():
        np.save(arrays / f"{name}.npy", array, allow_pickle=False)
    settings: dict[str, Any] = {
        "model": dict(job.model),
        "arrays": "arrays",
        "out": ".",
        "seed": job.seed,
        "options": dict(job.options),
    }
    if job.plan:
        settings["plan"] = dict(job.plan)
    if job.params is not None:
        settings["params"] = str(job.params.absolute())
    if job.teacher is not None:
        model, params = job.teacher
        settings["teacher"] = {"model": dict(model), "params": str(params.absolute())}
    path = folder.absolute() / "job.json"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return path


def _command(job: Job, path: Path) -> list[str]:
    # -P keeps the working directory off sys.path, where a user may have a models.py of their own
    python = [sys.executable, "-P", "-m"]
    match job.stage:
        case "pretrain" if job.processes > 1:
            return [*python, "models.pretrain.launch", str(job.processes), str(path)]
        case "pretrain":
            return [*python, "models.pretrain.worker", str(path)]
        case stage:
            return [*python, f"models.compress.{stage}", str(path)]


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
