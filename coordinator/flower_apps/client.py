"""Runs the ClientApp in a worker process, one message at a time.

A message comes with the context of its client, which the worker gives back with the reply. So a client keeps its state whichever
worker it meets next.
"""

from __future__ import annotations

import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from coordinator.flower_apps import wire
from coordinator.flower_apps.loading import LoadFailed, describe, load
from coordinator.flower_apps.outbox import Outbox
from coordinator.flower_internals import ErrorCode, take_identity
from edge_client.processes.channel import Closed, Frame, read_ahead, send_frame

Answer = tuple[dict[str, Any], Sequence[bytes]]


def serve(job: dict[str, Any], channel: socket.socket) -> None:
    """Loads the ClientApp, then answers messages until the channel closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _reseed()
    waiting = read_ahead(channel)
    try:
        app = load("clientapp", job["client"], Path(job["folder"]), ClientApp)
        send_frame(channel, {"loaded": True})
        shared, outbox = wire.SharedBlobs(), Outbox(channel)
        while True:
            values, blobs = _answer(app, waiting.get(), shared, job["config"])
            sys.stdout.flush()  # the process is killed in the end
            outbox.send(values, blobs)
    except LoadFailed as error:
        send_frame(channel, {"load_failed": str(error)})
    except Closed:
        return


def _reseed() -> None:
    """Gives this process random numbers of its own where forks would share them. torch starts from a constant anyway, `random` reseeds itself."""
    import numpy as np

    np.random.seed()  # noqa: NPY002 - the app's generator, not ours


def _answer(app: ClientApp, frame: Frame, shared: wire.SharedBlobs, run_config: dict[str, Any]) -> Answer:
    values = frame.values
    blobs = shared.restore(values["places"], frame.blobs)
    in_message = values["in_message"]
    message = wire.decode_message(values["message"], blobs[:in_message])
    context = Context(
        run_id=message.metadata.run_id,
        node_id=message.metadata.dst_node_id,
        node_config=dict(values["node_config"]),
        state=wire.decode_records(values["state"], blobs[in_message:]),
        run_config=dict(run_config),
    )
    take_identity(context.run_id, context.node_id)
    try:
        reply = app(message, context)
        if (problem := _problem(reply, message)) is not None:
            return _failed(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, problem)
        if context.run_config != run_config:
            return _failed(ErrorCode.UNKNOWN, "the ClientApp changed context.run_config, which is read-only")
        encoded, reply_blobs = wire.encode_message(reply)
        state, state_blobs = wire.encode_records(context.state)
    except SystemExit as error:  # Flower's simulation loses its actor by this
        return _failed(ErrorCode.UNKNOWN, describe(error))
    except Exception as error:
        traceback.print_exc()
        return _failed(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, describe(error))
    answer = {"reply": encoded, "in_reply": len(reply_blobs)}
    if context.node_config != values["node_config"]:
        answer["node_config"] = context.node_config
    if not _same(state, state_blobs, values["state"], blobs[in_message:]):
        answer["state"] = state
        reply_blobs += state_blobs
    return answer, reply_blobs


def _problem(reply: Any, message: Message) -> str | None:
    """What is wrong with what the app returned, if anything."""
    if not isinstance(reply, Message):
        return f"the ClientApp returned a {type(reply).__name__}; expected Message(…, reply_to=message)"
    if reply.metadata.reply_to_message_id != message.metadata.message_id:
        return "the ClientApp returned a Message that is no reply; expected Message(…, reply_to=message)"
    return None


def _same(state: list[Any], blobs: Sequence[bytes], before: list[Any], blobs_before: Sequence[bytes]) -> bool:
    """Whether the state has not changed. Bytes are compared as objects: equal ones may well be sent once more."""
    if len(blobs) != len(blobs_before) or any(
        new is not old for new, old in zip(blobs, blobs_before, strict=True)
    ):
        return False
    return bool(_listed(state) == before)


def _listed(value: Any) -> Any:
    """The value as JSON gives it back, where a shape is a list."""
    if isinstance(value, list | tuple):
        return [_listed(each) for each in value]
    return {key: _listed(each) for key, each in value.items()} if isinstance(value, dict) else value


def _failed(code: int, reason: str) -> Answer:
    return {"failed": [code, reason]}, []
