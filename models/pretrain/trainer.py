"""The training loop of the datacenter, the same for every plan.

    batch -> forward and backward in micro-batches -> sum gradients -> clip -> step -> synchronize params or shares

The differences between plans lie before it, in `parallelize`, and inside the pass (`forward_backward`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import record_function

from models.pretrain import forward_backward, freezing, optimizers, plan_rules
from models.pretrain.data.batches import Batches, Source
from models.pretrain.deferred import materialize
from models.pretrain.objective import objective_of
from models.pretrain.parallel.data import local_updates, shares
from models.pretrain.parallel.data.gradient_sums import GradientSums
from models.pretrain.parallelize import (
    Parallel,
    parallelize,
    require_composition,
    require_splittable,
    sizes_of,
)
from models.pretrain.params import shapes_of
from models.pretrain.profiling import LOADER
from models.pretrain.recovery import manifest
from models.pretrain.recovery import state as states
from models.pretrain.training import TrainingOptions
from models.pretrain.world import World
from models.zoo.spec import ModelSpec

if TYPE_CHECKING:
    from models.pretrain.recovery.checkpoint import Checkpointer
    from models.pretrain.validation import Validation


@dataclass(frozen=True)
class Progress:
    """The steps since the last report: their losses, each the mean over a global batch, and the seconds they took.

    Attributes:
        validation_loss: after the last of them, if the model was scored.
        lasting: a checkpoint or the end follows, which rely on what is written of these steps.
    """

    losses: list[float]
    seconds: float
    validation_loss: float | None = None
    lasting: bool = True


@dataclass
class Trainer:
    """One process's part of a training.

    Attributes:
        sums: adds up gradients where the wrapped parts do not.
        identity: what a checkpoint must have in common with this training.
        local: synchronizes params where processes step alone.
        rank_state: rank-local state of that, or of gradient compression.
        shares: adapts shares of the batch to the processes' speeds.
        step: global batches trained on so far.
        note: why every process built the whole model, where the plan lets it keep a part.
    """

    world: World
    options: TrainingOptions
    batches: Batches
    steps: int
    parallel: Parallel
    optimizers: list[torch.optim.Optimizer]
    run: forward_backward.Pass
    sums: GradientSums
    identity: manifest.Identity
    local: local_updates.LocalUpdates | None = None
    rank_state: states.RankState | None = None
    shares: shares.Rebalancing | None = None
    step: int = 0
    note: str = ""
    _losses: list[torch.Tensor] = field(default_factory=list)

    @property
    def state(self) -> states.State:
        """The tensors that a checkpoint keeps."""
        return states.State(
            self.parallel.parts,
            self.optimizers,
            buffers=self.world.coordinate("data") == 0,
            rank_state=self.rank_state,
            rank=self.world.rank,
            frozen=not self.identity.frozen,
        )

    def train_step(self) -> None:
        """Trains on one global batch."""
        with record_function(LOADER):
            batch = self.batches[self.step]
        seed_dropout(dropout_seed(self.identity.seed, self.step, self.world), self.world.device)
        rate = self.options.rate(self.step, self.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
        loss = self.run(batch)
        self.sums.finish()
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
        if self.shares is not None:
            self.shares.after_step(self.batches)

    def losses(self) -> list[float]:
        """Mean losses of the global batches since the last call, on every process. A collective."""
        if not self._losses:
            return []
        shares = torch.stack([loss.float() for loss in self._losses])
        if self.world.coordinate("tp"):
            shares.zero_()  # every tp rank computed the same loss
        if dist.get_world_size() > 1:
            dist.all_reduce(shares)
        self._losses.clear()
        losses: list[float] = shares.tolist()
        return losses


def build(
    spec: ModelSpec,
    source: Source,
    options: TrainingOptions,
    world: World,
    seed: int,
    clock: shares.Clock = time.perf_counter,
) -> Trainer:
    """A trainer at step 0.

    Raises:
        PlanError: the model or the batch cannot follow the plan.
    """
    plan_rules.check(world.plan, sizes_of(spec), options, dist.get_world_size())
    deferred, note = materialize.without_memory(spec, world.plan)
    full = spec.build(seed) if deferred is None else deferred.module
    identity = manifest.Identity(
        spec.name, options.optimizer, seed, options.batch_size, len(source), shapes_of(full), spec.frozen
    )
    require_splittable(full, spec.layout, world.plan)
    module = freezing.freeze(full, spec.layout, options, world.plan)
    if (
        deferred is None
        and spec.layout is not None
        and (world.plan.pp > 1 or isinstance(module, freezing.Frozen))
    ):
        require_composition(full, spec.layout, spec.example_batch(2)[0])
    parallel = parallelize(module, spec.layout, world)
    if deferred is not None:
        device = world.device if world.plan.offload == "none" else torch.device("cpu")
        materialize.materialize(parallel.parts, deferred, spec, seed, device)
    for part in parallel.parts:
        part.train()
    freezing.set_eval_mode(parallel.parts, options)
    batches = Batches(
        source, options.batch_size, seed, forward_backward.share_of(world, options.batch_size), options.shift
    )
    steps = options.steps_of(batches.steps_per_epoch)
    built, rank_state = optimizers.build(parallel.parts, options, world, steps)
    run = freezing.track_rows(parallel.parts, forward_backward.build(parallel, objective_of(spec), world))
    balancing = shares.from_plan(world, clock)
    local = local_updates.from_plan(built, options, world)
    return Trainer(
        world,
        options,
        batches,
        steps,
        parallel,
        built,
        run if balancing is None else balancing.timed(parallel.parts, run),
        GradientSums(parallel.parts, world),
        identity,
        local,
        local or rank_state,
        balancing,
        note=note,
    )


def dropout_seed(seed: int, step: int, world: World) -> int:
    """Seed of a step's dropout: it differs between rows and stages, and is the same on ranks that share a matrix.

    A function of the step, like batches, so that a training can resume at any step.
    """
    sequence = np.random.SeedSequence([seed, step, world.coordinate("data"), world.coordinate("pp")])
    return int(sequence.generate_state(1, np.uint64)[0])


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seeds the generators that this process draws from.

    `torch.manual_seed` also notes seed and stack of every call for each kind of device that has not been used.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def train(
    trainer: Trainer,
    on_progress: Callable[[Progress], None],
    every: int,
    checkpointer: Checkpointer | None = None,
    stop: Callable[[], bool] = lambda: False,
    around: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
    validation: Validation | None = None,
) -> None:
    """Trains to the last step, or until `stop`, called after every step, returns true.

    `on_progress` is called every `every` steps, after every validation, before every checkpoint and at the end. `around`
    gives the context of every step. With a `checkpointer`, everything trained is in a checkpoint when this returns.

    Raises:
        CheckpointError: a checkpoint could not be written.
    """
    before = time.perf_counter()
    while trainer.step < trainer.steps:
        with around(trainer.step):
            trainer.train_step()
        last = stop() or trainer.step == trainer.steps
        score = validation is not None and validation.due(trainer.step)
        save = checkpointer is not None and (last or checkpointer.due(trainer.step))
        if last or save or score or trainer.step % every == 0:
            losses, seconds = trainer.losses(), time.perf_counter() - before
            loss = validation.loss() if score and validation is not None else None
            if checkpointer is not None and loss is not None:
                save = checkpointer.is_best(trainer.step, loss) or save
            on_progress(Progress(losses, seconds, loss, lasting=save or last))
            before = time.perf_counter()
        if save and checkpointer is not None:
            checkpointer.save(trainer.state, trainer.step)
        if last:
            break
    if trainer.step == trainer.steps and trainer.local is not None:
        trainer.local.synchronize()
    if checkpointer is not None:
        checkpointer.wait()
