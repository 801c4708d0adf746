"""One worker process: loads data, builds models, trains and evaluates, one job at a time.

Broadcasts set its state: the run's data and model once (`open`), the params to start from before each round (`model`),
and the params to score before each evaluation (`candidate`). A job then needs little more than the index of its client.
A framework is imported when the first job needs it, so that a worker that only trains LiteRT clients never loads
TensorFlow.
"""

from __future__ import annotations

import importlib
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coordinator.errors import DISK_ERRNOS, UserError
from coordinator.workers import faults, workspace, workspace_arrays
from coordinator.workers.evaluation import encode_evaluation
from coordinator.workers.versions import Versions
from edge_client.data.examples import Examples
from edge_client.processes.channel import Closed, Frame, read_ahead, send_frame
from edge_client.processes.process import die_with_parent, fork_each
from edge_client.train.evaluation import Evaluation
from edge_client.train.trainer import Runtime, Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage
from strategies.params import Params, flatten, unflatten

if TYPE_CHECKING:
    from models.zoo import KerasSpec, ModelSpec

Reply = tuple[dict[str, Any], list[bytes]]


@dataclass
class RoundStart:
    """The params and streams that the jobs of the current round start from."""

    params: Params
    streams: dict[str, Params]


class Worker:
    """The state of a worker: data, model, one runtime of each kind."""

    def __init__(self) -> None:
        self._run: workspace_arrays.Workspace | None = None
        self._model: dict[str, Any] = {}
        self._round: RoundStart | None = None
        self._candidate: Params = {}
        self._runtimes: dict[str, Runtime] = {}
        self._updates: int | None = None
        self._versions = Versions()

    def handle(self, frame: Frame) -> Reply:
        kinds: dict[str, Callable[[Frame], Reply]] = {
            "prepare": self._prepare,
            "framework": self._framework,
            "initial": self._initial,
            "verify": self._verify,
            "open": self._open,
            "model": self._set_model,
            "train": self._train,
            "version": self._versions.add,
            "train_version": self._train_version,
            "train_alone": self._train_alone,
            "candidate": self._set_candidate,
            "evaluate": self._evaluate,
            "predict": self._predict,
            "strategy": self._describe_strategy,
            "updates": self._set_updates,
            "aggregate": self._aggregate,
        }
        return kinds[frame.values["kind"]](frame)

    def _prepare(self, frame: Frame) -> Reply:
        """Loads and partitions the data set into the workspace."""
        return workspace.prepare(frame.values), []

    def _framework(self, frame: Frame) -> Reply:
        """The model's framework."""
        from models.zoo import KerasSpec

        spec = self._spec(frame.values["model"])
        return {"framework": "keras" if isinstance(spec, KerasSpec) else "torch"}, []

    def _initial(self, frame: Frame) -> Reply:
        """Builds the model and returns its initial params."""
        from models.zoo import KerasSpec

        spec, seed = self._spec(frame.values["model"]), frame.values["seed"]
        if isinstance(spec, KerasSpec):
            spec.require_trainable()
            model = spec.build(seed)
            return _initial_reply("keras", spec, model.trainable, True, model.params())
        from edge_client.train import torch_trainer
        from models.zoo.trial import require_answers

        require_answers(spec)
        module = spec.build(seed)
        trainable = torch_trainer.TorchRuntime(module, spec.loss).trainable
        has_twin = spec.tensorflow_twin is not None
        values, blobs = _initial_reply("torch", spec, trainable, has_twin, torch_trainer.read(module))
        return values | {"statistics": torch_trainer.statistics(module), "masked": spec.masked}, blobs

    def _verify(self, frame: Frame) -> Reply:
        """Checks an artifact that was made elsewhere: its operations, then its golden outputs, which it computes here."""
        from models.conversion.operators import operators

        operators(Path(frame.values["tflite"]).read_bytes())
        _litert(frame.values)
        return {}, []

    def _open(self, frame: Frame) -> Reply:
        self._run = workspace_arrays.open_workspace(Path(frame.values["folder"]))
        self._model = frame.values["model"]
        return {}, []

    def _set_model(self, frame: Frame) -> Reply:
        params, streams = (arrays.decode(blob) for blob in frame.blobs)
        self._round = RoundStart(params, unflatten(streams))
        return {}, []

    def _train(self, frame: Frame) -> Reply:
        assert self._run is not None and self._round is not None
        task = TaskMessage.from_json(frame.values["task"])
        client_state = unflatten(arrays.decode(frame.blobs[0]))
        examples = self._examples(self._run.part(frame.values["part"]))
        trainer = Trainer(self._runtime(frame.values["runtime"]))
        local = trainer.train(
            self._round.params, TrainTask.of(task, self._round.streams), examples, client_state
        )
        fault = frame.values["fault"]
        if fault is None:
            uploads = [arrays.encode_result(task, local.update)]
        else:
            uploads = faults.encode_uploads(fault, task, local.update)
        return {}, [*uploads, arrays.encode(flatten(local.client_state))]

    def _train_version(self, frame: Frame) -> Reply:
        """Trains a client of an asynchronous run."""
        assert self._run is not None
        return self._versions.train(frame, self._run, self._runtime)

    def _set_candidate(self, frame: Frame) -> Reply:
        if frame.file is None:
            self._candidate = arrays.decode(frame.blobs[0])
            return {}, []
        try:
            # Mapped, because reading would move a file position that all workers share.
            with mmap.mmap(frame.file, 0, access=mmap.ACCESS_READ) as content:
                self._candidate = arrays.decode(content[:])
        finally:
            os.close(frame.file)
        return {}, []

    def _evaluate(self, frame: Frame) -> Reply:
        """Scores the rows [start, stop) of the test part."""
        assert self._run is not None
        rows = self._run.test_rows[frame.values["start"] : frame.values["stop"]]
        return encode_evaluation(self._score(self._candidate, rows, frame.values["logits"]))

    def _train_alone(self, frame: Frame) -> Reply:
        """Trains a client on its own rows and scores the result on its own test rows."""
        assert self._run is not None and self._round is not None
        start, part = self._round.params, frame.values["part"]
        task = TrainTask.of(TaskMessage.from_json(frame.values["task"]), {})
        local = Trainer(self._runtime(frame.values["runtime"])).train(
            start, task, self._examples(self._run.part(part))
        )
        trained = {name: start[name] + delta for name, delta in local.update.delta.items()}
        own_rows = self._run.test_rows[self._run.owners == part]
        return encode_evaluation(self._score({**start, **trained}, own_rows, frame.values["logits"]))

    def _score(self, params: Params, rows: npt.NDArray[np.int64], keep_logits: bool) -> Evaluation:
        trainer = Trainer(self._runtime("evaluation"))
        return trainer.evaluate(params, self._examples(rows), keep_logits=keep_logits)

    def _examples(self, rows: npt.NDArray[np.int64]) -> Examples:
        assert self._run is not None
        return Examples(self._run.x[rows], self._run.y[rows])

    def _predict(self, frame: Frame) -> Reply:
        """Predictions for the rows of a file: of the candidate, or of a release."""
        from coordinator.workers import prediction

        request = frame.values
        if request["only_count"]:
            return prediction.count_rows(request), []
        if request["release"] is not None:
            return prediction.run(request, None), []
        self._model = request["description"]
        runtime = self._runtime("evaluation")
        return prediction.run(request, lambda x: runtime.logits(self._candidate, x)), []

    def _describe_strategy(self, frame: Frame) -> Reply:
        """The base of a user's own strategy, and whose each option is."""
        from coordinator.workers import own_strategy

        return own_strategy.describe(frame.values["name"], frame.values["options"]), []

    def _set_updates(self, frame: Frame) -> Reply:
        if self._updates is not None:
            os.close(self._updates)
        self._updates = frame.file
        return {}, []

    def _aggregate(self, frame: Frame) -> Reply:
        """The delta that a user's own strategy makes of a cohort's updates."""
        from coordinator.workers import own_strategy

        assert self._updates is not None
        values = frame.values
        delta = own_strategy.aggregate(values["name"], values["options"], self._updates, values["updates"])
        return {}, [arrays.encode(delta)]

    def _spec(self, model: dict[str, Any]) -> Any:
        from models import zoo

        return zoo.find(
            model["name"],
            input_shape=tuple(model["input_shape"]),
            classes=model["classes"],
            input_dtype=model["input_dtype"],
            task=model["task"],
            **model["options"],
        )

    def _runtime(self, name: str) -> Runtime:
        if name not in self._runtimes:
            self._runtimes[name] = self._make_runtime(name)
        return self._runtimes[name]

    def _make_runtime(self, name: str) -> Runtime:
        """`name` "evaluation" selects the model's own framework, whatever the clients run; without its code, `litert`."""
        if name == "litert":
            return _litert(self._model)
        if name == "evaluation" and self._model.get("evaluation") == "litert":
            return self._runtime("litert")
        from models.zoo import KerasSpec

        spec = self._spec(self._model)
        if name == "evaluation":
            return self._runtime("tensorflow" if isinstance(spec, KerasSpec) else "torch")
        if isinstance(spec, KerasSpec):
            from edge_client.train.tensorflow_trainer import TensorFlowRuntime

            model = spec.build(0)
            return TensorFlowRuntime(model, trainable=model.trainable)
        from edge_client.train.torch_trainer import TorchRuntime

        torch_runtime = TorchRuntime(spec.build(0), spec.loss)
        if name == "torch":
            return torch_runtime
        from edge_client.train.tensorflow_trainer import TensorFlowRuntime

        if spec.tensorflow_twin is None:
            raise UserError(f"model {self._model['name']!r} has no TensorFlow twin")
        return TensorFlowRuntime(spec.tensorflow_twin(), trainable=torch_runtime.trainable)


