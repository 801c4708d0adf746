"""Data for very many clients: made in a file, dealt out and hashed piece by piece, with the bytes of the data in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.workers import workspace
from coordinator.workers.workspace_arrays import Workspace, open_workspace
from models import datasets
from models.datasets import large_arrays
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import sample_of, stream
from models.datasets.partitioners import owners, partition

NAME = "synthetic(shape=[3, 5], classes=7, samples=9)"


def test_synthetic_data_in_a_file_is_that_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = datasets.load(NAME, seed=5, clients=40)
    monkeypatch.setattr(large_arrays, "LARGE_BYTES", 1000)
    monkeypatch.setattr(large_arrays, "_PIECE_BYTES", 700)
    in_file = datasets.load(NAME, seed=5, clients=40, folder=tmp_path)
    assert large_arrays.is_file(in_file.x, tmp_path / "drawn.npy")
    assert np.array_equal(in_file.x, in_memory.x)
    assert np.array_equal(np.load(tmp_path / "drawn.npy"), in_memory.x)
    assert in_file.fingerprint() == in_memory.fingerprint()
    large_arrays.release(in_file.x)
    assert np.array_equal(in_file.x, in_memory.x), "released pages are read again"


def test_small_data_makes_no_file(tmp_path: Path) -> None:
    datasets.load(NAME, seed=5, clients=4, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@given(st.integers(0, 50), st.integers(1, 30), st.integers(1, 9))
def test_pieces_are_all_rows_in_order(rows: int, width: int, piece_rows: int) -> None:
    array = np.zeros((rows, width), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_arrays, "_PIECE_BYTES", piece_rows * width * 4)
        parts = list(large_arrays.pieces(array))
    assert [row for piece in parts for row in range(rows)[piece]] == list(range(rows))


@pytest.mark.parametrize("partition", ["iid", "dirichlet(0.3)"])
def test_a_workspace_in_files_gives_every_client_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition: str
) -> None:
    data = {"dataset": NAME, "path": None, "label": "label", "partition": partition, "public_samples": 11}

    def opened(name: str) -> tuple[dict[str, Any], Workspace]:
        request = {
            "folder": str(tmp_path / name),
            "seed": 3,
            "data": data,
            "clients": 12,
            "data_dir": None,
            "sample": 20,
        }
        return workspace.prepare(request), open_workspace(tmp_path / name)

    found, small = opened("small")
    for name, value in {
        "LARGE_BYTES": 1000,
        "_PIECE_BYTES": 700,
        "_SLAB_BYTES": 900,
        "_WINDOW_BYTES": 800,
    }.items():
        monkeypatch.setattr(large_arrays, name, value)
    again, large = opened("large")
    assert again == found
    assert len(small.test_rows) == 20 < found["held_out"]
    for index in range(12):
        assert np.array_equal(small.x[small.part(index)], large.x[large.part(index)])
        assert np.array_equal(small.y[small.part(index)], large.y[large.part(index)])
        assert np.ptp(large.part(index)) == len(large.part(index)) - 1, "a client's rows lie together"
    assert np.array_equal(small.x[small.test_rows], large.x[large.test_rows])
    assert np.array_equal(small.owners, large.owners)
    public = [np.load(tmp_path / name / "public.npy") for name in ("small", "large")]
    assert np.array_equal(small.x[public[0]], large.x[public[1]])
    assert not (tmp_path / "large" / "drawn.npy").exists()


def dataset_of(y: list[int], classes: int) -> Dataset:
    labels = np.array(y, np.int32)
    test = np.arange(len(y)) % 5 == 0
    return Dataset("made", np.zeros((len(y), 1), np.float32), labels, test, classes)


@given(
    st.lists(st.integers(0, 3), min_size=30, max_size=80),
    st.integers(1, 12),
    st.floats(0.01, 10),
    st.integers(0, 99),
)
def test_dirichlet_deals_as_class_by_class(y: list[int], clients: int, alpha: float, seed: int) -> None:
    """A twin that keeps a list for each client."""
    dataset = dataset_of(y, 4)
    rows = np.flatnonzero(~dataset.test)
    rng = stream(seed, "partition dirichlet")
    hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(dataset.y[rows]):
        members = rng.permutation(rows[dataset.y[rows] == label])
        shares = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1]
        for hand, part in zip(
            hands, np.split(members, np.rint(shares * len(members)).astype(int)), strict=True
        ):
            hand.append(part)
    dealt = [rng.permutation(np.concatenate(hand)) for hand in hands]
    while any(not len(hand) for hand in dealt):
        empty = next(index for index, hand in enumerate(dealt) if not len(hand))
        giver = max(range(clients), key=lambda index: (len(dealt[index]), -index))
        dealt[empty], dealt[giver] = dealt[giver][-1:], dealt[giver][:-1]
    parts = partition(f"dirichlet({alpha})", dataset, clients=clients, seed=seed)
    assert [part.tolist() for part in parts] == [sorted(hand.tolist()) for hand in dealt]
    assert len(owners(dataset, parts, seed)) == dataset.test.sum()


@given(st.integers(1, 200), st.integers(0, 99))
def test_a_sample_of_held_out_rows_is_drawn_by_the_seed(held_out: int, seed: int) -> None:
    count = 1 + held_out // 2
    kept = sample_of(held_out, count, seed)
    assert len(set(kept.tolist())) == count <= held_out
    assert kept.tolist() == sorted(kept.tolist()) == sample_of(held_out, count, seed).tolist()
    assert kept[0] >= 0 and kept[-1] < held_out


def test_a_sample_of_more_rows_than_are_held_out_is_refused() -> None:
    with pytest.raises(DataError, match=r"evaluation\.sample = 11, but the data holds out 10 rows"):
        sample_of(10, 11, 7)
