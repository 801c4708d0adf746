"""A strategy class of Flower in a worker: what it tells clients, and the next model that it makes of a round's updates.

The class is built anew for each round, as `coordinator.workers.own_strategy` does. What it has kept in attributes of its own (`Memory`)
comes with the job and goes back with the reply, so any worker may do a round, and a resumed run goes on where it was. Its
`configure_train` sees a Grid whose nodes are the clients that the engine has chosen; their updates come back as replies.
"""

from __future__ import annotations

import importlib
import inspect
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as strategy_module
from flwr.serverapp.strategy import FedAvg, Strategy

from coordinator.errors import UserError
from coordinator.flower_internals import SUPERLINK_NODE_ID, take_identity
from coordinator.workers import flower_memory
from coordinator.workers.own_strategy import OpenFile
from edge_client.wire.arrays import StoredArrays
from models import user_code
from strategies.own import is_shipped_by_flower, split_flower
from strategies.params import Params, flatten, subtree
from strategies.suggestions import suggest

_ROUND = "server-round"
_SMALLEST = {"min_train_nodes": 1, "min_evaluate_nodes": 0, "min_available_nodes": 1}
"""Flower would wait for more nodes than a small round has."""
_ENGINES = {
    "fraction_train": "federation.clients_per_round says how many clients take part",
    "min_train_nodes": "federation.min_updates says how many updates a round needs",
    "min_available_nodes": "federation.clients_per_round says how many clients take part",
    "fraction_evaluate": "[evaluation] says when models are scored",
    "min_evaluate_nodes": "[evaluation] says when models are scored",
}
"""Options of Flower's strategies about what Fedloop's engine does, and which key does it here."""


