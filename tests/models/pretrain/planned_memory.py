"""Bytes that are alive at the worst moment of a real training step, by plan. Runs in the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.parallelize import sizes_of
from models.pretrain.planner import layer_profile
from models.pretrain.planner.bench_rank import Worlds, examples, resident_bytes
from models.pretrain.planner.live_memory import LiveBytes
from models.pretrain.planner.profile import Machine, Profile
from models.pretrain.planner.profile_cache import Cache
from models.pretrain.trainer import Trainer
from models.pretrain.training import TrainingOptions
from models.pretrain.world import World
from models.zoo import ModelSpec, gpt

BATCH = 8
MEDIUM = {"vocab": 2048, "width": 256, "length": 128}
"""A model whose tensors outweigh what a process takes without any."""


def spec(vocab: int, width: int, length: int) -> ModelSpec:
    return gpt.spec((length,), vocab, width=width, layers=4, heads=4)


@cache
def _measured(vocab: int, width: int, length: int) -> Profile:
    made, cpu, cache = spec(vocab, width, length), torch.device("cpu"), Cache(None, "")
    return Profile(
        sizes_of(made),
        *layer_profile.measure(made, cpu, cache),
        layer_profile.optimizer(TrainingOptions(), cpu, cache),
        Machine(),
    )


def profile(process_bytes: float = 0.0, **model: int) -> Profile:
    """The profile of `spec(**model)` measured here, with processes that take so much before they train."""
    found = _measured(**model)
    return replace(found, machine=replace(found.machine, process_bytes=process_bytes))


def peaks(texts: list[str], vocab: int, width: int, length: int) -> list[tuple[int, int]]:
    """(place along pp, bytes) of this process under every plan; all are for as many processes."""
    made = spec(vocab, width, length)
    with world.join(plans.parse(texts[0])) as first:
        worlds = Worlds(first.device)
        return [peak(worlds.of(plans.parse(text)), made, BATCH) for text in texts]


def peak(here: World, made: ModelSpec, batch_size: int) -> tuple[int, int]:
    """The same in one world, of processes that have joined."""
    options = TrainingOptions(steps=4, batch_size=batch_size)
    training = trainer.build(made, examples(made, 2 * batch_size), options, here, seed=1)
    training.train_step()
    with LiveBytes(_held(training)) as live:
        training.train_step()  # buckets are seen once they are used
        training.train_step()  # the first that is coded, after the least warm-up
        live.reset_peak()
        training.train_step()
    return here.coordinate("pp"), live.peak


def resident(text: str, batch_size: int, steps: int = 4, **model: int) -> tuple[int, int]:
    """(bytes before the trainer is built, largest number of bytes while it trains) of this process's resident memory,
    under a plan. For a process of its own, since the allocator's heap has no other history."""
    torch.set_num_threads(1)
    made = spec(**model)
    with world.join(plans.parse(text)) as here:
        warm_up = torch.randn(256, 256, requires_grad=True)
        (warm_up @ warm_up).sum().backward()  # type: ignore[no-untyped-call]  # loads the kernels' libraries
        before = resident_bytes()
        options = TrainingOptions(steps=100, batch_size=batch_size)
        training = trainer.build(made, examples(made, 2 * batch_size), options, here, seed=1)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        for _ in range(steps):
            training.train_step()
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    (peak,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return before, peak


def _held(training: Trainer) -> Iterator[torch.Tensor]:
    for part in training.parallel.parts:
        yield from part.parameters()
        yield from part.buffers()
    for optimizer in training.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    if training.rank_state is not None:
        yield from training.rank_state.tensors().values()
