"""One worker process of the simulation: prepares, trains and evaluates, one job at a time.

It is told once which data and model the run has (`open`), before each round which params to start from
(`model`) and before each evaluation which to score (`candidate`); a job then needs little more than the
position of its client. Frameworks are imported when the first job needs them, so that a worker that trains
LiteRT clients only never loads TensorFlow.
"""

from __future__ import annotations

import mmap
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.errors import UserError
from coordinator.simulation import faults, frames, workspace
from coordinator.simulation.frames import Frame
from edge_client.process import die_with_parent
from edge_client.train.trainer import Examples, Runtime, Trainer
from edge_client.wire import arrays
from edge_client.wire.messages import TaskMessage
from strategies.params import Params
from strategies.state import joined, parted

Reply = tuple[dict[str, Any], list[bytes]]


@dataclass
class Round:
    """What the jobs of the current round start from."""

    params: Params
    streams: dict[str, Params]


class Worker:
    """State that lives from `open` to the end: data, model, one runtime of each kind."""

    def __init__(self) -> None:
        self._run: workspace.Opened | None = None
        self._model: dict[str, Any] = {}
        self._round: Round | None = None
        self._candidate: Params = {}
        self._runtimes: dict[str, Runtime] = {}

    def handle(self, frame: Frame) -> Reply:
        kinds: dict[str, Callable[[Frame], Reply]] = {
            "prepare": self._prepare,
            "framework": self._framework,
            "initial": self._initial,
            "open": self._open,
            "model": self._set_model,
            "train": self._train,
            "candidate": self._set_candidate,
            "evaluate": self._evaluate,
        }
        return kinds[frame.values["kind"]](frame)

    def _prepare(self, frame: Frame) -> Reply:
        """Loads and partitions the data set into the workspace."""
        return workspace.prepare(frame.values), []

    def _framework(self, frame: Frame) -> Reply:
        """Which framework the model is of."""
        from models.zoo import KerasSpec

        spec = self._spec(frame.values["model"])
        return {"framework": "keras" if isinstance(spec, KerasSpec) else "torch"}, []

    def _initial(self, frame: Frame) -> Reply:
        """Builds the model and gives its initial params."""
        from models.zoo import KerasSpec

        spec, seed = self._spec(frame.values["model"]), frame.values["seed"]
        if isinstance(spec, KerasSpec):
            spec.require_trainable()
            model = spec.build(seed)
            return _begun("keras", model.trainable, True, spec.task, model.params())
        from edge_client.train import torch_trainer
        from models.zoo.trial import require_answers

        require_answers(spec)
        module = spec.build(seed)
        trainable = torch_trainer.TorchRuntime(module, spec.loss).trainable
        has_twin = spec.tensorflow_twin is not None
        return _begun("torch", trainable, has_twin, spec.task, torch_trainer.read(module))

    def _open(self, frame: Frame) -> Reply:
        self._run = workspace.open_workspace(Path(frame.values["folder"]))
        self._model = frame.values["model"]
        return {}, []

    def _set_model(self, frame: Frame) -> Reply:
        params, streams = (arrays.decode(blob) for blob in frame.blobs)
        self._round = Round(params, parted(streams))
        return {}, []

    def _train(self, frame: Frame) -> Reply:
        assert self._run is not None and self._round is not None
        task = TaskMessage.from_json(frame.values["task"])
        client_state = parted(arrays.decode(frame.blobs[0]))
        rows = self._run.part(frame.values["part"])
        examples = Examples(self._run.x[rows], self._run.y[rows])
        trainer = Trainer(self._runtime(frame.values["runtime"]))
        local = trainer.train(
            self._round.params, task.train_task(self._round.streams), examples, client_state
        )
        kept = arrays.encode(joined(local.client_state))
        return {}, [*faults.payloads(frame.values["fault"], task, local.update), kept]

    def _set_candidate(self, frame: Frame) -> Reply:
        if frame.file is None:
            self._candidate = arrays.decode(frame.blobs[0])
            return {}, []
        try:
            # Mapped: to read would move a position that all share who were given the file.
            with mmap.mmap(frame.file, 0, access=mmap.ACCESS_READ) as content:
                self._candidate = arrays.decode(content[:])
        finally:
            os.close(frame.file)
        return {}, []

    def _evaluate(self, frame: Frame) -> Reply:
        """Scores the rows [start, stop) of the test part."""
        assert self._run is not None
        rows = self._run.test_rows[frame.values["start"] : frame.values["stop"]]
        result = Trainer(self._runtime("evaluation")).evaluate(
            self._candidate, Examples(self._run.x[rows], self._run.y[rows])
        )
        counts = arrays.encode({"correct": result.correct, "labels": result.labels})
        return {"loss_sum": result.loss_sum}, [counts]

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
            self._runtimes[name] = self._made(name)
        return self._runtimes[name]

    def _made(self, name: str) -> Runtime:
        """`evaluation`: in the framework that the model is of, whatever the clients run."""
        if name == "litert":
            from edge_client.train.litert_trainer import LiteRTRuntime
            from edge_client.wire import manifest

            described = manifest.from_json(
                Path(self._model["manifest"]).read_bytes(), self._model["manifest"]
            )
            artifact = LiteRTRuntime(Path(self._model["tflite"]), described)
            artifact.self_test()
            return artifact
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


def _begun(framework: str, trainable: Sequence[str], has_twin: bool, task: str, params: Params) -> Reply:
    values = {"framework": framework, "trainable": list(trainable), "twin": has_twin, "task": task}
    return values, [arrays.encode(params)]


def serve(channel: socket.socket) -> None:
    """Answers jobs until the channel closes. A thread reads ahead, so that a closed channel ends a long job too."""
    waiting: queue.Queue[Frame] = queue.Queue()
    threading.Thread(target=_read, args=(channel, waiting), daemon=True).start()
    worker = Worker()
    failure: str | None = None
    while True:
        frame = waiting.get()
        told = frame.values.get("tell", False)
        try:
            values, blobs = worker.handle(frame)
        except Exception as error:
            values, blobs = {"error": _words(frame, error)}, []
            failure = values["error"] if told else failure
        if told:
            continue
        if failure is not None:
            values, blobs = {"error": failure}, []
        frames.send(channel, values, blobs)


def _read(channel: socket.socket, waiting: queue.Queue[Frame]) -> None:
    while True:
        try:
            waiting.put(frames.receive(channel))
        except frames.Closed:
            os._exit(0)


def _words(frame: Frame, error: Exception) -> str:
    """The error in one line for the user; the traceback of what is not plainly their input goes to the log."""
    from models.datasets import DataError

    task = frame.values.get("task")
    where = f"{frame.values['runtime']} client {task['client']}, round {task['round']}: " if task else ""
    named_by_us = isinstance(error, UserError | DataError) or type(error).__module__.startswith(
        ("models.", "edge_client.")
    )
    if named_by_us:
        return f"{where}{error}"
    with suppress(OSError):  # the log too lies on the disk that may be full
        traceback.print_exc()
    return f"{where}{frame.values['kind']} failed: {type(error).__name__}: {error}"


def main() -> None:
    die_with_parent()
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    np.seterr(all="ignore")  # a diverging client is rejected by the intake, which says so
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            serve(channel)
        except frames.Closed:
            os._exit(0)


if __name__ == "__main__":
    main()
