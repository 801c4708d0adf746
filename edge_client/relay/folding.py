"""Folds a relay's updates of a round, as the coordinator asks (`wire.relays.FoldRequest`)."""

from __future__ import annotations

from pathlib import Path

from edge_client.relay.updates import KeptUpdates
from edge_client.wire import arrays
from edge_client.wire.relays import FoldRequest
from strategies import presets
from strategies.params import flatten
from strategies.relays import CannotRelay, fold_part
from strategies.summation import clamp


class CannotFold(Exception):
    """The request cannot be answered; the message says why."""


def fold(request: FoldRequest, task: str, kept: KeptUpdates, path: Path) -> str:
    """Writes the answer to `task` into a file, and returns its SHA-256. Updates are read piece by piece.

    Raises:
        CannotFold: an update is lost, or this version does not know the strategy.
        OSError: the disk is full.
    """
    try:
        strategy = presets.get(request.strategy, **request.options)
    except presets.OptionError as error:
        raise CannotFold(f"this relay's software does not know what to fold: {error}; update it") from None
    updates = {}
    for member in request.members:
        try:
            update = kept.of(member.task).read()
        except (OSError, arrays.Malformed) as error:
            raise CannotFold(f"it has lost the update at position {member.position}: {error}") from None
        updates[member.position] = strategy.transform(clamp(update, request.weight_limit))
    try:
        results = fold_part(strategy, request.start, request.stop, updates)
    except CannotRelay as error:
        raise CannotFold(str(error)) from None
    tensors = flatten({str(number): flatten(result) for number, result in enumerate(results)})
    return arrays.write(path, tensors, {"task": task}, dtype="F64")
