"""A search for the sparsity of each layer under a bound on accuracy, measured on held-out training rows.

Layers differ in their sensitivity (Han 2015, figure 6). Every layer is cut alone to each of a few levels to measure the loss. Each
higher level costs some loss per weight saved; repeatedly taking the cheapest next step over all layers gives a path from
dense to sparse. Bisecting accuracy along the path scores a handful of candidates instead of a product of levels.

The rows are held out from this step alone: a model trained on them earlier is more accurate on them than on others, dense or sparse.
The test rows give the actual accuracy.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from models.compress.pruning import sparsity
from models.compress.tuning import Tuning
from models.pretrain import evaluation
from models.pretrain.data.batches import Arrays
from models.zoo.spec import ModelSpec

CPU = torch.device("cpu")
LEVELS = (0.25, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)

Shares = Mapping[str, float]
"""Layer -> sparsity; other layers do not change."""


@dataclass(frozen=True)
class Bound:
    """Limits: `max_drop` of accuracy on held-out rows, and `most`, the largest share of all weights that may be zero."""

    max_drop: float
    most: float


def search(
    module: nn.Module,
    names: Sequence[str],
    inputs: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    rows: Arrays,
    held_out: Arrays,
    tuning: Tuning,
    bound: Bound,
    rng: np.random.Generator,
) -> tuple[tuple[sparsity.Goal, ...], dict[str, Any]]:
    """The sparsest goals on the path whose accuracy on `held_out` is within the bound, and the figures of the search.

    Args:
        tuning: of each candidate, on `rows`, before it is scored.
    """

    def evaluate(shares: Shares, training: Tuning) -> evaluation.Scores:
        trial = copy.deepcopy(module)
        goals = [sparsity.goal(trial, (name,), share) for name, share in shares.items()]
        once = sparsity.Ramp(0.0, 1)
        sparsity.cut(trial, goals, inputs, spec, rows, training, once, np.random.default_rng(seed))
        return evaluation.evaluate(trial, spec, held_out, CPU)

    seed = int(rng.integers(2**31))  # all candidates train the same way
    untrained = Tuning(epochs=0)
    dense = evaluate({}, untrained)
    losses = {name: [evaluate({name: level}, untrained).loss for level in LEVELS] for name in names}
    sizes = {name: module.get_parameter(f"{name}.weight").numel() for name in names}
    path = cheapest_first(sizes, dense.loss, losses, bound.most)

    least = dense.quality - bound.max_drop
    good, bad, accuracy = 0, len(path), dense.quality
    while bad - good > 1:  # path[good] is within the bound; path[bad] and later are not known to be
        middle = (good + bad) // 2
        candidate = evaluate(path[middle], tuning).quality
        if candidate >= least:
            good, accuracy = middle, candidate
        else:
            bad = middle
    goals = tuple(sparsity.goal(module, (name,), path[good].get(name, 0.0)) for name in names)
    return goals, {
        "dense_accuracy": dense.quality,
        "accuracy": accuracy,
        "max_accuracy_drop": bound.max_drop,
        "rows": len(held_out),
    }


def cheapest_first(
    sizes: Mapping[str, int], dense_loss: float, losses: Mapping[str, Sequence[float]], most: float
) -> list[dict[str, float]]:
    """Shares from dense to at most `most` of all weights, raising one layer by one level at a time.

    Args:
        losses: layer -> loss at each of `LEVELS` with all other layers dense.
    """

    def cost(name: str, level: int) -> float:
        """Added loss per weight removed when the layer moves up to `level`."""
        before, share = (losses[name][level - 1], LEVELS[level - 1]) if level else (dense_loss, 0.0)
        return (losses[name][level] - before) / (sizes[name] * (LEVELS[level] - share))

    total = sum(sizes.values())
    path: list[dict[str, float]] = [{}]
    heap = [(cost(name, 0), name, 0) for name in sizes]
    heapq.heapify(heap)
    while heap:
        _, name, level = heapq.heappop(heap)
        shares = {**path[-1], name: LEVELS[level]}
        if sum(share * sizes[layer] for layer, share in shares.items()) > most * total:
            continue  # this layer may not be cut further; a smaller one may still fit
        path.append(shares)
        if level + 1 < len(LEVELS):
            heapq.heappush(heap, (cost(name, level + 1), name, level + 1))
    return path
