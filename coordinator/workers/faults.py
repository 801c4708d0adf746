"""Faulty simulated clients: they upload what a broken or hostile client would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from coordinator.rounds.plan import generator
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from strategies.update import Update

if TYPE_CHECKING:
    from coordinator.experiments.schema import Fault


def assign(faults: Mapping[Fault, int], clients: list[str], seed: int) -> dict[str, str]:
    """Fault by client: as many clients of each kind as `faults` says, drawn by `seed`."""
    order = generator(seed, "faults").permutation(len(clients))
    kinds = [kind for kind, count in sorted(faults.items()) for _ in range(count)]
    return {clients[index]: kind for index, kind in zip(order, kinds, strict=False)}


def encode_uploads(kind: str, task: TaskMessage, update: Update) -> list[bytes]:
    """The uploads of a client with this fault."""
    delta, copies = dict(update.delta), 1
    name = min(delta)
    match kind:
        case "nan":
            delta[name] = np.full_like(delta[name], np.nan)
        case "wrong_shape":
            delta[name] = delta[name].reshape(-1)[:-1]
        case "wrong_dtype":
            delta[name] = delta[name].astype(np.float64)
        case "missing_tensor":
            del delta[name]
        case "extra_tensor":
            delta["backdoor"] = delta[name]
        case "stale_base":
            task = replace(task, base=arrays.sha256(task.base.encode()))
        case "duplicate":
            copies = 2
        case "no_examples":
            update = replace(update, num_examples=0)
        case _:
            raise ValueError(f"unknown fault {kind!r}")
    return [encode_result(task, replace(update, delta=delta))] * copies
