"""Batch shares that follow the speeds of unequal processes, so that none waits long for another.

    time own forward and backward -> rows per second of every rank, smoothed -> shares -> change them if it pays

A batch is the same whoever computes which of its rows, so the training does not change. The measured time ends with a
rank's last own gradient: waiting for the other ranks' gradients does not count.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from models.pretrain.data.batches import Batch, Batches
from models.pretrain.world import World

if TYPE_CHECKING:
    from models.pretrain.forward_backward import Pass

Clock = Callable[[], float]

WEIGHT = 0.5
"""Weight of a new measurement against the previous estimate."""

GAIN = 1.05
"""Shares change when the slowest rank takes this many times longer than it would with new ones."""


def fastest(speeds: Sequence[float], rows: int) -> tuple[int, ...]:
    """The shares of `rows` rows, at least one each, with which ranks of `speeds`, in rows a second, finish earliest.

    Every row goes to the rank that finishes it first, the earlier rank on a tie. This is optimal because each rank
    takes equally long for each of its rows.
    """
    shares = [1] * len(speeds)
    done = [(2 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(done)
    for _ in range(rows - len(speeds)):
        _, rank = done[0]
        shares[rank] += 1
        heapq.heapreplace(done, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)


def seconds(shares: Sequence[float], speeds: Sequence[float]) -> float:
    """Time of the slowest rank."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def smoothed(before: Sequence[float], measured: Sequence[float]) -> tuple[float, ...]:
    """Exponential moving average of speeds; the first measurement is taken as it is."""
    if not before:
        return tuple(measured)
    return tuple(WEIGHT * new + (1 - WEIGHT) * old for old, new in zip(before, measured, strict=True))


def rebalanced(shares: tuple[int, ...], speeds: Sequence[float], rows: int) -> tuple[int, ...]:
    """`shares`, or the fastest ones where they are faster by more than `GAIN`."""
    better = fastest(speeds, rows)
    now = [share * rows / sum(shares) for share in shares]
    return better if seconds(now, speeds) > GAIN * seconds(better, speeds) else shares


def from_plan(world: World, clock: Clock) -> Rebalancing | None:
    """The rebalancing of the plan of `world`; None where shares are fixed."""
    return Rebalancing(world, world.plan.rebalance, clock) if world.plan.rebalance else None


@dataclass
class Rebalancing:
    """Measures this process and, every `every` steps, changes the shares on all processes together.

    Attributes:
        clock: seconds, from any origin.
        speeds: estimated speeds of all ranks, rows a second.
    """

    world: World
    every: int
    clock: Clock
    speeds: tuple[float, ...] = ()
    _steps: int = 0
    _rows: int = 0
    _seconds: float = 0.0
    _began: Any = 0.0
    _ended: Any = 0.0

    def timed(self, parts: Sequence[nn.Module], run: Pass) -> Pass:
        """Wraps `run` to measure this process's own part of the work."""
        for part in parts:
            for parameter in part.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]

        def measured(batch: Batch) -> torch.Tensor:
            self._began = self._now()
            loss = run(batch)
            self._rows += len(batch.x)
            self._seconds += self._between(self._began, self._ended)
            return loss

        return measured

    def after_step(self, batches: Batches) -> None:
        """Changes the shares of `batches` from the next step on, when due and worthwhile. A collective."""
        self._steps += 1
        if self._steps % self.every:
            return
        self.speeds = smoothed(self.speeds, self._measured())
        self._rows, self._seconds = 0, 0.0
        better = rebalanced(batches.share.rows, self.speeds, batches.batch_size)
        if better != batches.share.rows:
            batches.share = replace(batches.share, rows=better)

    def _gradient(self, _: torch.Tensor) -> None:
        self._ended = self._now()

    def _now(self) -> Any:
        """The time; on a GPU an event in its stream, which it reaches later."""
        if self.world.device.type != "cuda":
            return self.clock()
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    def _between(self, began: Any, ended: Any) -> float:
        if self.world.device.type != "cuda":
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended) / 1000)

    def _measured(self) -> tuple[float, ...]:
        speed = self._rows / max(self._seconds, 1e-9)
        mine = torch.tensor([speed], dtype=torch.float64, device=self.world.device)
        speeds = torch.empty(self.world.size("dp"), dtype=torch.float64, device=self.world.device)
        dist.all_gather_single(speeds, mine, group=self.world.group("dp"))
        return tuple(speeds.tolist())
