"""The training loop of the datacenter, the same for every plan.

    batch -> forward and backward in micro-batches -> sum gradients -> clip -> step

What differs between plans happened before, in `parallelize`, and happens inside, in `passes`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from models.pretrain import optimizers, passes, plan, sharding
from models.pretrain.batches import Batches, Share, Source
from models.pretrain.objective import objective_of
from models.pretrain.optimizers import Options
from models.pretrain.parallelize import Parallel, parallelize, sizes_of
from models.pretrain.world import World
from models.zoo import ModelSpec


@dataclass(frozen=True)
class Progress:
    """What is said of a training every few steps.

    Attributes:
        step: steps done; `losses` are those since the last such report, mean over each global batch.
    """

    step: int
    steps: int
    epoch: int
    losses: list[float]
    rate: float
    seconds: float


@dataclass
class Trainer:
    """One process's part of a training.

    Attributes:
        step: global batches trained on so far.
    """

    world: World
    options: Options
    batches: Batches
    steps: int
    parallel: Parallel
    optimizers: list[torch.optim.Optimizer]
    run: passes.Pass
    step: int = 0
    _losses: list[torch.Tensor] = field(default_factory=list)

    def train_step(self) -> None:
        """One global batch."""
        rate = self.options.rate(self.step, self.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
        loss = self.run(self.batches[self.step])
        sharding.sum_gradients(self.parallel.parts, self.world)
        if self.options.clip_norm:
            optimizers.clip(self.parallel.parts, self.options.clip_norm, self.world)
        for optimizer in self.optimizers:
            optimizer.step()
        self._losses.append(loss)
        self.step += 1

    def losses(self) -> list[float]:
        """Mean losses of the global batches since the last call, on every process."""
        if not self._losses:
            return []
        shares = torch.stack([loss.float() for loss in self._losses])
        if self.world.place("tp"):
            shares.zero_()  # every tp rank has computed the same
        dist.all_reduce(shares)
        self._losses.clear()
        found: list[float] = shares.tolist()
        return found


def build(spec: ModelSpec, source: Source, options: Options, world: World, seed: int) -> Trainer:
    """A trainer at step 0.

    Raises:
        PlanError: the model or the batch cannot follow the plan.
    """
    plan.check(world.plan, sizes_of(spec), batch_size=options.batch_size, processes=world.processes)
    torch.manual_seed(seed + world.rank)  # dropout differs between processes, as it does between rows
    parallel = parallelize(spec.build(seed), spec.layout, world)
    for part in parallel.parts:
        part.train()
    batches = Batches(source, options.batch_size, seed, share_of(world, options.batch_size), options.shift)
    return Trainer(
        world,
        options,
        batches,
        options.steps_of(batches.steps_per_epoch),
        parallel,
        optimizers.build(parallel.parts, options),
        passes.build(parallel, objective_of(spec), world),
    )


def share_of(world: World, batch_size: int) -> Share:
    """What this process takes of every global batch; a pipeline's pieces must all be alike."""
    return Share(
        rows=(1,) * world.size("dp"),
        place=world.place("dp"),
        length_place=world.place("cp"),
        length_shares=world.size("cp"),
        pad_to=batch_size if world.plan.pp > 1 else 0,
    )


def train(trainer: Trainer, on_progress: Callable[[Progress], None], every: int) -> list[float]:
    """Trains to the last step and gives every step's loss; `on_progress` is called every `every` steps and at the end."""
    curve: list[float] = []
    before = time.perf_counter()
    while trainer.step < trainer.steps:
        trainer.train_step()
        if trainer.step % every and trainer.step < trainer.steps:
            continue
        losses = trainer.losses()
        now = time.perf_counter()
        curve += losses
        on_progress(
            Progress(
                trainer.step,
                trainer.steps,
                -(-trainer.step // trainer.batches.steps_per_epoch),
                losses,
                trainer.options.rate(trainer.step - 1, trainer.steps),
                now - before,
            )
        )
        before = now
    return curve
