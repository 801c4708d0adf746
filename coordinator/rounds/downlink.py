"""The downlink of a run with a code: each round's model goes out as what it changes of the one that clients hold.

`RunState.params` stay the exact model: it is scored and committed, and updates are added to it. Clients train from what they hold,
`Held.params`, and their update is the change of that. A client that has missed rounds gets all messages since its last one, or the
whole model if that is shorter. A client counts as holding a version once the coordinator has accepted its update, because of no other is it
known that it got that far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from coordinator.rounds.fleet import Model
from coordinator.rounds.plan import RunPlan, generator
from coordinator.rounds.records import Held, RunState
from edge_client.wire import arrays
from edge_client.wire.arrays import DELTA
from strategies.codes.broadcast import advance
from strategies.params import materialize


def next_held(run_plan: RunPlan, state: RunState) -> Held | None:
    """What clients of the next round hold once they got its model; None: the model itself, as there is no code."""
    code, before, number = run_plan.downlink, state.held, state.round + 1
    if code is None:
        return None
    if before is None:
        return Held(materialize(state.params), number)
    rng = generator(run_plan.seed, "downlink", number)
    moved = advance(code, before.params, state.params, run_plan.trainable, rng)
    if moved is None:
        return Held(materialize(state.params), number)
    params, message = moved
    return replace(before, params=params, sizes=(*before.sizes, _message_bytes(message, number)))


def measure_downloads(model: Model, held: Held | None, clients: Iterable[str]) -> Model:
    """The model with the download size of those of these clients for which messages are shorter than the whole."""
    if held is None:
        return model
    missing = {client: held.missing_bytes(client) for client in clients}
    sizes = {
        client: each for client, each in missing.items() if each is not None and each < model.payload_bytes
    }
    return replace(model, bytes_by_client={**model.bytes_by_client, **sizes})


def deliver(held: Held | None, number: int, accepted: Iterable[str]) -> Held | None:
    """As `held`, and these clients have the version of round `number`."""
    if held is None:
        return None
    return replace(held, versions={**held.versions, **dict.fromkeys(accepted, number)})


def _message_bytes(message: bytes, number: int) -> int:
    """Bytes of a message as it is sent, with its version and the one that it changes."""
    content = np.frombuffer(message, np.uint8)
    return len(arrays.encode({DELTA: content}, {"version": number, "base": number - 1}))
