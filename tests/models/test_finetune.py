"""A training that begins with the params of another: all of them, or all but the head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models import job as jobs
from models import zoo
from models.job import JobError
from models.pretrain import initial, params, trainer, world
from models.pretrain.data.batches import Arrays, Source
from models.pretrain.data.tokens import Masked
from models.pretrain.plan import ParallelPlan
from models.pretrain.training import TrainingOptions
from models.zoo import ModelSpec

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


VOCAB, LENGTH = 30, 10
SIZES = {"vocab": VOCAB, "width": 16, "layers": 2, "heads": 2}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models gain nothing by several, and on a busy machine they wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def finder() -> ModelSpec:
    return zoo.get("bert", input_shape=(LENGTH,), classes=VOCAB, objective="masked", **SIZES)


def classifier(classes: int = 3, **options: Any) -> ModelSpec:
    return zoo.get("bert", input_shape=(LENGTH,), classes=classes, **{**SIZES, **options})


def with_init(folder: Path, spec: ModelSpec, **init: Any) -> ModelSpec:
    (folder / "job.json").write_text(json.dumps({"init": {"params": "model.safetensors", **init}}))
    return initial.with_init(jobs.read(folder / "job.json"), spec)


def test_a_new_head_is_fresh_and_everything_else_the_files(tmp_path: Path) -> None:
    pretrained = finder().build(9)
    params.save(pretrained, tmp_path / "model.safetensors")
    module, fresh = with_init(tmp_path, classifier(), head="new").build(1), classifier().build(1)
    theirs = pretrained.state_dict()
    for name, tensor in module.state_dict().items():
        expected = fresh.state_dict()[name] if name.startswith("head.") else theirs[name]
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("name", ["resnet8", "resnet", "cnn", "lstm", "gpt"])
def test_the_last_module_is_the_head_of_any_model(name: str, tmp_path: Path) -> None:
    shape = (LENGTH,) if name in ("lstm", "gpt") else (8, 8)
    options = {"width": 8, "blocks": [1]} if name == "resnet" else {}
    spec = zoo.get(name, input_shape=shape, classes=7, **options)
    other = zoo.get(name, input_shape=shape, classes=7 if name in ("lstm", "gpt") else 4, **options)
    saved = spec.build(3)
    params.save(saved, tmp_path / "model.safetensors")
    module, fresh = with_init(tmp_path, other, head="new").build(1), other.build(1)
    kept = [
        tensor
        for tensor, before in zip(module.parameters(), fresh.parameters(), strict=True)
        if torch.equal(tensor, before) and before.ndim > 1
    ]
    assert len(kept) == 1


def test_the_same_head_gives_the_same_model(tmp_path: Path) -> None:
    saved = classifier().build(9)
    params.save(saved, tmp_path / "model.safetensors")
    for init in ({}, {"head": "same"}):
        module = with_init(tmp_path, classifier(), **init).build(1)
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), saved.parameters(), strict=True))


def test_a_job_without_init_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    spec = classifier()
    assert initial.with_init(jobs.read(tmp_path / "job.json"), spec) is spec


def test_mismatches_are_listed(tmp_path: Path) -> None:
    params.save(finder().build(0), tmp_path / "model.safetensors")
    with pytest.raises(
        JobError,
        match=r"does not fit model 'bert': 'head\.\S+ is .*head\.pool.bias' is missing.*head = \"new\"",
    ):
        with_init(tmp_path, classifier())
    with pytest.raises(JobError, match=r"'embedding.token.weight' is \(31, 16\), the model has \(41, 16\)$"):
        with_init(tmp_path, classifier(vocab=40), head="new")
    with pytest.raises(JobError, match=r"and \d+ more$"):
        with_init(tmp_path, classifier(width=32), head="new")
    with pytest.raises(JobError, match=r"init.head is 'old', expected one of 'same', 'new'"):
        with_init(tmp_path, classifier(), head="old")
    with pytest.raises(JobError, match=r"init has the unknown key 'heads', did you mean 'head'"):
        with_init(tmp_path, classifier(), heads="new")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(JobError, match=r"not a readable \.safetensors"):
        with_init(tmp_path, classifier())


def text(rows: int, seed: int) -> Arrays:
    """A class is the first token's third; the next tokens count up from it, so that finding hidden ones teaches that."""
    rng = np.random.default_rng(seed)
    first = rng.integers(1, VOCAB, size=rows)
    x = (first[:, None] - 1 + np.arange(LENGTH)) % (VOCAB - 1) + 1
    return Arrays(x.astype(np.int32), ((first - 1) * 3 // (VOCAB - 1)).astype(np.int32))


def losses(spec: ModelSpec, source: Source, steps: int, save: Path | None = None) -> list[float]:
    """Of every step of a training by one process; what it trained goes to `save`."""
    found: list[float] = []
    with world.join(ParallelPlan()) as here:
        training = trainer.build(
            spec, source, TrainingOptions(steps=steps, batch_size=32, lr=6e-3), here, seed=4
        )
        trainer.train(training, lambda progress: found.extend(progress.losses), every=50)
        if save is not None:
            params.save(training.parallel.parts[0], save)
    return found


def test_a_training_goes_on_from_what_another_learnt(tmp_path: Path) -> None:
    hiding = losses(finder(), Masked(text(400, 0), VOCAB), 200, tmp_path / "model.safetensors")
    assert np.mean(hiding[-10:]) < 0.6 * np.mean(hiding[:10])
    onwards = losses(with_init(tmp_path, finder()), Masked(text(400, 1), VOCAB), 5)
    assert np.mean(onwards) < 0.6 * np.mean(hiding[:10])