def _litert(model: dict[str, Any]) -> Runtime:
    """The LiteRT runtime of the files `tflite` and `manifest`, once its golden outputs are right here."""
    from edge_client.train.litert_trainer import LiteRTRuntime
    from edge_client.wire import manifest

    path = model["manifest"]
    runtime = LiteRTRuntime(Path(model["tflite"]), manifest.from_json(Path(path).read_bytes(), path))
    runtime.self_test()
    return runtime


def _initial_reply(
    framework: str, spec: ModelSpec | KerasSpec, trainable: Sequence[str], has_twin: bool, params: Params
) -> Reply:
    values = {
        "framework": framework,
        "trainable": list(trainable),
        "twin": has_twin,
        "task": spec.task,
        "vocab": spec.vocab,
    }
    return values, [arrays.encode(params)]


def serve(channel: socket.socket) -> None:
    """Runs jobs until the channel closes."""
    waiting = read_ahead(channel)
    worker = Worker()
    failure: dict[str, Any] | None = None
    while True:
        frame = waiting.get()
        is_broadcast = frame.values.get("broadcast", False)
        try:
            values, blobs = worker.handle(frame)
        except Exception as error:
            values, blobs = {"error": _format_error(frame, error), **_disk_errno(error)}, []
            failure = values if is_broadcast else failure
        if is_broadcast:
            continue
        if failure is not None:
            values, blobs = failure, []
        send_frame(channel, values, blobs)


