"""The pretraining loop: shares of a batch add up, images move, the same seed gives the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edge_client.train import torch_trainer
from edge_client.wire import arrays
from models import zoo
from models.job import JobError, read_params
from models.labels import PADDING
from models.pretrain import evaluation, params
from models.pretrain.data.batches import Arrays, Batches, Share, global_batches, shifted
from models.pretrain.training import TrainingOptions
from tests.support.training import trained

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


CPU = torch.device("cpu")


@given(
    batch=st.integers(1, 40),
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=9),
    pad=st.sampled_from([0, 48]),
)
def test_shares_of_a_batch_are_disjoint_and_complete(batch: int, rows: list[int], pad: int) -> None:
    """Also where shares differ, and where there are more processes than rows: such a share has no label that counts."""
    x = np.arange(batch, dtype=np.float32)[:, None]
    source = Arrays(x, np.arange(batch, dtype=np.int32))
    shares = [
        Batches(source, batch, 0, Share(tuple(rows), place, pad_to=pad))[0] for place in range(len(rows))
    ]
    taken = [y for share in shares for y in share.y.tolist() if y != PADDING]
    assert sorted(taken) == list(range(batch))
    assert {share.counted for share in shares} == {batch}
    assert all(len(share.x) for share in shares)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    source = Arrays(np.arange(10, dtype=np.float32)[:, None], np.arange(10, dtype=np.int32))
    through = Batches(source, 4, 7, Share())
    seen = [through.rows(step).tolist() for step in range(9)]
    assert Batches(source, 4, 7, Share()).rows(7).tolist() == seen[7]
    assert sorted(row for rows in seen[:3] for row in rows) == list(range(10))
    assert seen[:3] != seen[3:6]
    assert Batches(source, 4, 8, Share()).rows(0).tolist() != seen[0]


@given(examples=st.integers(1, 50), size=st.integers(1, 20), seed=st.integers(0, 100))
def test_an_epoch_visits_every_example_once(examples: int, size: int, seed: int) -> None:
    pieces = list(global_batches(examples, size, np.random.default_rng(seed)))
    assert sorted(np.concatenate(pieces)) == list(range(examples))
    assert all(len(piece) == size for piece in pieces[:-1])


@given(pixels=st.integers(1, 2), depth=st.sampled_from([None, 1, 3]), seed=st.integers(0, 1000))
def test_a_shifted_image_is_the_image_moved_by_whole_pixels(
    pixels: int, depth: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = (6, 5) if depth is None else (depth, 6, 5)
    x = rng.normal(size=(4, *shape)).astype(np.float32)
    moved = shifted(x, pixels, rng)
    padded = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(pixels, pixels)] * 2)
    places = range(2 * pixels + 1)
    for image, canvas in zip(moved, padded, strict=True):
        candidates = [canvas[..., i : i + 6, j : j + 5] for i in places for j in places]
        assert sum(np.array_equal(image, candidate) for candidate in candidates) == 1


def test_shifts_reach_every_place_and_zero_leaves_images_alone() -> None:
    x = np.zeros((400, 5, 5), np.float32)
    x[:, 2, 2] = 1
    seen = {tuple(np.argwhere(image)[0]) for image in shifted(x, 1, np.random.default_rng(0))}
    assert seen == {(i, j) for i in (1, 2, 3) for j in (1, 2, 3)}
    assert shifted(x, 0, np.random.default_rng(0)) is x


def test_shifting_what_is_no_image_is_refused() -> None:
    with pytest.raises(JobError, match=r"options.shift is 1.*\(4,\) are no images"):
        evaluation.require_images(np.zeros((3, 4), np.float32), "options.shift is 1", "job.json")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_training_lowers_the_loss_and_repeats_bit_for_bit(
    optimizer: str, blobs: tuple[np.ndarray, np.ndarray]
) -> None:
    spec = zoo.get("mlp", input_shape=(4,), classes=3, hidden=[8])
    options = TrainingOptions(epochs=20, batch_size=16, lr=0.02, optimizer=optimizer)  # type: ignore[arg-type]
    module, losses = trained(spec, *blobs, options, seed=3)
    same, again = trained(spec, *blobs, options, seed=3)
    assert losses == again
    expected = params.params_of(same)
    assert all(np.array_equal(value, expected[name]) for name, value in params.params_of(module).items())
    assert len(losses) == 20 * 4
    assert losses[-1] < losses[0] / 2


def test_a_checkpoint_is_what_devices_call_params(tmp_path: Path) -> None:
    """Same tensors, same bytes, as the wire's own encoding of what the torch trainer reads."""
    module = zoo.get("resnet8", input_shape=(8, 8), classes=10, norm="batch").build(0)
    about = params.save(module, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    assert content == arrays.encode(torch_trainer.read(module))
    assert about["bytes"] == len(content)
    assert any("running_mean" in name for name in params.params_of(module))


def load(module: nn.Module, path: Path) -> None:
    params.fill(module, read_params(path), str(path))


def test_loading_a_checkpoint_restores_it_and_another_models_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    spec = zoo.get("mlp", input_shape=(4,), classes=3, hidden=[8])
    module, other = spec.build(0), spec.build(1)
    params.save(module, path)
    load(other, path)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    with pytest.raises(JobError, match=r"'fc.weight' is \(3, 8\), the model has \(3, 9\)"):
        load(zoo.get("mlp", input_shape=(4,), classes=3, hidden=[9]).build(0), path)
    with pytest.raises(JobError, match=r"'hidden.1.bias' is missing"):
        load(zoo.get("mlp", input_shape=(4,), classes=3, hidden=[8, 8]).build(0), path)
    path.write_bytes(b"nonsense")
    with pytest.raises(JobError, match=r"not a readable \.safetensors"):
        load(other, path)


@pytest.fixture(scope="module")
def blobs() -> tuple[np.ndarray, np.ndarray]:
    """60 points in three clouds."""
    rng = np.random.default_rng(0)
    y = np.arange(60, dtype=np.int32) % 3
    return (rng.normal(size=(3, 4)) * 2)[y].astype(np.float32) + rng.normal(size=(60, 4)).astype(
        np.float32
    ), y


def test_a_tied_tensor_is_saved_once_under_its_first_name(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].weight = module[0].weight
        return module

    saved, other = tied(), tied()
    params.save(saved, tmp_path / "model.safetensors")
    assert sorted(params.params_of(saved)) == ["0.bias", "0.weight", "1.bias"]
    load(other, tmp_path / "model.safetensors")
    assert torch.equal(other[1].weight, saved[0].weight)
