"""The messages between our ServerApp and our ClientApp, as records of Flower.

    describe    server: nothing                            node: which client it is, and of which data
    train       server: a task, and what it starts from    node: the upload of `edge_client.wire.arrays`, or why there is none

Everything large is bytes in our own encoding (safetensors): an `Array` carries them unchanged, so that dtypes and bits
stay what they are, `rounds.intake.check` reads the upload as it was made, and nothing is unpickled. Flower sends an array
in chunks, and one that several messages share only once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from edge_client.wire.device import TaskMessage
from edge_client.wire.strict import InvalidDocument, parse_message, printable

DESCRIBE = "query.describe"
"""Type of the message that asks a node which client it is."""

TRAIN = "train"
"""Type of the message that has a node train."""

_BYTES, _VALUES = "fedloop.bytes", "fedloop.values"
_REASON_CHARACTERS = 500


class BadReply(ValueError):
    """A node's reply is not what our ClientApp sends."""


@dataclass(frozen=True)
class Description:
    """A node as it describes itself.

    Attributes:
        partition: which client it is, from 0. partitions: how many clients there are.
        examples: its rows to train on.
        fingerprint: of the data set that it has partitioned; empty if it trains on rows of its own.
    """

    partition: int
    partitions: int
    examples: int
    fingerprint: str


@dataclass(frozen=True)
class TrainRequest:
    """What a node needs to train.

    Attributes:
        model: its description, as workers take it.
        schema: the data schema of a table, by which a node reads rows of its own; else None.
        params, streams, state: safetensors; `state` is the client rule's, from the client's last accepted round.
        tflite, manifest: the artifact's two files for the litert runtime, else empty.
    """

    task: TaskMessage
    runtime: str
    model: Mapping[str, Any]
    schema: Mapping[str, Any] | None
    params: bytes
    streams: bytes
    state: bytes
    tflite: bytes = b""
    manifest: bytes = b""

    def to_record(self) -> RecordDict:
        document = {
            "task": self.task.to_json(),
            "runtime": self.runtime,
            "model": dict(self.model),
            "schema": self.schema,
        }
        blobs = {name: getattr(self, name) for name in _BLOBS}
        return RecordDict(
            {_BYTES: _to_arrays(blobs), _VALUES: ConfigRecord({"request": json.dumps(document)})}
        )

    @staticmethod
    def of(message: Message) -> TrainRequest:
        document = json.loads(message.content[_VALUES]["request"])
        task = TaskMessage.from_json(document["task"])
        blobs = _from_arrays(message.content[_BYTES])
        return TrainRequest(task, document["runtime"], document["model"], document["schema"], **blobs)


_BLOBS = ("params", "streams", "state", "tflite", "manifest")


def question(node: int, schema: Mapping[str, Any] | None, ttl: float) -> Message:
    """The message `DESCRIBE` to a node. `schema`: as in `TrainRequest`."""
    values = ConfigRecord({"schema": json.dumps(schema)})
    return Message(RecordDict({_VALUES: values}), node, DESCRIBE, ttl=ttl)


def read_question(question: Message) -> Mapping[str, Any] | None:
    """The schema in a message `DESCRIBE`."""
    schema: Mapping[str, Any] | None = json.loads(question.content[_VALUES]["schema"])
    return schema


def describe(description: Description, question: Message) -> Message:
    """The reply to `DESCRIBE`."""
    return Message(RecordDict({_VALUES: ConfigRecord(asdict(description))}), reply_to=question)


def read_description(reply: Message) -> Description:
    """Raises: BadReply: it is no description, or the node refused, with the reason."""
    values = _values(reply)
    try:
        return parse_message(Description, values, "the description of a node")
    except InvalidDocument as error:
        raise BadReply(str(error)) from None


def upload(payload: bytes, state: bytes, question: Message) -> Message:
    """The reply to `TRAIN`. `state`: of the client rule, for the client's next round."""
    return Message(RecordDict({_BYTES: _to_arrays({"upload": payload, "state": state})}), reply_to=question)


def read_upload(reply: Message) -> tuple[bytes, bytes]:
    """Upload and state. Raises: BadReply: there are none, with the reason."""
    if _BYTES not in reply.content:
        _values(reply)
        raise BadReply("its reply holds no upload")
    blobs = _from_arrays(reply.content[_BYTES])
    if blobs.keys() != {"upload", "state"}:
        raise BadReply("its reply holds no upload")
    return blobs["upload"], blobs["state"]


def refuse(reason: str, question: Message) -> Message:
    """The reply of a node that cannot do what is asked."""
    return Message(RecordDict({_VALUES: ConfigRecord({"refused": reason})}), reply_to=question)


def failure(reply: Message) -> str | None:
    """Why Flower could not deliver a message or run the ClientApp; None if it could."""
    if not reply.has_error():
        return None
    return printable(reply.error.reason or f"Flower's error {reply.error.code}", _REASON_CHARACTERS)


def _values(reply: Message) -> dict[str, Any]:
    values = dict(reply.content[_VALUES]) if _VALUES in reply.content else {}
    if "refused" in values:
        raise BadReply(printable(str(values["refused"]), _REASON_CHARACTERS))
    return values


def _to_arrays(blobs: Mapping[str, bytes]) -> ArrayRecord:
    return ArrayRecord(
        {name: Array("uint8", (len(blob),), "fedloop.bytes", blob) for name, blob in blobs.items()}
    )


def _from_arrays(record: ArrayRecord) -> dict[str, bytes]:
    return {name: array.data for name, array in record.items()}
