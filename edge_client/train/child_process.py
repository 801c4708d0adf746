"""The training process: receives one job at a time from its socket, runs it, answers, and waits for the next.

    python -P -m edge_client.train.child_process <file descriptor of the socket>

It runs with the least resources that training needs: one thread, low priority, killed first when the machine is out
of memory, no core dumps. It needs no network and only reads local data. When the socket closes it exits at once,
whatever it is doing (`edge_client.processes.channel`).

**Memory** is limited by the kernel (`process.limit_memory`) with some room above the owner's limit; the parent
watches the resident memory.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from edge_client.processes.channel import Closed, read_ahead, send_frame
from edge_client.processes.process import (
    die_with_parent,
    limit_memory,
    lower_priority,
    peak_bytes,
    set_soft_limit,
)
from edge_client.train.trainer import TrainTask

if TYPE_CHECKING:
    # Imported for the first job, once it is accepted and memory is limited.
    from edge_client.data.examples import Examples
    from edge_client.train.process import TrainingJob
    from edge_client.train.trainer import Runtime, Trainer
    from edge_client.wire.privacy import NoiseTask
    from edge_client.wire.schema import DataSchema
    from strategies.params import Params

_UNREADABLE = "its data cannot be read as the device's configuration describes it; on the device: fedloop-edge data preview"

Answer = dict[str, Any]


def main() -> None:
    die_with_parent()
    # Ctrl-C and a service manager's stop reach the whole process group; the parent handles them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lower_priority()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            serve(channel)
        except Closed:
            os._exit(0)


def serve(channel: socket.socket) -> None:
    """Runs jobs until the socket closes, or none arrives within the last one's idle limit."""
    waiting = read_ahead(channel)
    worker = Worker()
    idle_seconds: float | None = None
    while True:
        try:
            document = json.loads(waiting.get(timeout=idle_seconds).blobs[0])
        except queue.Empty:
            os._exit(0)
        send_frame(channel, {"taken": True})
        idle_seconds = document["limits"]["idle_seconds"]
        _limit(document["limits"])
        send_frame(channel, worker.answer(document))


class Worker:
    """Keeps the runtime of its last job for the next job with the same model."""

    def __init__(self) -> None:
        self._kept: tuple[object, Runtime] | None = None

    def answer(self, document: Mapping[str, Any]) -> Answer:
        """Runs the job and returns the answer for the parent."""
        try:
            return self._work(document)
        except MemoryError:
            return _failure("limits", _describe_memory_limit(document), None)
        except Exception as error:
            return _explain(error, document)

    def _work(self, document: Mapping[str, Any]) -> Answer:
        import numpy as np

        from edge_client.data import open_data
        from edge_client.data.contract import require_inputs
        from edge_client.train.process import TrainingJob
        from edge_client.train.resolve import require_compatible
        from edge_client.train.trainer import Trainer
        from edge_client.wire import schema as schemas
        from edge_client.wire.strict import parse

        np.seterr(all="ignore")  # the coordinator rejects a diverging client and says why
        started = time.monotonic()
        job = parse(TrainingJob, document["job"], "job")
        schema = None
        if job.schema is not None:
            schema = schemas.from_json(job.schema.read_bytes(), "the data schema of the task")
        if job.kind == "statistics":
            rows, treated = _statistics(job, schema)
            return _done(rows, started, treated)
        noise = _read_noise(job) if job.kind == "train" else None
        source = open_data(job.data, schema)
        data = source.train() if job.kind == "train" else source.held_out()
        require_compatible(data, job.model)
        if schema is not None:
            require_inputs(data.x, schema)
        if noise is not None and noise.mechanism == "example":
            trainer = self._private_trainer(job, noise, data)
        else:
            trainer = Trainer(self._runtime(job))
        treated = _train(job, trainer, data, noise) if job.kind == "train" else _evaluate(job, trainer, data)
        return _done(len(data), started, treated)

    def _private_trainer(self, job: TrainingJob, noise: NoiseTask, data: Examples) -> Trainer:
        """A trainer by DP-SGD, made for each job: how rows are differentiated depends on the data."""
        from edge_client.train.client_noise import require_covered
        from edge_client.train.resolve import private_trainer_for
        from edge_client.wire.device import TaskMessage

        message = TaskMessage.from_json(job.message)
        require_covered(noise, message, len(data))
        self._kept = None  # not two models in memory
        return private_trainer_for(job.model, noise, data, message.batch_size)

    def _runtime(self, job: TrainingJob) -> Runtime:
        from edge_client.train.resolve import runtime_for

        # By content: the same path may hold another artifact in the next run.
        manifest = job.manifest.read_bytes() if job.manifest is not None else None
        key = (job.runtime, job.model, manifest)
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # not two models in memory
            self._kept = key, runtime_for(job.runtime, job.model, job.tflite, job.manifest)
        return self._kept[1]


def _done(rows: int, started: float, treated: list[str]) -> Answer:
    """The answer after a job. `treated`: the protection applied to its result."""
    seconds = time.monotonic() - started
    return {"rows": rows, "seconds": seconds, "peak_memory_bytes": peak_bytes(), "treated": treated}


def _statistics(job: TrainingJob, schema: DataSchema | None) -> tuple[int, list[str]]:
    from edge_client.data.statistics import read_statistics
    from edge_client.files import write_durably
    from edge_client.wire.device import to_json
    from edge_client.wire.statistics import StatisticsRequest, require_valid_request
    from edge_client.wire.strict import parse_message

    request = require_valid_request(parse_message(StatisticsRequest, job.message, "statistics"))
    result = read_statistics(job.data, request, schema)
    write_durably(job.result, json.dumps(to_json(result)).encode(), mode=0o600)
    return result.rows, [f"counts below {result.minimum_count} withheld"]