def _disk_errno(error: Exception) -> dict[str, Any]:
    """The `errno` of a disk error, which may be temporary; else empty."""
    number = error.errno if isinstance(error, OSError) else None
    return {"errno": number} if number in DISK_ERRNOS else {}


def _format_error(frame: Frame, error: Exception) -> str:
    """One line for the user. The traceback goes to the log unless the error is plainly in the user's input."""
    from models.datasets import DataError

    task = frame.values.get("task")
    where = f"{frame.values['runtime']} client {task['client']}, round {task['round']}: " if task else ""
    is_ours = isinstance(error, UserError | DataError) or type(error).__module__.startswith(
        ("models.", "edge_client.")
    )
    if is_ours:
        return f"{where}{error}"
    with suppress(OSError):  # the log may be on a full disk too
        traceback.print_exc()
    return f"{where}{frame.values['kind']} failed: {type(error).__name__}: {error}"


def main() -> None:
    """Becomes one worker for each file descriptor of a channel, after it has imported the modules that follow these.

    Several workers are forked from this process, so that the modules are in memory once.
    """
    die_with_parent()
    # Ctrl-C reaches the whole process group; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    np.seterr(all="ignore")  # the intake rejects a diverging client and says so
    for module in sys.argv[2:]:
        importlib.import_module(module)
    channels = [int(each) for each in sys.argv[1].split(",")]
    with socket.socket(fileno=fork_each(channels) if len(channels) > 1 else channels[0]) as channel:
        try:
            serve(channel)
        except Closed:
            os._exit(0)


if __name__ == "__main__":
    main()
