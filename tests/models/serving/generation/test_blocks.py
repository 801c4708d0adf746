"""Laws of the pool of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from models.serving.generation.blocks import SCRATCH, BlockPool, _window_maxima, digests_of


def test_a_digest_names_a_block_and_all_before_it() -> None:
    one = digests_of([1, 2, 3, 4, 5, 6, 7], 2)
    other = digests_of([9, 2, 3, 4, 5, 6, 7], 2)

    assert len(one) == 3
    assert digests_of([1, 2, 3, 4, 8], 2) == one[:2]
    assert not set(one) & set(other)
    assert digests_of([1, 2, 3, 4, 5, 6], 2, one[:1]) == one
    assert not set(one) & set(digests_of([1, 2, 3, 4, 5, 6], 2, salt="another"))


def test_the_least_recently_used_block_is_forgotten_first() -> None:
    pool = BlockPool(3)
    digests = digests_of([1, 2, 3], 1)
    blocks = [pool.allocate(place) for place in (1, 2, 3)]
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    for block in (blocks[2], blocks[0], blocks[1]):
        pool.release(block)

    assert pool.free == 3 and pool.find(digests) == blocks
    assert pool.allocate(99) == blocks[2]
    assert pool.find(digests) == blocks[:2]
    pool.share(blocks[0])
    assert pool.allocate(99) == blocks[1]
    with pytest.raises(IndexError):
        pool.allocate(99)


def test_places_of_sequences_do_not_overlap_while_there_is_room() -> None:
    pool = BlockPool(12)
    places = [pool.place(4) for _ in range(3)]

    assert len({block for place in places for block in place}) == 12
    pool.leave(places[1])
    assert pool.place(4) == places[1]
    assert len(pool.place(4)) == 4  # over another's


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 30))
def test_a_place_is_where_the_most_expensive_block_is_cheapest(values: list[int], width: int) -> None:
    width = min(width, len(values))

    maxima = _window_maxima(np.array(values), width)

    assert maxima.tolist() == [max(values[at : at + width]) for at in range(len(values) - width + 1)]


class Use(RuleBasedStateMachine):
    """Any order of uses keeps count of every block."""

    @initialize(count=st.integers(1, 12))
    def start(self, count: int) -> None:
        self.pool, self.count = BlockPool(count), count
        self.used: list[int] = []
        self.content: dict[int, bytes] = {}
        self.made = 0

    @precondition(lambda self: self.pool.free)
    @rule(wanted=st.integers(0, 14))
    def allocate(self, wanted: int) -> None:
        block = self.pool.allocate(wanted)
        assert block not in self.used and block != SCRATCH
        self.content.pop(block, None)
        self.used.append(block)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.used))
        if block not in self.content:
            self.made += 1
            self.content[block] = self.made.to_bytes(4, "big")
            self.pool.publish(block, self.content[block])

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.used))
        self.used.remove(block)
        self.pool.release(block)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.content)))
        self.used.append(block)
        self.pool.share(block)

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()
        self.content.clear()

    @invariant()
    def counts(self) -> None:
        assert self.pool.free == self.count - len(set(self.used))
        for block, digest in self.content.items():
            assert self.pool.find([digest]) == [block]


TestUse = Use.TestCase