def _read_noise(job: TrainingJob) -> NoiseTask | None:
    """The noise that a train task asks for. What adds it is imported only then."""
    if job.message.get("noise") is None:
        return None
    from edge_client.train.client_noise import read_noise
    from edge_client.wire.device import TaskMessage

    return read_noise(TaskMessage.from_json(job.message), job.runtime)


def _train(job: TrainingJob, trainer: Trainer, data: Examples, noise: NoiseTask | None) -> list[str]:
    """Trains and writes the update. Returns the protection applied to it. `noise`: that the device adds."""
    from edge_client.files import make_durably
    from edge_client.wire import arrays
    from edge_client.wire.arrays import write_result
    from edge_client.wire.device import TaskMessage
    from strategies.params import flatten, unflatten

    message = TaskMessage.from_json(job.message)
    streams = unflatten(arrays.read(job.streams)) if job.streams is not None else {}
    kept = unflatten(arrays.read(job.state_in)) if job.state_in is not None else {}
    assert job.params is not None, "checked with the offer"
    # Params are read piece by piece and the update is computed as it is written, so that a large model needs little memory.
    params = arrays.StoredArrays(arrays.FilePayload(job.params))
    local = trainer.train(params, TrainTask.of(message, streams), data, kept)
    if local.client_state:
        state = flatten(local.client_state)
        make_durably(job.state_out, lambda path: arrays.write(path, state), mode=0o600)
    update = local.update
    treated = [f"scaled down to norm {message.clip_norm:g} at most"] if message.clip_norm else []
    if noise is not None:
        from edge_client.train import client_noise

        treated.append(client_noise.describe(noise))
        if noise.mechanism == "local":
            update = client_noise.hide(update, message, noise)
    make_durably(job.result, lambda path: write_result(path, message, update), mode=0o600)
    return treated


def _evaluate(job: TrainingJob, trainer: Trainer, data: Examples) -> list[str]:
    """Writes the figures of the model on `data`, which are protected by nothing."""
    from edge_client.data.examples import NoExamples
    from edge_client.files import write_durably
    from edge_client.train.class_scores import class_scores
    from edge_client.wire import arrays
    from edge_client.wire.device import to_json
    from edge_client.wire.scores import MAX_CLASSES

    if not len(data):
        raise NoExamples("no rows are held out for evaluation; see the option `held_out` of the data set")
    assert job.params is not None, "checked with the offer"
    is_scored = job.model.task == "classification" and job.model.classes <= MAX_CLASSES
    params = arrays.read(job.params)
    if "rule" in job.message:
        params = _own_model(job, params)
    evaluation = trainer.evaluate(params, data, keep_logits=is_scored)
    sums: dict[str, Any] = {
        "rows": len(data),
        "labels": int(evaluation.labels.sum()),
        "correct": int(evaluation.correct.sum()),
        "loss_sum": evaluation.loss_sum,
    }
    if evaluation.quantities is not None:
        sums["quantity"] = to_json(evaluation.quantities)
    if evaluation.logits is not None and (scores := class_scores(evaluation.logits, data.y)) is not None:
        sums["scores"] = to_json(scores)
    write_durably(job.result, json.dumps(sums).encode(), mode=0o600)
    return []


def _own_model(job: TrainingJob, params: Params) -> Params:
    """The device's own model by the rule of an evaluation task, given the global one."""
    from edge_client.wire import arrays
    from strategies.params import materialize, unflatten
    from strategies.personalisation import PersonalRule, from_options

    rule = from_options(job.message["rule"])
    kept = unflatten(arrays.read(job.state_in)) if job.state_in is not None else {}
    return materialize(rule.personal(params, kept)) if isinstance(rule, PersonalRule) else params


def _explain(error: Exception, document: Mapping[str, Any]) -> Answer:
    """The answer for an error, for a `Decline`; unexpected errors are logged with their traceback.

    Messages that may quote rows or paths stay on the device.
    """
    from edge_client.data import DataProblem
    from edge_client.data.examples import NoExamples
    from edge_client.train.resolve import CannotRun
    from edge_client.train.trainer import BatchTooLarge

    if isinstance(error, CannotRun):
        return _failure(error.code, error.message, None)
    if isinstance(error, BatchTooLarge):
        return _failure("bad_artifact", str(error), None)
    if isinstance(error, NoExamples):
        return _failure("no_data", str(error), None)
    if isinstance(error, DataProblem):
        return _failure("no_data", str(error), _UNREADABLE)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _failure("limits", f"this device's disk: {error.strerror}", None)
    with suppress(OSError):  # the log's disk may be full
        traceback.print_exc()
    if any(text in str(error) for text in ("can't allocate memory", "annot allocate memory", "OOM when")):
        return _failure("limits", _describe_memory_limit(document), None)
    if type(error).__module__.startswith(("edge_client.", "strategies.")):
        return _failure("failed", str(error), None)
    kind = type(error).__name__
    return _failure(
        "failed", f"{kind}: {error}", f"{kind} in the training process; the device's log has more"
    )


def _failure(code: str, message: str, public_message: str | None) -> Answer:
    return {"code": code, "message": message[:1000], "public_message": public_message}


def _describe_memory_limit(document: Mapping[str, Any]) -> str:
    return f"it needs more memory than limits.memory_bytes = {document['limits']['memory_bytes']}"


def _limit(limits: Mapping[str, Any]) -> None:
    """Soft limits for the coming job. CPU time is counted from now; at its end the kernel sends SIGXCPU."""
    limit_memory(limits["memory_bytes"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = limits["cpu_seconds"]
    # The kernel counts whole seconds; round up.
    set_soft_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + cpu) + 1 if cpu else 0)


if __name__ == "__main__":
    main()
