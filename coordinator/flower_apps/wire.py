"""Messages of a Flower app between our own processes: JSON for what is small, and the bytes of arrays as they are.

An `Array` holds its tensor in serialized form already, so its bytes travel without being encoded again, and nothing is hashed,
which Flower's own transport does for every object. A worker keeps the byte strings of its last message: a model that a round
sends to many clients reaches each worker once.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict

from coordinator.flower_internals import make_array_record

_METADATA = (
    "run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id", "created_at", "ttl",
    "message_type", "src_task_id", "dst_task_id",
)  # fmt: skip
_NEW = -1


def encode_message(message: Message) -> tuple[dict[str, Any], list[bytes]]:
    """A message as JSON values, and the bytes of its arrays."""
    values: dict[str, Any] = {"metadata": [getattr(message.metadata, name) for name in _METADATA]}
    if message.has_error():
        values["error"] = [message.error.code, message.error.reason]
        return values, []
    values["content"], blobs = encode_records(message.content)
    return values, blobs


def decode_message(values: dict[str, Any], blobs: Sequence[bytes]) -> Message:
    """The inverse of `encode_message`: new records, which share the bytes of their arrays."""
    metadata = Metadata(*values["metadata"])
    if "error" in values:
        return Message(Error(*values["error"]), metadata=metadata)
    return Message(decode_records(values["content"], blobs), metadata=metadata)


def encode_records(records: RecordDict) -> tuple[list[Any], list[bytes]]:
    """Records as JSON values, and the bytes of their arrays."""
    encoded: list[Any] = []
    blobs: list[bytes] = []
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            arrays = []
            for key, array in record.items():
                arrays.append([key, array.dtype, array.shape, array.stype])
                blobs.append(array.data)
            encoded.append([name, "arrays", arrays])
        elif isinstance(record, MetricRecord):
            encoded.append([name, "metrics", dict(record)])
        else:
            encoded.append([name, "config", {key: _to_json(value) for key, value in record.items()}])
    return encoded, blobs


def decode_records(values: Sequence[Any], blobs: Sequence[bytes]) -> RecordDict:
    """The inverse of `encode_records`."""
    records = RecordDict()
    data = iter(blobs)
    for name, kind, content in values:
        if kind == "arrays":
            records[name] = make_array_record((*array, next(data)) for array in content)
        elif kind == "metrics":
            records[name] = MetricRecord(content)
        else:
            records[name] = ConfigRecord({key: _from_json(value) for key, value in content.items()})
    return records


class SharedBlobs:
    """The byte strings of the last frame on a channel; both ends have one, and so agree without a word about it."""

    def __init__(self) -> None:
        self._last: Sequence[bytes] = ()

    def reduce(self, blobs: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
        """Where each blob is in the last frame, and the blobs that are not in it. Objects are compared, not contents."""
        known = {id(blob): place for place, blob in enumerate(self._last)}
        places = [known.get(id(blob), _NEW) for blob in blobs]
        self._last = blobs
        return places, [blob for blob, place in zip(blobs, places, strict=True) if place == _NEW]

    def restore(self, places: Sequence[int], new: Sequence[bytes]) -> Sequence[bytes]:
        """The inverse of `reduce`."""
        fresh = iter(new)
        self._last = [next(fresh) if place == _NEW else self._last[place] for place in places]
        return self._last


def _to_json(value: Any) -> Any:
    """A value of a ConfigRecord; bytes, which JSON has not, as an object."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return [_to_json(each) for each in value] if isinstance(value, list) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"])
    return [_from_json(each) for each in value] if isinstance(value, list) else value
