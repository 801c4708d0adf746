"""What a relay on another machine passes on, checked against what it has said of the updates before.

The relay names each update's figures when it takes it, and the tensors after the round. Weights follow from the figures. No tensor may be
longer than the figures allow, so what a relay can do to a mean is what the clients that it names could do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from edge_client.relay.expected import Expected
from edge_client.wire import arrays
from edge_client.wire.arrays import DELTA, Payload, StoredArrays, TensorHeader
from edge_client.wire.relays import Figures, FoldRequest
from strategies import presets
from strategies.params import NotFinite, l2_norm, require_finite, subtree, unflatten
from strategies.relays import members_of_results
from strategies.strategy import ClipNorm, Strategy, WeightedMean
from strategies.summation import clamp
from strategies.update import RelayPart, Update

_SLACK = 1 + 1e-5
"""How far rounding may take a tensor beyond the sum of the norms: those of float32 values, scaled in float32."""

_HEADROOM_BYTES = 65_536


class BadFold(ValueError):
    """What the relay passes on is not what it was asked for; the message says what is wrong."""


def strategy_of(request: FoldRequest) -> Strategy:
    """The strategy of a request, without relays."""
    return presets.get(request.strategy, **request.options)


def updates_of(request: FoldRequest, figures: Mapping[int, Figures]) -> dict[int, Update]:
    """The updates to fold, by position, as they count, without their tensors."""
    told = {member.position: figures[member.position] for member in request.members}
    return {
        at: clamp(Update({}, each.num_examples, each.num_steps, each.train_loss), request.weight_limit)
        for at, each in told.items()
    }


def count_results(request: FoldRequest, figures: Mapping[int, Figures]) -> int:
    """Number of sets of tensors that answer the request; 0: there are too few updates for the rule."""
    return len(_members(request, figures))


def limit_bytes(request: FoldRequest, figures: Mapping[int, Figures], expected: Expected) -> int:
    """The largest answer to the request."""
    values = sum(math.prod(shape) for shape in expected.shapes.values())
    names = sum(len(name) + 128 for name in expected.shapes)
    return count_results(request, figures) * (8 * values + names) + _HEADROOM_BYTES


def read_part(
    payload: Payload, task: str, request: FoldRequest, figures: Mapping[int, Figures], expected: Expected
) -> RelayPart:
    """What a relay has uploaded for `task`, after all checks. `figures`: by position. Tensors on disk stay there.

    Raises:
        BadFold: it is not what was asked for.
    """
    try:
        header = arrays.read_header(payload)
    except arrays.Malformed as error:
        raise BadFold(str(error)) from None
    if header.values.get("task") != task:
        raise BadFold("it answers another task")
    members = _members(request, figures)
    _check_headers(header.tensors, len(members), expected)
    stored = StoredArrays(payload, header)
    try:
        require_finite(stored, stored)
    except NotFinite as error:
        raise BadFold(str(error)) from None
    results = [unflatten(subtree(stored, str(number))) for number in range(len(members))]
    part = RelayPart(request.start, request.stop, updates_of(request, figures), results, payload.size_bytes)
    _check_norms(part, members, request, figures)
    return part


def empty_part(request: FoldRequest, figures: Mapping[int, Figures]) -> RelayPart:
    """The part of a relay with too few updates for the rule."""
    return RelayPart(request.start, request.stop, updates_of(request, figures), [], 0)


def _members(request: FoldRequest, figures: Mapping[int, Figures]) -> list[list[int]]:
    return members_of_results(strategy_of(request), request.start, request.stop, updates_of(request, figures))


def _check_headers(sent: Mapping[str, TensorHeader], results: int, expected: Expected) -> None:
    wanted = {
        f"{number}/{name}": shape for number in range(results) for name, shape in expected.shapes.items()
    }
    if missing := sorted(wanted.keys() - sent.keys()):
        raise BadFold(f"{missing[0]!r} is missing, {len(sent)} of {len(wanted)} tensors arrived")
    if extra := sorted(sent.keys() - wanted.keys()):
        raise BadFold(f"{extra[0]!r} is not a tensor of this answer")
    for name, shape in wanted.items():
        if sent[name].dtype != "F64":
            raise BadFold(f"{name} is {sent[name].dtype}, expected F64")
        if sent[name].shape != shape:
            raise BadFold(f"{name} is {sent[name].shape}, expected {shape}")


def _check_norms(
    part: RelayPart, members: list[list[int]], request: FoldRequest, figures: Mapping[int, Figures]
) -> None:
    """A sum is at most as long as its summands together. So is a rule's result, whose values lie between those of the updates."""
    strategy = strategy_of(request)
    clips = [each.max_norm for each in strategy.transforms if isinstance(each, ClipNorm)]
    aggregator = strategy.aggregator
    by_examples = isinstance(aggregator, WeightedMean) and aggregator.weighting == "examples"
    for number, positions in enumerate(members):
        for stream, tensors in part.results[number].items():
            limit = 0.0
            for at in positions:
                if stream == DELTA:
                    weight = part.updates[at].num_examples if by_examples else 1
                    limit += weight * min([figures[at].norm, *clips])
                else:
                    limit += figures[at].streams[stream]
            if (norm := l2_norm(tensors)) > limit * _SLACK:
                raise BadFold(
                    f"{number}/{stream} has the norm {norm:.6g}; the norms of its updates allow {limit:.6g}"
                )


def streams_of(expected: Expected) -> set[str]:
    """Names of the streams of an update besides its delta."""
    return {name.partition("/")[0] for name in expected.shapes} - {DELTA}
