"""A client's update, and the aggregate of a cohort's updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from strategies.params import Tensors, l2_norm


@dataclass(frozen=True)
class Update:
    """One client's contribution to a round. Its tensors may be on disk (`strategies.params`).

    Attributes:
        delta: trained minus base, trainable tensors only, float32.
        num_examples: weight in the mean, >= 1: the size of the client's local training set, up to the round's limit.
        num_steps: optimizer steps taken.
        train_loss: mean loss per example over the local steps.
        extras: further tensors of the client rule by stream name, such as `{"control": …}` for SCAFFOLD.
    """

    delta: Tensors
    num_examples: int
    num_steps: int
    train_loss: float
    extras: Mapping[str, Tensors] = field(default_factory=dict)

    @cached_property
    def norm(self) -> float:
        """L2 norm of the delta over all tensors, in float64; computed once."""
        return l2_norm(self.delta)


@dataclass(frozen=True)
class Aggregate:
    """A cohort's updates folded into one. For updates on disk it is computed as it is read.

    Attributes:
        delta: the aggregated delta, float64.
        extras: the aggregated extra streams, float64.
        num_updates: number of updates folded.
        num_examples: sum of their example counts.
        train_loss: mean of their training losses, weighted by examples.
    """

    delta: Tensors
    extras: Mapping[str, Tensors]
    num_updates: int
    num_examples: int
    train_loss: float
