"""What travels between coordinator and client: a task out, a result back.

A message is named arrays plus a JSON object (see `edge_client.wire.arrays`). In a result the arrays are
`delta/<tensor>` and, for client rules that send more, `<stream>/<tensor>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_client.train.trainer import TrainTask
from edge_client.wire import arrays
from edge_client.wire.strict import Unfit, is_text, parse_message, shown
from strategies import client_rules
from strategies.client_rules import Streams
from strategies.state import joined
from strategies.update import Update

DELTA = "delta"

LARGEST_COUNT = 2**53
"""Largest whole number in a result: up to here float64, in which updates are weighted, holds each exactly."""


@dataclass(frozen=True)
class TaskMessage:
    """One client's work in one round. `base` is the SHA-256 of the params to start from."""

    round: int
    client: str
    base: str
    seed: int
    batch_size: int
    lr: float
    epochs: int | None
    steps: int | None
    rule: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: object) -> TaskMessage:
        """Raises Unfit where a key is missing or of another kind, or the work makes no sense."""
        message = parse_message(TaskMessage, document, "task")
        if (message.epochs is None) == (message.steps is None):
            raise Unfit(
                f"task: exactly one of epochs and steps is expected, got {message.epochs} and {message.steps}"
            )
        for name in ("round", "batch_size", "epochs", "steps"):
            value = getattr(message, name)
            if value is not None and value < 1:
                raise Unfit(f"task.{name} is {value}, expected 1 or more")
        return message

    def train_task(self, broadcast: Streams) -> TrainTask:
        """The task for a Trainer, with the streams that came along."""
        return TrainTask(
            seed=self.seed,
            batch_size=self.batch_size,
            lr=self.lr,
            epochs=self.epochs,
            steps=self.steps,
            rule=client_rules.from_options(self.rule),
            broadcast=broadcast,
        )


@dataclass(frozen=True)
class ResultHeader:
    """What a client says about the update it sends."""

    round: int
    client: str
    base: str
    num_examples: int
    num_steps: int
    train_loss: float


def encode_result(task: TaskMessage, update: Update) -> bytes:
    """The update as the bytes a client uploads."""
    return arrays.encode(joined({DELTA: update.delta, **update.extras}), asdict(_header_of(task, update)))


def write_result(path: Path, task: TaskMessage, update: Update) -> None:
    """Writes what `encode_result` gives to a file. Tensors that lie on disk are never held as a whole.

    Raises:
        OSError: the disk is full or not writable.
    """
    arrays.write(path, joined({DELTA: update.delta, **update.extras}), asdict(_header_of(task, update)))


def _header_of(task: TaskMessage, update: Update) -> ResultHeader:
    return ResultHeader(
        task.round, task.client, task.base, update.num_examples, update.num_steps, update.train_loss
    )


def result_header(values: Mapping[str, Any]) -> ResultHeader:
    """The header of a result from its JSON object.

    Raises:
        arrays.Malformed: a key is missing, of another type, or beyond what arithmetic takes.
    """
    kinds = {
        "round": int,
        "client": str,
        "base": str,
        "num_examples": int,
        "num_steps": int,
        "train_loss": float,
    }
    for key, kind in kinds.items():
        value = values.get(key)
        number = kind is float and isinstance(value, int)
        if isinstance(value, bool) or not (isinstance(value, kind) or number):
            raise arrays.Malformed(f"result header: {key} is {shown(value)}, expected {kind.__name__}")
        if isinstance(value, str) and not is_text(value):
            raise arrays.Malformed(f"result header: {key} is {shown(value)}, which is no text")
        if isinstance(value, int) and abs(value) > LARGEST_COUNT:
            raise arrays.Malformed(
                f"result header: {key} is {shown(value)}, expected at most {LARGEST_COUNT}"
            )
    return ResultHeader(**{key: kind(values[key]) for key, kind in kinds.items()})
