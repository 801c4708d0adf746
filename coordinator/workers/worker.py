"""One worker process: loads data, builds models, trains and evaluates, one job at a time.

Broadcasts set its state: the run's data and model once (`open`), the params to train from and to score (`params`), and what the
clients of a round share besides (`round`). A job then needs little more than the index of its client.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from coordinator.errors import DISK_ERRNOS, UserError
from coordinator.workers import block, shared_params, training, workspace, workspace_arrays
from coordinator.workers.evaluation import CLUSTERS, encode_evaluation
from coordinator.workers.runtimes import Runtimes, find_spec, load_litert
from coordinator.workers.versions import Versions
from edge_client.data.examples import Examples
from edge_client.processes.channel import Closed, Frame, read_ahead, send_mapped
from edge_client.processes.process import die_with_parent, schedule_as_worker, serve_forks
from edge_client.processes.unneeded_memory import trim_heap
from edge_client.train.evaluation import Evaluation
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage
from strategies import own, personalisation
from strategies.params import Params, materialize, subtree, unflatten
from strategies.personalisation import ClusterModels, PersonalRule

if TYPE_CHECKING:
    from models.zoo import KerasSpec, ModelSpec

Reply = tuple[dict[str, Any], list[bytes]]


class Worker:
    """The state of a worker: data, params, and the model in its runtimes."""

    def __init__(self) -> None:
        self._run: workspace_arrays.Workspace | None = None
        self._folder = Path()
        self._round: block.RoundStart | None = None
        self._params: Params = {}
        self._runtimes = Runtimes({})
        self._updates: int | None = None
        self._versions = Versions()

    def handle(self, frame: Frame) -> Reply:
        kinds: dict[str, Callable[[Frame], Reply]] = {
            "schedule": self._schedule,
            "prepare": self._prepare,
            "framework": self._framework,
            "poison": self._poison,
            "initial": self._initial,
            "verify": self._verify,
            "engine": self._require_engine,
            "open": self._open,
            "params": self._set_params,
            "round": self._set_round,
            "train": self._train,
            "version": self._versions.add,
            "train_version": self._train_version,
            "train_alone": self._train_alone,
            "score_client": self._score_client,
            "evaluate": self._evaluate,
            "attacked": self._evaluate_attacked,
            "predict": self._predict,
            "strategy": self._describe_strategy,
            "updates": self._set_updates,
            "aggregate": self._aggregate,
            "server": self._serve_strategy,
            "audit": self._audit,
        }
        return kinds[frame.values["kind"]](frame)

    def _schedule(self, frame: Frame) -> Reply:
        schedule_as_worker(frame.values["core"])
        return {}, []

    def _prepare(self, frame: Frame) -> Reply:
        """Loads and partitions the data set into the workspace."""
        description = workspace.prepare(frame.values)
        trim_heap()
        return description, []

    def _poison(self, frame: Frame) -> Reply:
        """Changes the rows of malicious clients in the workspace."""
        from coordinator.workers import attacks

        return attacks.poison(frame.values), []

    def _framework(self, frame: Frame) -> Reply:
        """The model's framework."""
        from models.zoo import KerasSpec

        spec = find_spec(frame.values["model"])
        return {"framework": "keras" if isinstance(spec, KerasSpec) else "torch"}, []

    def _initial(self, frame: Frame) -> Reply:
        """Builds the model and returns its initial params."""
        from models.zoo import KerasSpec

        spec, seed = find_spec(frame.values["model"]), frame.values["seed"]
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
        load_litert(frame.values)
        return {}, []

    def _require_engine(self, frame: Frame) -> Reply:
        """The engine of the run, and why this machine cannot use it; empty if it can."""
        from coordinator.workers.kernels.engine import choose_engine

        spec = find_spec(frame.values["model"])
        return choose_engine(frame.values["engine"], spec, frame.values["batch_size"]), []

    def _open(self, frame: Frame) -> Reply:
        self._folder = Path(frame.values["folder"])
        self._run = workspace_arrays.open_workspace(self._folder)
        self._runtimes = Runtimes(frame.values["model"])
        return {}, []

    def _set_params(self, frame: Frame) -> Reply:
        """The params to train from and to score."""
        if frame.file is None:
            self._params = dict(sorted(arrays.decode(frame.blobs[0]).items()))
            return {}, []
        try:
            if frame.values["is_mapped"]:
                self._params = shared_params.read(frame.file)
            else:
                # Mapped, because reading would move a file position that all workers share.
                with mmap.mmap(frame.file, 0, access=mmap.ACCESS_READ) as content:
                    self._params = arrays.decode(content[:])
        finally:
            os.close(frame.file)
        return {}, []

    def _set_round(self, frame: Frame) -> Reply:
        """What all clients of a round share besides the params."""
        terms = block.RoundTerms.from_json(frame.values["terms"])
        streams, models = (unflatten(arrays.decode(blob)) if blob else {} for blob in frame.blobs)
        self._round = block.RoundStart(self._params, streams, terms, models)
        if self._run is not None:
            self._run.release()
        return {}, []

    def _train(self, frame: Frame) -> Reply:
        """Trains the clients of a job, and answers as `coordinator.workers.block` says."""
        assert self._run is not None and self._round is not None
        return block.train(self._round, frame.values, frame.blobs, self._run, self._runtimes.trainer)

    def _train_version(self, frame: Frame) -> Reply:
        """Trains a client of an asynchronous run."""
        assert self._run is not None
        return self._versions.train(frame, self._run, self._runtimes.get)

    def _evaluate(self, frame: Frame) -> Reply:
        """Scores the rows [start, stop) of the test part."""
        assert self._run is not None
        rows = self._run.test_rows[frame.values["start"] : frame.values["stop"]]
        runtimes, params = self._runtimes.narrower(frame.values.get("class"), self._params)
        scored = self._score(runtimes, materialize(params), rows, frame.values["logits"])
        self._run.release()
        return encode_evaluation(scored)

    def _evaluate_attacked(self, frame: Frame) -> Reply:
        """How many of the held-out rows that an attack is about get the class that it wants."""
        from coordinator.workers import attacks

        assert self._run is not None
        x, wanted = attacks.attacked_rows(self._run, frame.values["attack"], frame.values["classes"])
        if not len(wanted):
            return {"rows": 0, "hits": 0}, []
        scored = Trainer(self._runtimes.get("evaluation")).evaluate(self._params, Examples(x, wanted))
        return {"rows": len(wanted), "hits": int(scored.correct.sum())}, []

    def _train_alone(self, frame: Frame) -> Reply:
        """Trains a client on its own rows and scores the result on its own test rows."""
        assert self._run is not None
        start, part = self._params, frame.values["part"]
        task = TrainTask.of(TaskMessage.from_json(frame.values["task"]), {})
        local = Trainer(self._runtimes.get(frame.values["runtime"])).train(
            start, task, self._examples(self._run.part(part))
        )
        trained = {name: start[name] + delta for name, delta in local.update.delta.items()}
        own_rows = self._run.test_rows[self._run.owners == part]
        params = {**start, **trained}
        return encode_evaluation(self._score(self._runtimes, params, own_rows, frame.values["logits"]))

    def _score_client(self, frame: Frame) -> Reply:
        """Scores a client's own model on its own test rows."""
        assert self._run is not None
        rule = personalisation.from_options(frame.values["rule"])
        assert isinstance(rule, PersonalRule)
        part = frame.values["part"]
        state = unflatten(arrays.decode(frame.blobs[0])) if frame.blobs else {}
        own_model, chosen = rule.personal(self._params, state), None
        if isinstance(rule, ClusterModels):
            models = rule.candidates(self._params, unflatten(subtree(self._params, CLUSTERS)))
            trainer = Trainer(self._runtimes.get("evaluation"))
            chosen = trainer.choose(models, self._examples(self._run.part(part)))
            own_model = models[chosen]
        own_rows = self._run.test_rows[self._run.owners == part]
        values, blobs = encode_evaluation(
            self._score(self._runtimes, materialize(own_model), own_rows, False)
        )
        return {**values, "chosen": chosen}, blobs

    def _score(
        self, runtimes: Runtimes, params: Params, rows: npt.NDArray[np.int64], keep_logits: bool
    ) -> Evaluation:
        trainer = Trainer(runtimes.get("evaluation"))
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
        runtime = Runtimes(request["description"]).get("evaluation")
        return prediction.run(request, lambda x: runtime.logits(self._params, x)), []

    def _describe_strategy(self, frame: Frame) -> Reply:
        """The base of a user's own strategy, and whose each option is; or what a strategy of Flower tells clients."""
        if own.is_flower(frame.values["name"]):
            from coordinator.workers import flower_strategy

            return flower_strategy.describe(frame.values["name"], frame.values["options"]), []
        from coordinator.workers import own_strategy

        return own_strategy.describe(frame.values["name"], frame.values["options"]), []

    def _set_updates(self, frame: Frame) -> Reply:
        if self._updates is not None:
            os.close(self._updates)
        self._updates = frame.file
        return {}, []

    def _aggregate(self, frame: Frame) -> Reply:
        """The delta that a user's own strategy makes of a cohort's updates; of one of Flower the next params, and what it keeps."""
        assert self._updates is not None
        values = frame.values
        if own.is_flower(values["name"]):
            from coordinator.workers import flower_strategy

            reply, tensors = flower_strategy.aggregate(
                values["name"], values["options"], self._updates, values
            )
            return reply, [arrays.encode(tensors)]
        from coordinator.workers import own_strategy

        delta = own_strategy.aggregate(values["name"], values["options"], self._updates, values["updates"])
        return {}, [arrays.encode(delta)]

    def _serve_strategy(self, frame: Frame) -> Reply:
        """Work on rows of the server's own."""
        from coordinator.workers import server_jobs

        assert self._round is not None
        return server_jobs.run(frame, self._round, self._runtimes, self._folder)

    def _audit(self, frame: Frame) -> Reply:
        """Work of a privacy audit."""
        from coordinator.workers.audit import jobs

        assert self._run is not None
        return jobs.run(frame, self._params, self._runtimes, self._run)


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
        first_sum = len(blobs) - len(values.get("sums", ()))
        send_mapped(channel, values, blobs[:first_sum], blobs[first_sum:])


