"""The ClientApp: a node trains the client whose part of the data it holds.

    app = make_client_app(folder)      # of the Flower app, with its experiment.toml

Every node partitions the experiment's data set by the experiment's seed, as a simulation does, and trains on the part that
its configuration names; or it trains on rows of its own (`settings`). Flower's simulation keeps the process of a node, so data and runtimes are kept between messages;
a SuperNode starts a process for each message.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from coordinator.errors import UserError
from coordinator.experiments.experiment import resolve
from coordinator.experiments.schema import Experiment
from coordinator.fleets import flower_messages as messages
from coordinator.fleets.flower_messages import Description, TrainRequest
from coordinator.on_flower.settings import EXPERIMENT, NodeSettings, read_node
from coordinator.toml_files import read_toml
from coordinator.workers import workspace, workspace_arrays
from coordinator.workers.runtimes import Runtimes, load_litert
from edge_client import config
from edge_client.data import DataProblem, open_data
from edge_client.data.examples import Examples, NoExamples
from edge_client.processes.process import ONE_THREAD
from edge_client.train.resolve import CannotRun, require_compatible
from edge_client.train.trainer import BatchTooLarge, Runtime, Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire import schema as schemas
from edge_client.wire.device import ModelRef
from models.datasets import DataError
from models.user_code import UserCodeError
from strategies.params import flatten, unflatten

_THEIRS = (UserError, DataError, DataProblem, NoExamples, BatchTooLarge, CannotRun, UserCodeError)
"""Errors in what the node was given; the server is told the reason. Flower reports all others with a traceback."""


def make_client_app(folder: Path) -> ClientApp:
    """The ClientApp of the Flower app in `folder`."""
    os.environ.update(ONE_THREAD)  # before a framework is imported
    np.seterr(all="ignore")  # the server rejects a diverging client and says so
    app = ClientApp()
    node = _Node(folder)

    @app.query("describe")  # type: ignore[untyped-decorator]
    def describe(message: Message, context: Context) -> Message:
        schema = messages.read_question(message)
        return _answer(message, lambda: messages.describe(node.describe(read_node(context), schema), message))

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        request = TrainRequest.of(message)
        return _answer(message, lambda: messages.upload(*node.train(request, read_node(context)), message))

    return app


def _answer(question: Message, work: Callable[[], Message]) -> Message:
    try:
        return work()
    except _THEIRS as error:
        return messages.refuse(str(error), question)


class _Node:
    """Data and runtimes of a process, which may serve several clients in turn."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partitioned: dict[Path | None, tuple[Mapping[str, Any], workspace_arrays.Workspace]] = {}
        self._runtimes: dict[str, Runtime] = {}

    def describe(self, settings: NodeSettings, schema: Mapping[str, Any] | None) -> Description:
        rows = self._examples(settings, schema)
        fingerprint = "" if settings.edge_config else self._partition(settings)[0]["fingerprint"]
        return Description(settings.partition, settings.partitions, len(rows), fingerprint)

    def train(self, request: TrainRequest, settings: NodeSettings) -> tuple[bytes, bytes]:
        """The upload, and the client rule's new state.

        Raises:
            UserError: the params are not those that the task names.
        """
        if arrays.sha256(request.params) != request.task.base:
            raise UserError(
                f"the params are not those of model {request.task.base[:12]}, which the task names"
            )
        rows = self._examples(settings, request.schema)
        require_compatible(rows, _model_ref(request.model))
        local = Trainer(self._runtime(request)).train(
            arrays.decode(request.params),
            TrainTask.of(request.task, unflatten(arrays.decode(request.streams))),
            rows,
            unflatten(arrays.decode(request.state)),
        )
        return arrays.encode_result(request.task, local.update), arrays.encode(flatten(local.client_state))

    def _examples(self, settings: NodeSettings, schema: Mapping[str, Any] | None) -> Examples:
        """The rows that a client trains on: its own, or its part of the data set."""
        if settings.edge_config is not None:
            return self._own_rows(settings.edge_config, schema)
        _, rows = self._partition(settings)
        if not 0 <= settings.partition < len(rows.ends):
            raise UserError(
                f"partition-id = {settings.partition}: the data is dealt out to {len(rows.ends)} clients, 0 to {len(rows.ends) - 1}"
            )
        part = rows.part(settings.partition)
        return Examples(rows.x[part], rows.y[part])

    def _own_rows(self, edge_config: Path, schema: Mapping[str, Any] | None) -> Examples:
        known = config.load(edge_config, {}).config.data
        wanted = self._experiment.data.dataset
        if wanted not in known:
            raise UserError(
                f"{edge_config}: has no table [data.{wanted}], which the experiment's data.dataset names; it has: "
                f"{', '.join(known) or 'none'}"
            )
        read = None if schema is None else schemas.from_document(dict(schema), "the data schema of the task")
        return open_data(known[wanted], read).train()

    @cached_property
    def _experiment(self) -> Experiment:
        path = self._folder / EXPERIMENT
        return resolve(read_toml(path), str(path), stored=True)

    def _partition(self, settings: NodeSettings) -> tuple[Mapping[str, Any], workspace_arrays.Workspace]:
        """Description and rows of the partitioned data set. The files are removed at once: open ones stay readable."""
        if settings.data_dir not in self._partitioned:
            os.chdir(self._folder)  # the code of a user is looked for there
            experiment = self._experiment
            folder = Path(tempfile.mkdtemp(prefix="fedloop-"))
            try:
                data_info = workspace.prepare(
                    {
                        "folder": str(folder),
                        "seed": experiment.data_seed,
                        "data": experiment.data.to_load,
                        "clients": experiment.federation.clients,
                        "data_dir": str(settings.data_dir) if settings.data_dir else None,
                    }
                )
                rows = workspace_arrays.open_workspace(folder)
            finally:
                shutil.rmtree(folder)
            self._partitioned[settings.data_dir] = data_info, rows
        return self._partitioned[settings.data_dir]

    def _runtime(self, request: TrainRequest) -> Runtime:
        key = request.runtime
        if key not in self._runtimes:
            self._runtimes[key] = self._make_runtime(request)
        return self._runtimes[key]

    def _make_runtime(self, request: TrainRequest) -> Runtime:
        if request.runtime == "torch":
            import torch

            torch.set_num_threads(1)
        if request.runtime != "litert":
            return Runtimes(request.model).get(request.runtime)
        with tempfile.TemporaryDirectory(prefix="fedloop-") as folder:
            files = {"tflite": request.tflite, "manifest": request.manifest}
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            return load_litert({name: str(Path(folder) / name) for name in files})


def _model_ref(model: Mapping[str, Any]) -> ModelRef:
    shape = tuple(model["input_shape"])
    return ModelRef(
        model["name"], model["options"], shape, model["classes"], model["input_dtype"], model["task"]
    )
