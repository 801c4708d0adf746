"""What a job file says to train on is what is trained on, and what does not fit is refused with file and key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edge_client.processes import process
from models import job as jobs
from models import zoo
from models.job import JobError
from models.labels import PADDING
from models.pretrain import evaluation
from models.pretrain.data import sources
from models.pretrain.data.batches import Arrays, Batches, BatchRandom, Share
from models.pretrain.data.images import Augmentation, Scaled, augment, scale_of
from models.pretrain.data.tokens import Masked, Windows

GPT = {"name": "gpt", "input_shape": [4], "classes": 9, "input_dtype": "int32", "task": "next_token"}
CNN = {"name": "cnn", "input_shape": [6, 6], "classes": 3}


def job(folder: Path, **settings: Any) -> jobs.JobFile:
    (folder / "job.json").write_text(json.dumps({"arrays": ".", **settings}))
    return jobs.read(folder / "job.json")


def data_of(read: jobs.JobFile, shift: int = 0) -> sources.Data:
    return sources.from_job(read, read.spec(), shift)


def all_of(source: Any) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(len(source))
    found: tuple[np.ndarray, np.ndarray] = source.read(
        rows, BatchRandom(np.random.default_rng(0), len(rows), rows)
    )
    return found


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for part, rows in (("train", 12), ("test", 5)):
        np.save(tmp_path / f"x_{part}.npy", rng.normal(2, 3, size=(rows, 6, 6)).astype(np.float32))
        np.save(tmp_path / f"y_{part}.npy", rng.integers(3, size=rows))
    return tmp_path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for part, count in (("train", 41), ("test", 13)):
        np.save(tmp_path / f"tokens_{part}.npy", (np.arange(count) % 9).astype(np.uint16))
    return tmp_path


TOKENS = {"train": "tokens_train.npy", "test": "tokens_test.npy"}


def test_arrays_are_mapped_and_not_read(images: Path) -> None:
    data = data_of(job(images, model=CNN))
    assert isinstance(data.train, Arrays)
    assert isinstance(data.train.x.base, np.memmap)
    assert (len(data.train), len(data.test)) == (12, 5)


def test_files_of_tokens_are_windows(text: Path) -> None:
    data = data_of(job(text, model=GPT, tokens=TOKENS))
    assert isinstance(data.train, Windows)
    assert (len(data.train), len(data.test)) == (10, 3)
    assert isinstance(data.train.tokens, np.memmap)


def test_hiding_tokens_needs_a_model_that_finds_them(text: Path) -> None:
    model = {"name": "bert", "input_shape": [4], "classes": 9, "options": {"vocab": 9, "objective": "masked"}}
    data = data_of(job(text, model=model, tokens=TOKENS, objective="masked"))
    assert isinstance(data.train, Masked)
    assert isinstance(data.test, Masked)
    assert isinstance(
        data_of(job(text, model=model, tokens=TOKENS)).train, Masked
    )  # nothing else can be meant
    with pytest.raises(JobError, match=r"objective is 'labels', but model 'bert' finds hidden tokens"):
        data_of(job(text, model=model, tokens=TOKENS, objective="labels"))
    with pytest.raises(JobError, match=r"objective is 'masked', but model 'gpt' has no mask token"):
        data_of(job(text, model=GPT, tokens=TOKENS, objective="masked"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tokens": {"train": "tokens_train.npy"}}, r"tokens lacks the key 'test'"),
        ({"tokens": {**TOKENS, "tset": "x"}}, r"tokens has the unknown key 'tset', did you mean 'test'"),
        ({"tokens": {**TOKENS, "test": "x.npy"}}, r"x.npy does not exist"),
        ({"tokens": TOKENS, "images": {"flip": 0.5}}, r"has both tokens and images"),
        ({"tokens": TOKENS, "objective": "guess"}, r"objective is 'guess', expected one of labels, masked"),
        ({"tokens": TOKENS, "model": {**GPT, "classes": 8}}, r"tokens from 0 to 8, expected 0 to 7"),
        (
            {"tokens": TOKENS, "model": {**GPT, "input_shape": [41]}},
            r"has 41 tokens, expected more than the 41",
        ),
        ({"tokens": TOKENS, "model": CNN}, r"tokens is given, but model 'cnn' does not predict tokens"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(text: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        data_of(job(text, **{"model": GPT, **settings}))


def test_images_only_where_there_are_images(images: Path, text: Path) -> None:
    with pytest.raises(JobError, match=r"images.flip is 2, expected a number from 0.0 to 1.0"):
        data_of(job(images, model=CNN, images={"flip": 2}))
    with pytest.raises(JobError, match=r"options.shift is 1, but tokens are no images"):
        data_of(job(text, model=GPT, tokens=TOKENS), shift=1)
    for part in ("train", "test"):
        np.save(images / f"x_{part}.npy", np.zeros((2, 4), np.float32))
        np.save(images / f"y_{part}.npy", np.zeros(2, np.int64))
    with pytest.raises(JobError, match=r"images is given, but examples of shape \(4,\) are no images"):
        data_of(job(images, model={"name": "mlp", "input_shape": [4], "classes": 3}, images={"flip": 0.5}))


def test_normalised_images_have_mean_0_and_deviation_1_by_the_training_set(images: Path) -> None:
    data = data_of(job(images, model=CNN, images={"normalise": True}))
    x, _ = all_of(data.train)
    assert x.dtype == np.float32
    np.testing.assert_allclose([x.mean(), x.std()], [0, 1], atol=1e-5)
    raw, (seen, _) = np.load(images / "x_test.npy"), all_of(data.test)
    result = data.about["normalised"]
    np.testing.assert_allclose(seen, (raw - result["mean"][0]) / result["deviation"][0], rtol=1e-5)


@pytest.mark.extended
@pytest.mark.slow
def test_the_result_has_the_scale_of_normalised_images(images: Path) -> None:
    """Whoever uses the model needs it."""
    described = job(images, model=CNN, images={"normalise": True}, options={"steps": 1, "batch_size": 4})
    command = [sys.executable, "-P", "-m", "models.pretrain.training_process", str(described.path)]
    subprocess.run(command, check=True, env=process.worker_environment(), stdout=subprocess.PIPE)
    found = json.loads((images / "result.json").read_text())
    assert found["normalised"] == data_of(described).about["normalised"]


def test_every_channel_has_a_scale_of_its_own_and_a_constant_one_stays_finite() -> None:
    x = np.stack([np.full((4, 4), 3.0), np.arange(16.0).reshape(4, 4)])[None].repeat(5, 0).astype(np.float32)
    mean, deviation = scale_of(x)
    np.testing.assert_allclose(mean, [3, 7.5])
    np.testing.assert_allclose(deviation, [1, np.arange(16).std()], rtol=1e-6)
    seen, _ = all_of(Scaled(Arrays(x, np.zeros(5, np.int32)), mean, deviation))
    assert (seen[:, 0] == 0).all()


CHANGES = [
    Augmentation(flip=0.5),
    Augmentation(crop=2),
    Augmentation(erase=3),
    Augmentation(flip=0.3, crop=1, erase=2),
]


@pytest.mark.parametrize("how", CHANGES, ids=str)
@given(seed=st.integers(0, 99), shares=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_a_changed_image_does_not_depend_on_who_reads_it(
    how: Augmentation, seed: int, shares: list[int]
) -> None:
    x = np.random.default_rng(0).random((14, 3, 6, 5), np.float32)
    source = augment(Arrays(x, np.arange(14, dtype=np.int32)), how)
    full = Batches(source, 8, seed, Share())
    for step in range(3):
        parts = [Batches(source, 8, seed, Share(tuple(shares), place))[step] for place in range(len(shares))]
        real = [part for part in parts if (part.y != PADDING).any()]
        assert torch.equal(torch.cat([part.x for part in real]), full[step].x)
        assert torch.equal(torch.cat([part.y for part in real]), full[step].y)
    first, later = full[0], full[full.steps_per_epoch]
    assert not torch.equal(first.x, later.x)


@given(seed=st.integers(0, 999))
def test_a_flipped_image_is_the_image_or_its_mirror_and_an_erased_one_lacks_a_square(seed: int) -> None:
    x = np.random.default_rng(seed).random((40, 6, 5), np.float32) + 1
    arrays = Arrays(x, np.zeros(40, np.int32))
    flipped, _ = all_of(augment(arrays, Augmentation(flip=0.5)))
    mirrored = [bool((now == was[:, ::-1]).all()) for now, was in zip(flipped, x, strict=True)]
    assert all(m or (now == was).all() for m, now, was in zip(mirrored, flipped, x, strict=True))
    assert 0 < sum(mirrored) < 40
    erased, _ = all_of(augment(arrays, Augmentation(erase=3)))
    for now, was in zip(erased, x, strict=True):
        down, right = np.nonzero(now == 0)
        height, width = np.ptp(down) + 1, np.ptp(right) + 1
        assert len(down) == height * width  # it is a rectangle, smaller than the square only at the border
        assert height in (2, 3)
        assert width in (2, 3)
        assert (now[now != 0] == was[now != 0]).all()


class Fixed(nn.Module):
    """Logits that come with the rows, and a count of how many rows it is shown at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, len(x))
        return x


def test_an_evaluation_by_pieces_is_that_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "ROWS", 7)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 6, 5)).astype(np.float32)
    y = rng.integers(-1, 5, size=(50, 6)).astype(np.int32)
    spec = zoo.get("charlm", input_shape=(6,), classes=5)
    module = Fixed()
    found = evaluation.evaluate(module, spec, Arrays(x, y), torch.device("cpu"))
    logits, labels = torch.from_numpy(x), torch.from_numpy(y)
    counted = labels != PADDING
    correct = ((logits.argmax(-1) == labels) & counted).sum() / counted.sum()
    assert module.most == 7
    assert found.loss == pytest.approx(float(spec.loss(logits, labels)), rel=1e-6)
    assert found.accuracy == pytest.approx(float(correct), rel=1e-6)
