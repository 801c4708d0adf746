"""Updates that are measured and summed as a stack give the bits of updates that are taken one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.params import PIECE, Params, l2_norm
from strategies.strategy import BLOCK, Weighting
from strategies.summation import StackedUpdates, Summation, clamp, measure_norms
from strategies.summation_tree import PartialSum, SummationTree, plus
from strategies.update import Update


def draw(shapes: dict[str, tuple[int, ...]], updates: int, seed: int) -> Params:
    rng = np.random.default_rng(seed)
    # Of very different sizes, so that another order of addition gives other bits.
    return {
        name: (
            rng.standard_normal((updates, *shape)) * 10.0 ** rng.integers(-9, 9, (updates, *shape))
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def split(deltas: Params, examples: list[int], losses: list[float]) -> list[Update]:
    return [
        Update({name: np.asarray(deltas[name][at]) for name in sorted(deltas)}, count, 3, loss)
        for at, (count, loss) in enumerate(zip(examples, losses, strict=True))
    ]


def bits(total: PartialSum | None) -> object:
    assert total is not None
    tensors = {name: (value.shape, value.tobytes()) for name, value in total.delta.items()}
    return tensors, total.weight, total.num_updates, total.num_examples, total.loss_sum


SHAPES = st.dictionaries(
    st.sampled_from(["w", "b", "a"]), st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1
)


@settings(deadline=None)
@given(
    shapes=SHAPES,
    given_counts=st.dictionaries(st.integers(0, BLOCK - 1), st.integers(1, 2**53 // 16), min_size=1),
    block=st.integers(0, 2),
    seed=st.integers(0, 2**32),
    weighting=st.sampled_from(["examples", "uniform"]),
    clip_norm=st.sampled_from([0.0, 1e-3, 1e6, 1e12]),
    weight_limit=st.sampled_from([None, 1, 1000]),
    factor=st.sampled_from([1.0, 1e7]),
)
def test_a_stack_has_the_sum_of_its_updates_added_one_by_one(
    shapes: dict[str, tuple[int, ...]], given_counts: dict[int, int], block: int, seed: int, weighting: Weighting,
    clip_norm: float, weight_limit: int | None, factor: float,
) -> None:  # fmt: skip
    positions = [block * BLOCK + position for position in sorted(given_counts)]
    counts = [given_counts[position] for position in sorted(given_counts)]
    deltas, chosen = draw(shapes, len(counts), seed), Summation(weighting, clip_norm)
    losses = (np.random.default_rng(seed).standard_normal(len(counts)) * factor).tolist()
    updates = [clamp(each, weight_limit) for each in split(deltas, counts, losses)]
    stack = StackedUpdates(deltas, counts, losses, measure_norms(deltas, len(counts)))
    ((_, total),) = chosen.sum_stack(positions, stack, weight_limit, (block * BLOCK, (block + 1) * BLOCK))
    assert bits(total) == bits(add_each(chosen, positions, updates))


@settings(deadline=None)
@given(
    taken=st.sets(st.integers(0, 90), min_size=1),
    start=st.integers(0, 5),
    blocks=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_a_stack_of_many_blocks_has_the_largest_nodes_of_the_tree(
    taken: set[int], start: int, blocks: int, seed: int
) -> None:
    within = (start * BLOCK, (start + blocks) * BLOCK)
    positions = sorted(each for each in taken if within[0] <= each < within[1]) or [within[0]]
    counts = [1 + position % 7 for position in positions]
    deltas, chosen = draw({"w": (3,)}, len(counts), seed), Summation("examples")
    losses = np.random.default_rng(seed).standard_normal(len(counts)).tolist()
    stack = StackedUpdates(deltas, counts, losses, measure_norms(deltas, len(counts)))
    tree = SummationTree(plus, within[0])
    for position, update in zip(positions, split(deltas, counts, losses), strict=True):
        tree.add(position, chosen.weigh(update))
    expected = tree.nodes(within[1])
    found = chosen.sum_stack(positions, stack, None, within)
    assert [bits(total) for _, total in found] == [bits(total) for _, total in expected]
    assert [at for at, _ in found] == [at for at, _ in expected]


def add_each(how: Summation, positions: list[int], updates: list[Update]) -> PartialSum | None:
    tree = SummationTree(plus)
    for position, update in zip(positions, updates, strict=True):
        tree.add(position, how.weigh(update))
    return tree.total()


@settings(deadline=None)
@given(shapes=SHAPES, updates=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_norms_of_a_stack_are_those_of_each_update(
    shapes: dict[str, tuple[int, ...]], updates: int, seed: int
) -> None:
    deltas = draw(shapes, updates, seed)
    each = [l2_norm(update.delta) for update in split(deltas, [1] * updates, [0.0] * updates)]
    assert measure_norms(deltas, updates).tolist() == each


@pytest.mark.parametrize("size", [PIECE // 2 - 1, PIECE, PIECE + 1, 2 * PIECE + 77])
def test_tensors_of_several_pieces_have_the_same_norms_and_sums(size: int) -> None:
    deltas, counts, losses = draw({"w": (size,), "b": (3,)}, 3, size), [3, 5, 7], [0.5, 0.25, 0.125]
    updates, chosen = split(deltas, counts, losses), Summation("examples")
    norms = measure_norms(deltas, 3)
    assert norms.tolist() == [l2_norm(each.delta) for each in updates]
    stack = StackedUpdates(deltas, counts, losses, norms)
    ((_, total),) = chosen.sum_stack([0, 1, 2], stack, None, (0, BLOCK))
    assert bits(total) == bits(add_each(chosen, [0, 1, 2], updates))


def test_the_norm_of_a_delta_with_a_value_that_is_not_finite_is_not_finite() -> None:
    deltas = {"w": np.array([[3e38] * 4, [1, np.nan, 1, 1], [np.inf, -np.inf, 0, 0]], np.float32)}
    with np.errstate(all="raise", under="ignore"):
        finite, *others = measure_norms(deltas, 3).tolist()
    assert math.isfinite(finite)
    assert not any(map(math.isfinite, others))
