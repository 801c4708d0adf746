"""A client's update, the transforms it passes, and the aggregate of a cohort's updates.

A transform changes one update between the local steps and the fold. A client applies its chain between training and
sending (`edge_client.train.trainer`), in simulation and on a device alike: what its client rule asks for, then the run's code
(`strategies.codes`), if there is one. The
server applies the strategy's transforms to an accepted update before it folds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from strategies.params import Params, Tensors, l2_norm

Streams = Mapping[str, Tensors]
"""Sets of tensors by name, such as `{"control": …}`."""


@dataclass(frozen=True)
class Update:
    """One client's contribution to a round. Its tensors may be on disk (`strategies.params`).

    Attributes:
        delta: trained minus base, trainable tensors only; float32, or what the task asks for (`relay.expected.Expected`).
        num_examples: weight in the mean, >= 1: the size of the client's local training set, up to the round's limit.
        num_steps: optimizer steps taken.
        train_loss: mean loss per example over the local steps.
        extras: further tensors of the client rule by stream name, such as `{"control": …}` for SCAFFOLD.
        encoded: on the client: the bytes of a code, which stand for the delta; None: the delta itself is sent.
    """

    delta: Tensors
    num_examples: int
    num_steps: int
    train_loss: float
    extras: Mapping[str, Tensors] = field(default_factory=dict)
    encoded: bytes | None = None

    @cached_property
    def norm(self) -> float:
        """L2 norm of the delta over all tensors, in float64; computed once."""
        return l2_norm(self.delta)


class UpdateTransform(Protocol):
    """One step of a chain: a pure value, whose memory from round to round is its `state`."""

    def apply(self, update: Update, state: Streams) -> tuple[Update, dict[str, Params]]:
        """The changed update, and the streams to keep for this client's next round.

        `state`: what the chain kept with the client's last accepted update; empty the first time, and always on the server,
        which keeps nothing about a client. A transform reads and returns only streams of its own names.
        """


def apply_all(
    transforms: Iterable[UpdateTransform], update: Update, state: Streams
) -> tuple[Update, dict[str, Params]]:
    """The update after every transform, in order, and the streams that all of them keep."""
    kept: dict[str, Params] = {}
    for transform in transforms:
        update, own = transform.apply(update, state)
        kept |= own
    return update, kept


@dataclass(frozen=True)
class RelayResult:
    """What a relay has passed on (`strategies.relays`).

    Attributes:
        num_updates: updates that it has folded.
        num_sums: sets of tensors that it has made of them; 0: nothing.
        payload_bytes: size of their values.
    """

    num_updates: int
    num_sums: int
    payload_bytes: int


@dataclass(frozen=True)
class RelayPart:
    """What a relay on another machine passes on for the positions [start, stop) of a cohort.

    Attributes:
        updates: by position, those that it has folded, without their tensors.
        results: sets of tensors, float64: of a mean the sums of nodes, in order; of a robust rule its result, if there is one.
        payload_bytes: their size.
    """

    start: int
    stop: int
    updates: Mapping[int, Update]
    results: Sequence[Streams]
    payload_bytes: int


@dataclass(frozen=True)
class GroupMean:
    """The mean of a group of clients whose single updates nobody knows.

    Attributes:
        updates: by position, those that are in it, without their tensors.
        delta: float64.
    """

    number: int
    updates: Mapping[int, Update]
    delta: Tensors


@dataclass(frozen=True)
class Aggregate:
    """A cohort's updates folded into one. For updates on disk it is computed as it is read.

    Attributes:
        delta: the aggregated delta, float64.
        extras: the aggregated extra streams, float64.
        num_updates: number of updates folded.
        num_examples: sum of their example counts.
        train_loss: mean of their training losses, weighted by examples.
        relays: what each relay has passed on, if there are any.
    """

    delta: Tensors
    extras: Mapping[str, Tensors]
    num_updates: int
    num_examples: int
    train_loss: float
    relays: tuple[RelayResult, ...] = ()
