"""Bytes that are alive at the worst moment of a real training step, by plan. Runs in the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.planner.bench_rank import Worlds, examples
from models.pretrain.planner.live_memory import LiveBytes
from models.pretrain.trainer import Trainer
from models.pretrain.training import TrainingOptions
from models.pretrain.world import World
from models.zoo import ModelSpec, gpt

BATCH = 8


def spec(vocab: int, width: int, length: int) -> ModelSpec:
    return gpt.spec((length,), vocab, width=width, layers=4, heads=4)


def peaks(texts: list[str], vocab: int, width: int, length: int) -> list[tuple[int, int]]:
    """(place along pp, bytes) of this process under every plan; all are for as many processes."""
    made = spec(vocab, width, length)
    with world.join(plans.parse(texts[0])) as first:
        worlds = Worlds(first.device)
        return [peak(worlds.of(plans.parse(text)), made, BATCH) for text in texts]


def peak(here: World, made: ModelSpec, batch_size: int) -> tuple[int, int]:
    """The same in one world, of processes that have joined."""
    options = TrainingOptions(steps=3, batch_size=batch_size)
    training = trainer.build(made, examples(made, 2 * batch_size), options, here, seed=1)
    training.train_step()
    with LiveBytes(_held(training)) as live:
        training.train_step()  # buckets are seen once they are used
        live.reset_peak()
        training.train_step()
    return here.coordinate("pp"), live.peak


def _held(training: Trainer) -> Iterator[torch.Tensor]:
    for part in training.parallel.parts:
        yield from part.parameters()
        yield from part.buffers()
    for optimizer in training.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
