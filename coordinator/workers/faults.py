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
from strategies.params import Params
from strategies.update import Update

if TYPE_CHECKING:
    from coordinator.experiments.schema import Fault


def assign(faults: Mapping[Fault, int], clients: list[str], seed: int) -> dict[str, str]:
    """Fault by client: as many clients of each kind as `faults` says, drawn by `seed`."""
    order = generator(seed, "faults").permutation(len(clients))
    kinds = [kind for kind, count in sorted(faults.items()) for _ in range(count)]
    return {clients[index]: kind for index, kind in zip(order, kinds, strict=False)}


def encode_uploads(kind: str | None, task: TaskMessage, update: Update) -> list[bytes]:
    """The uploads of a client with this fault; without a fault, its update once."""
    name = min(update.delta)
    match kind:
        case None:
            return [encode_result(task, update)]
        case "nan":
            return [
                encode_result(
                    task, _replace_tensors(update, {name: np.full_like(update.delta[name], np.nan)})
                )
            ]
        case "wrong_shape":
            return [
                encode_result(task, _replace_tensors(update, {name: update.delta[name].reshape(-1)[:-1]}))
            ]
        case "wrong_dtype":
            return [
                encode_result(task, _replace_tensors(update, {name: update.delta[name].astype(np.float64)}))
            ]
        case "missing_tensor":
            kept = {other: value for other, value in update.delta.items() if other != name}
            return [encode_result(task, replace(update, delta=kept))]
        case "extra_tensor":
            return [encode_result(task, _replace_tensors(update, {"backdoor": update.delta[name]}))]
        case "stale_base":
            return [encode_result(replace(task, base=arrays.sha256(task.base.encode())), update)]
        case "duplicate":
            return [encode_result(task, update)] * 2
        case "no_examples":
            return [encode_result(task, replace(update, num_examples=0))]
    raise ValueError(f"unknown fault {kind!r}")


def _replace_tensors(update: Update, changed: Params) -> Update:
    return replace(update, delta={**update.delta, **changed})
