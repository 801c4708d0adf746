"""Momentum and gradient clipping for steps that many models take at once in place.

The product that makes a gradient is added to the weights by the same call (`coordinator.workers.kernels.dense_steps`), so what a
step has moved stands for −lr times its gradient: it is scaled down where that is too long, and a share of the last move is
added. The equations are those of `strategies.client_rules`, to float32 rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from coordinator.workers.kernels.dense_steps import Weights
from coordinator.workers.kernels.layout import Work
from strategies.client_rules import CLIP_EPSILON


@dataclass
class ChangedSteps:
    """The momentum of one stack, models in the order of their slots. Plain steps stay as they are."""

    lr: float
    momentum: float
    clip_grad_norm: float
    _moves: dict[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(work: Work) -> ChangedSteps:
        """At the start of the local training `work`."""
        return ChangedSteps(work.lr, work.momentum, work.clip_grad_norm)

    @contextmanager
    def steps(self, weights: Weights) -> Iterator[None]:
        """Within it one plain step is taken. `weights`: of the first slots, [models, …], never more than in the last step."""
        if not self.momentum and not self.clip_grad_norm:
            yield
            return
        before = {name: weight.clone() for name, weight in weights.items()}
        yield
        moves = {name: weight - before[name] for name, weight in weights.items()}
        if self.clip_grad_norm:
            self._clip(moves)
        for name, move in moves.items():
            if name in self._moves:
                move.add_(self._moves[name][: len(move)], alpha=self.momentum)
            torch.add(before[name], move, out=weights[name])
        self._moves = moves

    def _clip(self, moves: dict[str, torch.Tensor]) -> None:
        squares = [move.flatten(1).double().square().sum(1) for move in moves.values()]
        norms = torch.stack(squares).sum(0).sqrt() / self.lr
        factors = (self.clip_grad_norm / (norms + CLIP_EPSILON)).clamp(max=1).float()
        for move in moves.values():
            move.mul_(factors.view(-1, *[1] * (move.ndim - 1)))
