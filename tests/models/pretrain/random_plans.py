"""Random trainings: a model, options and a plan for so many processes that the checks let pass. `losses` runs in ranks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models import zoo
from models.pretrain import plan as plans
from models.pretrain import plan_rules, trainer, world
from models.pretrain.data.batches import Arrays, Source
from models.pretrain.data.tokens import Masked
from models.pretrain.parallel.data import buckets
from models.pretrain.parallelize import sizes_of
from models.pretrain.plan import ParallelPlan, PlanError
from models.pretrain.planner.bench_rank import Worlds
from models.pretrain.training import TrainingOptions
from models.zoo import ModelSpec

LENGTH, VOCAB, CLASSES, STEPS = 12, 24, 3, 6
SMALL: dict[str, Any] = {"width": 16, "layers": 4, "heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": SMALL,
    "gpt tied": {**SMALL, "tie": True},
    "gpt sparse": {
        **SMALL,
        "attention": "block_sparse",
        "attention_block": 4,
        "attention_local": 1,
        "attention_stride": 2,
    },
    "gpt dropout": {**SMALL, "dropout": 0.1},
    "moe": {**SMALL, "experts": 4},
    "moe chosen": {**SMALL, "experts": 4, "chosen": 2},
    "bert": {**SMALL, "vocab": VOCAB},
    "bert masked": {**SMALL, "vocab": VOCAB, "objective": "masked", "tie": False},
    "bert tied": {**SMALL, "vocab": VOCAB, "objective": "masked"},
    "gpt llama": {
        **SMALL,
        "kv_heads": 2,
        "bias": "qkv",
        "norm": "rms",
        "activation": "swiglu",
        "positions": "rope",
    },
    "gpt biased": {**SMALL, "bias": "all", "activation": "gelu"},
    "lstm": {"width": 16, "layers": 2},
    "resnet": {"blocks": [1, 1], "width": 8},
    "resnet8": {},
    "cnn": {},
    "mlp": {},
    "tests.models.pretrain.annotated:build": {},
}
IMAGES = ("resnet", "resnet8", "cnn", "mlp")
FROZEN = ("embedding", "layers.0", "embedding,layers.0", "layers.2", "norm", "head")
BUCKET_BYTES = 4096
"""So small that even these models have several buckets of gradients."""
APPROXIMATE = 0.25
"""Relative difference of losses where a plan computes something else for less, or a mask falls otherwise."""


@dataclass(frozen=True)
class Trial:
    """One random training; `model` is a key of `MODELS`."""

    model: str
    plan: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether its losses must be those of one process but for rounding."""
        plan = plans.parse(self.plan)
        return (
            plan.grad_compression == "fp32"
            and plan.precision == "fp32"
            and not plan.sync_every
            and "dropout" not in self.model
        )


def draw(seed: int, processes: int) -> Iterator[Trial]:
    """Without end; what the plan's own checks refuse is left out."""
    rng = random.Random(seed)
    while True:
        model, options = rng.choice(list(MODELS)), _options(rng)
        if "layers" not in MODELS[model] and rng.random() < 0.5:
            continue  # there is less to split
        plan = _plan(rng, processes)
        try:
            sizes = sizes_of(spec_of(model))
            plan_rules.check(plan, sizes, TrainingOptions(**options), processes)
        except PlanError:
            continue
        yield Trial(model, str(plan), options)


def losses(trials: Sequence[Trial]) -> list[list[float] | str]:
    """Losses of every trial, or why it is refused, by processes that are as many as their plans need.

    Raises:
        Exception: whatever else one raises, with the trial as a note.
    """
    found: list[list[float] | str] = []
    buckets.SMALLEST_BUCKET_BYTES = BUCKET_BYTES
    with world.join(plans.parse(trials[0].plan)) as here:
        worlds = Worlds(here.device)
        for trial in trials:
            options = TrainingOptions(**{"steps": STEPS, "lr": 1e-2, "eps": 1e-4, **trial.options})
            try:
                training = trainer.build(
                    spec_of(trial.model), source(trial.model), options, worlds.of(plans.parse(trial.plan)), 5
                )
                for _ in range(STEPS):
                    training.train_step()
                found.append(training.losses())
            except PlanError as refusal:
                found.append(str(refusal))
            except Exception as error:
                error.add_note(repr(trial))
                raise
    return found


def spec_of(model: str) -> ModelSpec:
    name = model.split()[0]
    return zoo.get(
        name,
        input_shape=(8, 8) if name in IMAGES else (LENGTH,),
        classes=CLASSES if name in IMAGES or model == "bert" else VOCAB,
        **MODELS[model],
    )


def source(model: str) -> Source:
    """22 rows, so that an epoch's last batch is a short one, with some labels that do not count."""
    rng = np.random.default_rng(3)
    name, labels = model.split()[0], rng.integers(CLASSES, size=22).astype(np.int32)
    if name in IMAGES:
        return Arrays(rng.random((22, 8, 8), np.float32), labels)
    text = rng.integers(1, VOCAB, size=(22, LENGTH)).astype(np.int32)
    if name == "bert":
        text[np.arange(LENGTH) >= rng.integers(3, LENGTH + 1, size=(22, 1))] = 0
        return Masked(Arrays(text, labels), VOCAB) if model != "bert" else Arrays(text, labels)
    following = np.roll(text, -1, axis=1)
    following[::5, :4] = -1
    return Arrays(text, following)


def _options(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"batch_size": rng.choice([8, 8, 8, 6, 7])}
    if rng.random() < 0.3:
        found |= {"optimizer": "sgd", "lr": 0.05}
    if rng.random() < 0.3:
        found |= {"clip_norm": 0.3}
    if rng.random() < 0.2:
        found |= {"freeze": rng.choice(FROZEN)}
    if rng.random() < 0.2:
        found |= {"warmup": 2, "decay": "cosine"}
    return found


def _plan(rng: random.Random, processes: int) -> ParallelPlan:
    left, degrees = processes, {"tp": 1, "pp": 1, "cp": 1}
    for key in rng.sample(sorted(degrees), 3):
        degrees[key] = rng.choice([number for number in range(1, left + 1) if left % number == 0])
        left //= degrees[key]

    def sometimes(share: float, **values: Sequence[Any]) -> dict[str, Any]:
        return {key: rng.choice(of) for key, of in values.items() if rng.random() < share}

    chosen: dict[str, Any] = {"dp": left, **degrees}
    chosen |= sometimes(
        0.4, zero=(1, 2, 3), microbatches=(1, 2, 4), activation_checkpoint=("selective", "full")
    )
    if degrees["tp"] > 1:
        chosen |= sometimes(0.4, sequence=(True,), loss_parallel=(True,))
    if degrees["pp"] > 1:
        chosen |= sometimes(0.7, schedule=("naive", "gpipe", "interleaved", "zero-bubble", "zbv"))
        chosen |= sometimes(0.2, stages=(2,), split=((1, 3), (3, 1), (1, 1, 1, 1)))
    if left > 1:
        chosen |= sometimes(
            0.15,
            ep=(2, left),
            shards=(1, 2),
            grad_compression=("fp16", "bf16", "powersgd", "onebit"),
            sync_every=(1, 2, 3),
            batch_shares=(tuple(range(1, left + 1)),),
            offload=("cpu", "disk"),
            rebalance=(2,),
        )
        if "sync_every" in chosen:
            chosen |= sometimes(0.5, outer=("nesterov",))
    chosen |= sometimes(0.1, precision=("bf16",))
    return dataclasses.replace(ParallelPlan(), **chosen)
