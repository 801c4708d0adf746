"""The task that the coordinator sends a client, and the result that comes back.

A message is named arrays plus a JSON object (see `edge_client.wire.arrays`). In a result the arrays are
`delta/<tensor>` and, for client rules that send more, `<stream>/<tensor>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_client.wire import arrays
from edge_client.wire.strict import InvalidDocument, abbreviate, is_text, parse_message
from strategies.state import flatten
from strategies.update import Update

DELTA = "delta"

LARGEST_COUNT = 2**53
"""Largest integer in a result: float64, which weighs updates, represents integers exactly up to here."""


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
        """Raises InvalidDocument if a key is missing or of another type, or the work is invalid."""
        message = parse_message(TaskMessage, document, "task")
        if (message.epochs is None) == (message.steps is None):
            raise InvalidDocument(
                f"task: exactly one of epochs and steps is expected, got {message.epochs} and {message.steps}"
            )
        for name in ("round", "batch_size", "epochs", "steps"):
            value = getattr(message, name)
            if value is not None and value < 1:
                raise InvalidDocument(f"task.{name} is {value}, expected 1 or more")
        return message


@dataclass(frozen=True)
class ResultHeader:
    """A client's statements about its update."""

    round: int
    client: str
    base: str
    num_examples: int
    num_steps: int
    train_loss: float


def encode_result(task: TaskMessage, update: Update) -> bytes:
    """The update as the bytes a client uploads."""
    return arrays.encode(flatten({DELTA: update.delta, **update.extras}), asdict(_header_of(task, update)))


def write_result(path: Path, task: TaskMessage, update: Update) -> None:
    """Writes the bytes of `encode_result` to a file. Tensors on disk are never loaded completely.

    Raises:
        OSError: the disk is full or not writable.
    """
    arrays.write(path, flatten({DELTA: update.delta, **update.extras}), asdict(_header_of(task, update)))


def _header_of(task: TaskMessage, update: Update) -> ResultHeader:
    return ResultHeader(
        task.round, task.client, task.base, update.num_examples, update.num_steps, update.train_loss
    )


def result_header(values: Mapping[str, Any]) -> ResultHeader:
    """The header of a result from its JSON object.

    Raises:
        arrays.Malformed: a key is missing, of another type, or too large for exact arithmetic.
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
            raise arrays.Malformed(f"result header: {key} is {abbreviate(value)}, expected {kind.__name__}")
        if isinstance(value, str) and not is_text(value):
            raise arrays.Malformed(f"result header: {key} is {abbreviate(value)}, which is not valid text")
        if isinstance(value, int) and abs(value) > LARGEST_COUNT:
            raise arrays.Malformed(
                f"result header: {key} is {abbreviate(value)}, expected at most {LARGEST_COUNT}"
            )
    return ResultHeader(**{key: kind(values[key]) for key, kind in kinds.items()})