def describe(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What it sends to clients in `config`, apart from the model and the number of the round.

    Raises:
        UserError: there is no such class, it cannot be built with its options, or it keeps what cannot be stored.
    """
    strategy = _build(name, options)
    flower_memory.require_storable(name, strategy)
    messages = _configure(name, strategy, 1, {}, 2)
    return {"config": _config(name, messages)}


def aggregate(
    name: str, options: Mapping[str, Any], stored: int, request: Mapping[str, Any]
) -> tuple[dict[str, Any], Params]:
    """The next params, `params/…`, with the arrays that the strategy keeps, `kept/…`, and its other values.

    `stored`: descriptor of the file with the `params`, what the strategy has `kept`, and the deltas `0/…`, `1/…`. `request`: the number
    of the `round`, a `seed`, the figures of the `updates`, and the other values `kept`.

    Raises:
        UserError: the strategy failed, or returned something else than the arrays of the model.
    """
    tensors = StoredArrays(OpenFile(stored))
    params = {key: np.array(value) for key, value in subtree(tensors, "params").items()}
    strategy = _build(name, options)
    kept = {key: np.array(value) for key, value in subtree(tensors, "kept").items()}
    flower_memory.restore(strategy, request["kept"], kept)
    # Its own randomness, which no argument carries.
    entropy = np.random.SeedSequence(request["seed"]).generate_state(2)
    random.seed(int(entropy[0]))
    np.random.seed(int(entropy[1]))  # noqa: NPY002
    number, figures = request["round"], request["updates"]
    messages = _configure(name, strategy, number, params, len(figures))
    config = _config(name, messages)
    replies = [
        _reply(message, params, subtree(tensors, str(index)), values)
        for index, (message, values) in enumerate(zip(messages, figures, strict=True))
    ]
    returned, _ = _call(name, strategy, "aggregate_train", number, replies)
    values, arrays = flower_memory.collect(name, strategy, _build(name, options))
    moved = params if returned is None else _checked(name, returned, params)
    return {"kept": values, "config": config}, {**flatten({"params": moved, "kept": arrays})}


class _Nodes(Grid):  # type: ignore[misc]  # Flower's types are not followed
    """The clients of a round as nodes 1, 2, …; the engine sends the messages."""

    def __init__(self, count: int) -> None:
        self._nodes = list(range(1, count + 1))
        self._asked = 0

    def get_node_ids(self) -> Iterable[int]:
        self._asked += 1
        if self._asked > 2:  # it waits for more
            raise UserError(
                f"it waits for more than {len(self._nodes)} nodes, and this round has no more clients"
            )
        return list(self._nodes)

    def set_run(self, run: object) -> None:
        raise UserError("it sets the run of its Grid, and there is none")

    @property
    def run(self) -> Any:
        raise UserError("it asks for the run of its Grid, and there is none")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return Message(*args, **kwargs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise UserError("it sends messages itself, and the engine does so here")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise UserError("it fetches replies itself, and the engine does so here")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise UserError("it sends messages itself, and the engine does so here")


def _find(name: str) -> type[Any]:
    """The class.

    Raises:
        UserError: there is none, or it is no strategy.
    """
    module, attribute = split_flower(name)
    is_shipped = is_shipped_by_flower(name)
    try:
        found: Any = (
            getattr(importlib.import_module(module), attribute, None)
            if is_shipped
            else inspect.unwrap(user_code.load(f"{module}:{attribute}"))
        )
    except (user_code.UserCodeError, ImportError) as error:
        raise UserError(f"strategy.name = {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        known = (
            [key for key, each in vars(strategy_module).items() if _is_strategy(each)] if is_shipped else []
        )
        more = f"{suggest(attribute, known)}; {module} has {', '.join(sorted(known))}" if known else ""
        raise UserError(
            f"strategy.name = {name!r}: expected a class that extends flwr.serverapp.strategy.Strategy{more}"
        )
    return found


def _is_strategy(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Strategy) and not inspect.isabstract(value)


_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""Parameters that take whatever is given."""


def _build(name: str, options: Mapping[str, Any]) -> Any:
    make = _find(name)
    parameters = inspect.signature(make).parameters
    is_open = any(each.kind in _OPEN for each in parameters.values())
    takes = [key for key, each in parameters.items() if key not in _ENGINES and each.kind not in _OPEN]
    for key in options:
        if key in _ENGINES:
            raise UserError(f"strategy.{key}: this is for Flower's engine; {_ENGINES[key]}; leave it out")
        if key not in parameters and not is_open:
            raise UserError(
                f"strategy.{key}: {make.__name__} has no such argument{suggest(key, takes)}; it takes {', '.join(takes)}"
            )
    smallest = {
        key: value
        for key, value in _SMALLEST.items()
        if key in parameters or (is_open and issubclass(make, FedAvg))
    }
    take_identity(1, SUPERLINK_NODE_ID)
    try:
        with user_code.user_modules_first(Path.cwd()):
            return make(**smallest, **options)
    except Exception as error:  # shows the user any error of their code
        raise UserError(
            f"strategy.name = {name!r} cannot be built with {dict(options)!r}{user_code.error_location(error, make)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _configure(name: str, strategy: Any, number: int, params: Params, clients: int) -> list[Message]:
    """The messages of `configure_train`, in the order of the clients, each the model and the same config.

    Raises:
        UserError: it failed, chose among the clients, or sends something else than the model.
    """
    record = _record(params)
    sent = _call(name, strategy, "configure_train", number, record, ConfigRecord(), _Nodes(clients))
    messages = sorted(sent, key=lambda each: each.metadata.dst_node_id)
    nodes = [each.metadata.dst_node_id for each in messages]
    if nodes != list(range(1, clients + 1)):
        raise UserError(
            f"strategy.name = {name!r}: its configure_train sends messages to {len(nodes)} of {clients} nodes, but the engine chooses "
            "the clients (federation.clients_per_round), and each gets one"
        )
    for message in messages:
        arrays = list(message.content.array_records.values())
        if len(arrays) != 1 or {key: each.data for key, each in arrays[0].items()} != {
            key: each.data for key, each in record.items()
        }:
            raise UserError(
                f"strategy.name = {name!r}: its configure_train sends other arrays than the model, and Fedloop's clients start from that"
            )
    return messages


def _config(name: str, messages: Sequence[Message]) -> dict[str, Any]:
    """What all clients are told besides the number of the round."""
    told = [
        {
            key: value
            for record in message.content.config_records.values()
            for key, value in record.items()
            if key != _ROUND
        }
        for message in messages
    ]
    if any(each != told[0] for each in told):
        raise UserError(
            f"strategy.name = {name!r}: its configure_train sends clients different configs, but Fedloop's clients all have the same work"
        )
    return {
        key: value if isinstance(value, int | float | str) else repr(value) for key, value in told[0].items()
    }


def _reply(
    message: Message, params: Params, delta: Mapping[str, np.ndarray], figures: Mapping[str, Any]
) -> Message:
    """What a client of Flower would answer: its trained model and its metrics."""
    trained = {key: np.asarray(value + delta[key], np.float32) for key, value in params.items()}
    metrics = MetricRecord(
        {
            "num-examples": figures["num_examples"],
            "num-steps": figures["num_steps"],
            "train_loss": figures["train_loss"],
        }
    )
    return Message(RecordDict({"arrays": _record(trained), "metrics": metrics}), reply_to=message)


def _record(tensors: Params) -> ArrayRecord:
    return ArrayRecord({key: Array(np.asarray(value, order="C")) for key, value in tensors.items()})


def _call(name: str, strategy: Any, method: str, *arguments: Any) -> Any:
    call: Callable[..., Any] = getattr(strategy, method)
    try:
        with user_code.user_modules_first(Path.cwd()):
            found = call(*arguments)
            return list(found) if method == "configure_train" else found
    except UserError as error:
        raise UserError(f"strategy.name = {name!r}: {error}") from None
    except Exception as error:  # shows the user any error of their code
        raise UserError(
            f"strategy.name = {name!r}: {method} failed{user_code.error_location(error, type(strategy))}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _checked(name: str, returned: Any, params: Params) -> Params:
    """The arrays of the next model, float32.

    Raises:
        UserError: they are not those of the model.
    """
    found = {key: np.asarray(array.numpy()) for key, array in returned.items()}
    if {key: each.shape for key, each in found.items()} != {key: each.shape for key, each in params.items()}:
        raise UserError(
            f"strategy.name = {name!r}: aggregate_train returned other arrays than those of the model"
        )
    return {key: np.asarray(found[key], np.float32) for key in params}