def _disk_errno(error: Exception) -> dict[str, Any]:
    """The `errno` of a disk error, which may be temporary; else empty."""
    number = error.errno if isinstance(error, OSError) else None
    return {"errno": number} if number in DISK_ERRNOS else {}


def _format_error(frame: Frame, error: Exception) -> str:
    """One line for the user. The traceback goes to the log unless the error is plainly in the user's input."""
    from models.datasets import DataError

    task = frame.values.get("task")
    where = f"{frame.values['runtime']} client {task['client']}, round {task['round']}: " if task else ""
    if isinstance(error, training.ClientFailed) and isinstance(error.__cause__, Exception):
        where, error = str(error), error.__cause__
    is_ours = isinstance(error, UserError | DataError) or type(error).__module__.startswith(
        ("models.", "edge_client.")
    )
    if is_ours:
        return f"{where}{error}"
    with suppress(OSError):  # the log may be on a full disk too
        traceback.print_exc()
    return f"{where}{frame.values['kind']} failed: {type(error).__name__}: {error}"


def main() -> None:
    """Becomes one worker, whose channel is the given file descriptor.

    After `--fork` it is the descriptor of a socket over which workers are asked for. Each is forked from this process, which has
    imported the modules that follow, so that these are in memory once.
    """
    die_with_parent()
    # Ctrl-C reaches the whole process group; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    np.seterr(all="ignore")  # the intake rejects a diverging client and says so
    forks = sys.argv[1] == "--fork"
    descriptor, *modules = sys.argv[2:] if forks else sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    with socket.socket(fileno=int(descriptor)) as given:
        if not forks:
            _serve_until_closed(given)
        with socket.socket(fileno=serve_forks(given)) as channel:
            _serve_until_closed(channel)


def _serve_until_closed(channel: socket.socket) -> NoReturn:
    with suppress(Closed):
        serve(channel)
    os._exit(0)


if __name__ == "__main__":
    main()
