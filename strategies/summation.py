"""How updates are summed where they were made, as a value that can be sent there.

Whoever trains several clients of a cohort need not hand over each update: where the aggregator takes partial sums, one sum
of a canonical block (`strategies.strategy.BLOCK` positions) stands for its updates, and the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from strategies.strategy import ClipNorm, PartialSum, Strategy, Weighting, add_update, clipping
from strategies.update import Update, apply_all

MAX_TRAIN_LOSS = 1e6
"""A client's training loss is clamped to this in the round's mean, so that one client cannot make the mean infinite."""


@dataclass(frozen=True)
class Summation:
    """What happens to the accepted updates of a block: clipped to `clip_norm` (0: not), then summed by `weighting`."""

    weighting: Weighting
    clip_norm: float = 0.0

    def add(self, total: PartialSum | None, update: Update) -> PartialSum:
        """The sum of a block with the accepted update of its next position; `total`: None before the first."""
        return add_update(total, apply_all(clipping(self.clip_norm), update, {})[0], self.weighting)

    def to_options(self) -> dict[str, Any]:
        """The value as JSON."""
        return {"weighting": self.weighting, "clip_norm": self.clip_norm}

    @staticmethod
    def from_options(options: Mapping[str, Any]) -> Summation:
        """The value of `to_options`."""
        assert options["weighting"] in get_args(Weighting)
        return Summation(options["weighting"], float(options["clip_norm"]))


def of(strategy: Strategy) -> Summation | None:
    """How the strategy's updates are summed; None if its aggregator needs each one, or a transform cannot be sent."""
    weighting = strategy.aggregator.partial_sums
    clips = [each.max_norm for each in strategy.transforms if isinstance(each, ClipNorm)]
    if weighting is None or len(strategy.transforms) > 1 or len(clips) < len(strategy.transforms):
        return None
    return Summation(weighting, *clips)


def clamp(update: Update, weight_limit: int | None) -> Update:
    """The update with its number of examples and its training loss within bounds. `weight_limit`: None: no limit."""
    examples = update.num_examples if weight_limit is None else min(update.num_examples, weight_limit)
    loss = min(max(update.train_loss, -MAX_TRAIN_LOSS), MAX_TRAIN_LOSS)
    if (examples, loss) == (update.num_examples, update.train_loss):
        return update
    return replace(update, num_examples=examples, train_loss=loss)
