"""Frozen modules stay as they were, take no backward pass, and a frozen beginning no second forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.freezing import Frozen
from models.pretrain.params import unwrapped_name
from models.pretrain.plan import PlanError
from models.pretrain.recovery import checkpoint
from models.pretrain.training import TrainingOptions
from tests.models.pretrain import curves
from tests.support import ranks

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


BEGINNING = "embedding,layers.0,layers.1"
ROWS, STEPS = 24, 9  # three epochs of three batches
TARGET = "tests.models.pretrain.test_freezing:trained"


@dataclass(frozen=True)
class Outcome:
    """What came of a training: `changed` and `stepped`: names of params; `forwards`: of examples, by the beginning."""

    losses: list[float]
    changed: list[str]
    stepped: list[str]
    forwards: int
    kept_bytes: int


def trained(plans_: Sequence[str], **options: object) -> list[Outcome]:
    with world.join(plans.parse(plans_[0])) as first:
        return [_trained(world.build(plans.parse(plan), first.device), options) for plan in plans_]


def _trained(here: world.World, options: dict[str, object]) -> Outcome:
    given: TrainingOptions = curves.settings(**{"steps": STEPS, **options})
    spec = curves.spec_of(dropout=0.0)
    training = trainer.build(spec, curves.tokens(ROWS), given, here, seed=5)
    full = dict(spec.build(5).named_parameters())
    losses: list[float] = []
    for _ in range(training.steps):
        training.train_step()
        losses += training.losses()
    (part,) = training.parallel.parts
    now = {unwrapped_name(name): checkpoint_tensor(p) for name, p in part.named_parameters()}
    changed = [name for name, value in now.items() if not np.array_equal(value, full[name].detach().numpy())]
    names = {id(p): unwrapped_name(name) for name, p in part.named_parameters()}
    stepped = [names[id(p)] for o in training.optimizers for g in o.param_groups for p in g["params"]]
    frozen = [module for module in part.modules() if isinstance(module, Frozen)]
    forwards = sum(module.forwards for module in frozen)
    kept = sum(
        x.nbytes + sum(each.nbytes for each in given)
        for module in frozen
        for x, given in module._cache.values()
    )
    return Outcome(losses, changed, stepped, forwards, kept)


def checkpoint_tensor(parameter: object) -> np.ndarray:
    from torch.distributed.tensor import DTensor

    tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    value: np.ndarray = tensor.detach().numpy()  # type: ignore[attr-defined]
    return value


def test_frozen_beginning_goes_forward_once_an_example_and_training_is_the_same() -> None:
    ((cached,),) = ranks.run(1, TARGET, ["dp=1"], freeze=BEGINNING)
    ((plain,),) = ranks.run(1, TARGET, ["dp=1"], freeze=BEGINNING, freeze_cache_mib=0)
    ((full,),) = ranks.run(1, TARGET, ["dp=1"])
    assert cached.losses == plain.losses
    assert cached.forwards == ROWS
    assert cached.kept_bytes == ROWS * curves.LENGTH * 4 * (1 + 32)  # a token, and 32 features of it
    frozen = ("embedding.", "layers.0.", "layers.1.")
    for found in (cached, plain):
        assert not any(name.startswith(frozen) for name in found.changed + found.stepped)
        assert {"layers.2.mlp.up.weight", "head.weight"} <= set(found.changed)
    assert {"embedding.token.weight", "layers.0.mlp.up.weight"} <= set(full.changed)
    assert np.abs(np.subtract(full.losses, plain.losses)).max() > 1e-3


@pytest.mark.extended
def test_other_plans_train_the_same_with_the_same_frozen() -> None:
    ((alone,),) = ranks.run(1, TARGET, ["dp=1"], freeze=BEGINNING)
    found = ranks.run(
        2,
        TARGET,
        ["dp=2", "dp=2,microbatches=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "cp=2"],
        freeze=BEGINNING,
    )[0]
    for each in found:
        np.testing.assert_allclose(each.losses, alone.losses, atol=1e-5)
        assert not any(name.startswith(("embedding.", "layers.0.")) for name in each.changed)
    assert found[0].forwards < ROWS * STEPS / 3  # about half of the examples are this process's
    assert found[3].forwards == 0  # nothing is kept


def test_a_module_in_the_middle_may_be_frozen_alone() -> None:
    ((found,),) = ranks.run(1, TARGET, ["dp=1"], freeze="layers.1")
    assert not any(name.startswith("layers.1.") for name in found.changed)
    assert "embedding.token.weight" in found.changed
    assert found.forwards == 0


def build(plan: str, **options: object) -> trainer.Trainer:
    with world.join(plans.parse(plan)) as here:
        return trainer.build(
            curves.small_gpt(), curves.tokens(ROWS), curves.settings(**options), here, seed=5
        )


def test_params_that_cannot_be_frozen_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'layers.9', which is no module of this model; it has embedding, "):
        build("dp=1", freeze="layers.9")
    with pytest.raises(PlanError, match="nothing is left to train"):
        build("dp=1", freeze="embedding,layers,norm,head")


def test_stages_are_refused() -> None:
    with pytest.raises(ranks.RankFailed, match="a frozen stage has no gradients to send back"):
        ranks.run(2, "tests.models.pretrain.test_freezing:build", "pp=2", freeze="embedding")


def test_little_memory_keeps_few_examples() -> None:
    with world.join(plans.parse("dp=1")) as here:
        options = curves.settings(steps=6, freeze=BEGINNING)
        training = trainer.build(curves.small_gpt(), curves.tokens(ROWS), options, here, seed=5)
        (frozen,) = (part for part in training.parallel.parts if isinstance(part, Frozen))
        an_example = curves.LENGTH * 4 * (1 + 32)
        frozen.free_bytes = 5 * an_example + 1
        for _ in range(training.steps):
            training.train_step()
        assert len(frozen._cache) == 5
        assert frozen.forwards == 2 * ROWS - 5


def test_training_with_frozen_modules_is_resumed(tmp_path: Path) -> None:
    options = curves.settings(steps=6, freeze=BEGINNING)
    with world.join(plans.parse("dp=1")) as here:

        def fresh() -> trainer.Trainer:
            return trainer.build(curves.small_gpt(), curves.tokens(ROWS), options, here, seed=5)

        policy = checkpoint.Policy(every=3, background=False)
        first = fresh()
        losses: list[float] = []
        saver = checkpoint.Checkpointer(tmp_path, policy, first.identity, here, "")
        trainer.train(
            first, lambda progress: losses.extend(progress.losses), 1, saver, lambda: first.step == 3
        )
        again = fresh()
        again.step = checkpoint.Checkpointer(tmp_path, policy, again.identity, here, "").restore(again.state)
        assert again.step == 3
        trainer.train(again, lambda progress: losses.extend(progress.losses), 1)
        full = fresh()
        expected: list[float] = []
        trainer.train(full, lambda progress: expected.extend(progress.losses), 1)
        assert losses == expected


def test_a_beginning_that_gives_several_tensors_is_kept_too() -> None:
    """Those of bert give which tokens count besides."""
    from tests.models.pretrain.random_plans import Trial, losses

    frozen = {"batch_size": 6, "freeze": "embedding,layers.0"}
    kept, computed = losses(
        [Trial("bert", "dp=1", frozen), Trial("bert", "dp=1", {**frozen, "freeze_cache_mib": 0})]
    )
    assert kept == computed and isinstance(kept, list)
