"""The training loop of the datacenter, the same for every plan.

    batch -> forward and backward in micro-batches -> sum gradients -> clip -> step -> agree on params or shares

What differs between plans happened before, in `parallelize`, and happens inside, in `passes`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import record_function

from models.pretrain import freezing, optimizers, passes, plan, updates
from models.pretrain.data.batches import Batch, Batches, Share, Source
from models.pretrain.data_parallel import local_updates, sharding, shares
from models.pretrain.objective import objective_of
from models.pretrain.parallelize import Parallel, parallelize, sizes_of
from models.pretrain.profiling import LOADER
from models.pretrain.recovery import checkpoint
from models.pretrain.training import Options
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
        identity: what a checkpoint must have in common with it.
        local: brings params together where processes step alone.
        shares: makes shares of the batch follow the processes' speeds.
        step: global batches trained on so far.
    """

    world: World
    options: Options
    batches: Batches
    steps: int
    parallel: Parallel
    optimizers: list[torch.optim.Optimizer]
    run: passes.Pass
    identity: checkpoint.Identity
    local: local_updates.LocalUpdates | None = None
    shares: shares.Rebalancing | None = None
    step: int = 0
    _losses: list[torch.Tensor] = field(default_factory=list)

    @property
    def state(self) -> checkpoint.State:
        """What a checkpoint keeps."""
        return checkpoint.State(self.parallel.parts, self.optimizers, buffers=self.world.place("data") == 0)

    def train_step(self) -> None:
        """One global batch."""
        with record_function(LOADER):
            batch = self.batches[self.step]
        self.train_on(batch)
        if self.shares is not None:
            self.shares.after_step(self.batches)

    def train_on(self, batch: Batch) -> None:
        """One step with this process's share of a batch."""
        torch.manual_seed(chance(self.identity.seed, self.step, self.world))
        rate = self.options.rate(self.step, self.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
        loss = self.run(batch)
        sharding.sum_gradients(self.parallel.parts, self.world)
        if self.options.clip_norm:
            optimizers.clip(self.parallel.parts, self.options.clip_norm, self.world)
        if self.local is not None:
            self.local.before_step()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.local is not None:
            self.local.after_step()
        self._losses.append(loss)
        self.step += 1

    def agree(self) -> None:
        """Makes params the same everywhere, if processes have stepped alone."""
        if self.local is not None:
            self.local.agree()

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


def build(
    spec: ModelSpec,
    source: Source,
    options: Options,
    world: World,
    seed: int,
    clock: shares.Clock = time.perf_counter,
) -> Trainer:
    """A trainer at step 0.

    Raises:
        PlanError: the model or the batch cannot follow the plan.
    """
    plan.check(world.plan, sizes_of(spec), batch_size=options.batch_size, processes=world.processes)
    whole = spec.build(seed)
    identity = checkpoint.identity_of(
        whole, spec.name, options.optimizer, seed, options.batch_size, len(source)
    )
    parallel = parallelize(freezing.freeze(whole, spec.layout, options, world.plan), spec.layout, world)
    for part in parallel.parts:
        part.train()
    freezing.settle(parallel.parts, options)
    batches = Batches(source, options.batch_size, seed, share_of(world, options.batch_size), options.shift)
    steps = options.steps_of(batches.steps_per_epoch)
    stepping = updates.build(parallel.parts, options, world, steps)
    run = freezing.told(parallel.parts, passes.build(parallel, objective_of(spec), world))
    balancing = shares.of(world, clock)
    return Trainer(
        world,
        options,
        batches,
        steps,
        parallel,
        stepping,
        run if balancing is None else balancing.timed(parallel.parts, run),
        identity,
        local_updates.of(stepping, options, world),
        balancing,
    )


def chance(seed: int, step: int, world: World) -> int:
    """Seed of a step's dropout: another one for other rows and stages, the same for ranks that share a matrix.

    A function of the step, as batches are, so that a training goes on with it at any step.
    """
    sequence = np.random.SeedSequence([seed, step, world.place("data"), world.place("pp")])
    return int(sequence.generate_state(1, np.uint64)[0])


def share_of(world: World, batch_size: int) -> Share:
    """What this process takes of every global batch; a pipeline's pieces must all be alike."""
    return Share(
        rows=world.plan.rows or (1,) * world.size("dp"),
        place=world.place("dp"),
        length_place=world.place("cp"),
        length_shares=world.size("cp"),
        pad_to=batch_size if world.plan.pp > 1 else 0,
    )


def train(
    trainer: Trainer,
    on_progress: Callable[[Progress], None],
    every: int,
    checkpointer: checkpoint.Checkpointer | None = None,
    stop: Callable[[], bool] = lambda: False,
    around: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
) -> None:
    """Trains to the last step, or until `stop`, asked after every step, each inside of what `around` gives for it.

    `on_progress` is called every `every` steps, before every checkpoint and at the end. What was trained when this
    returns is in a checkpoint, if there is a `checkpointer`.

    Raises:
        CheckpointError: one could not be written.
    """
    before = time.perf_counter()
    while trainer.step < trainer.steps:
        with around(trainer.step):
            trainer.train_step()
        last = stop() or trainer.step == trainer.steps
        save = checkpointer is not None and (last or checkpointer.due(trainer.step))
        if last or save:
            trainer.agree()
        if last or save or trainer.step % every == 0:
            losses = trainer.losses()
            now = time.perf_counter()
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
        if save and checkpointer is not None:
            checkpointer.save(trainer.state, trainer.step)
        if last:
            break
    if checkpointer is not None:
        checkpointer.wait()
