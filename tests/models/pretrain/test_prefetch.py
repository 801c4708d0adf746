"""Batches read ahead are the batches; what goes wrong while they are read comes out where they are asked for."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.pretrain.data.batches import Arrays, Batch, Batches, BatchRandom, Indices, Rows, Share
from models.pretrain.data.prefetch import Loader

EXAMPLES = Arrays(np.arange(20, dtype=np.float32)[:, None], np.arange(20, dtype=np.int32))


def batches(source: Arrays = EXAMPLES) -> Batches:
    return Batches(source, 6, 3, Share())


def same(one: Batch, other: Batch) -> bool:
    return torch.equal(one.x, other.x) and torch.equal(one.y, other.y) and one.counted == other.counted


@given(depth=st.integers(0, 4), steps=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_any_step_in_any_order_gives_its_batch(depth: int, steps: list[int]) -> None:
    loader = Loader(batches(), depth)
    assert all(same(loader[step], batches()[step]) for step in steps)
    loader.close()


def test_another_share_begins_anew() -> None:
    loader, expected = Loader(batches(), 3), batches()
    assert same(loader[0], expected[0])
    loader.share = expected.share = Share((1, 2), 1)
    assert same(loader[1], expected[1])
    loader.close()


class Counted(Arrays):
    """Waits at a gate, and counts who got through it."""

    gate = threading.Semaphore(0)
    read_rows: list[int]

    def read(self, rows: Indices, random: BatchRandom | None = None) -> Rows:
        self.gate.acquire()
        self.read_rows.append(len(rows))
        return super().read(rows, random)


def test_no_more_than_depth_batches_wait() -> None:
    source = Counted(EXAMPLES.x, EXAMPLES.y)
    object.__setattr__(source, "read_rows", [])
    loader = Loader(batches(source), 2)
    for _ in range(10):
        source.gate.release()
    for step in range(3):
        loader[step]
    loader.close()  # waits for the thread, so nothing is read from here on
    assert 3 <= len(source.read_rows) <= 5


class Broken(Arrays):
    def read(self, rows: Indices, random: BatchRandom | None = None) -> Rows:
        if 7 in rows:
            raise OSError("disk gone")
        return super().read(rows, random)


@pytest.mark.parametrize("depth", [0, 3])
def test_an_error_is_raised_where_its_batch_is_requested(depth: int) -> None:
    source = Broken(EXAMPLES.x, EXAMPLES.y)
    loader = Loader(batches(source), depth)
    broken = next(step for step in range(4) if 7 in batches().rows(step))
    for step in range(broken):
        loader[step]
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            loader[broken]
    loader.close()


def test_the_thread_ends_when_closed() -> None:
    before = threading.active_count()
    loader = Loader(batches(), 2)
    loader[0]
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before


def test_waiting_is_counted_between_reports() -> None:
    loader = Loader(batches(), 0)
    loader[0]
    waited = loader.waited_seconds
    assert loader.stall_share(2 * waited) == pytest.approx(0.5)
    assert loader.stall_share(1.0) == 0


class Slow(Arrays):
    """Takes its time when told to."""

    slow = threading.Event()

    def read(self, rows: Indices, random: BatchRandom | None = None) -> Rows:
        if self.slow.is_set():
            time.sleep(0.002)
        return super().read(rows, random)


def test_thread_starts_only_when_reading_takes_long() -> None:
    source, before = Slow(EXAMPLES.x, EXAMPLES.y), threading.active_count()
    loader = Loader(batches(source), 2, worth_seconds=0.002)
    for step in range(20):
        assert same(loader[step], batches()[step])
    fast = threading.active_count()
    source.slow.set()
    for step in range(20, 40):
        assert same(loader[step], batches()[step])
    slow = threading.active_count()
    loader.close()

    assert (fast, slow) == (before, before + 1)
