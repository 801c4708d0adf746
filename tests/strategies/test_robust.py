"""Robust aggregators: parity with byzfl and with naive twins, laws, and what they refuse.

byzfl 0.0.11 is a library of the field, by other authors. Its package imports torchvision, so its modules are loaded without it.
"""

from __future__ import annotations

import importlib
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies import presets
from strategies.params import LazyTensors, Tensors
from strategies.robust import RobustAggregator, RobustPreset
from strategies.update import Update
from tests.support.require import require

Matrix = npt.NDArray[np.float64]

ROBUST = sorted(name for name, algorithm in presets.ALGORITHMS.items() if issubclass(algorithm, RobustPreset))
UPDATES, MALICIOUS = 11, 2


def aggregator(name: str, **options: Any) -> RobustAggregator:
    made = presets.get(name, **{"norm_clip": 0.0, "malicious": MALICIOUS} | options).aggregator
    assert isinstance(made, RobustAggregator)
    return made


def aggregate(rows: npt.ArrayLike, name: str, **options: Any) -> Matrix:
    """The aggregate of deltas that are rows, as two tensors of different shapes."""
    values = np.asarray(rows, np.float32)
    updates = [Update({"b": row[-1:], "a": row[:-1].reshape(1, -1)}, 1, 1, 0.0) for row in values]
    delta = aggregator(name, **options).aggregate(updates)
    assert {each: value.shape for each, value in delta.items()} == {
        "b": (1,),
        "a": (1, values.shape[1] - 1),
    }
    return np.concatenate([delta["a"].ravel(), delta["b"]])


@pytest.fixture(scope="module")
def byzfl() -> Iterator[Callable[[str], Any]]:
    """Loads a module of byzfl without the package's own imports."""
    spec = find_spec_of_byzfl()
    if spec is None:
        require("byzfl", "pip install --no-deps byzfl==0.0.11")
    package = ModuleType("byzfl")
    package.__path__ = [str(spec)]
    sys.modules["byzfl"] = package
    yield lambda name: importlib.import_module(f"byzfl.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "byzfl"]:
        del sys.modules[name]


def find_spec_of_byzfl() -> Path | None:
    found = find_spec("byzfl")  # of a package at the top, which is not imported for it
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def sample(seed: int, values: int = 40) -> Matrix:
    """Updates of which the last ones are far away."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(UPDATES, values))
    rows[-MALICIOUS:] = 30 * rng.normal(size=(MALICIOUS, values))
    return rows.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mixed", [False, True])
def test_the_rules_equal_byzfl(byzfl: Callable[[str], Any], seed: int, mixed: bool) -> None:
    theirs, rows = byzfl("aggregators.aggregators"), sample(seed)
    before = byzfl("aggregators.preaggregators").NNM(MALICIOUS)(rows) if mixed else rows
    for name, rule in {
        "median": theirs.Median(),
        "trimmed_mean": theirs.TrMean(MALICIOUS),
        "krum": theirs.Krum(MALICIOUS),
        "multi_krum": theirs.MultiKrum(MALICIOUS),
    }.items():
        found = aggregate(rows, name, mix_neighbours=mixed)
        np.testing.assert_allclose(found, rule(before), rtol=0, atol=1e-14, err_msg=name)
    converged = theirs.GeometricMedian(nu=1e-6, T=500)(before)
    np.testing.assert_allclose(aggregate(rows, "rfa", mix_neighbours=mixed), converged, atol=1e-3)
    clipped = theirs.CenteredClipping(L=5, tau=3.0)(before)
    found = aggregate(rows, "centered_clipping", mix_neighbours=mixed, radius=3, iterations=5)
    np.testing.assert_allclose(found, clipped, rtol=0, atol=1e-13)


def test_krum_takes_the_update_that_flower_takes() -> None:
    rows = np.array([[0.2], [0.7], [1.0]]) * np.ones(4)
    np.testing.assert_array_equal(aggregate(rows, "krum", malicious=1), np.full(4, np.float32(0.7)))


def naive_bulyan(rows: Matrix, malicious: int) -> Matrix:
    left, chosen = [row.tolist() for row in rows], []
    while len(chosen) < len(rows) - 2 * malicious:
        scores = []
        for each in left:
            others = sorted(sum((x - y) ** 2 for x, y in zip(each, other, strict=True)) for other in left)
            nearest = others[1 : max(2, len(left) - malicious)]
            scores.append(sum(nearest) / len(nearest))
        chosen.append(left.pop(scores.index(min(scores))))
    result = []
    for column in zip(*chosen, strict=True):
        middle = float(np.median(column))
        nearest = sorted(column, key=lambda value: abs(value - middle))[: len(rows) - 4 * malicious]
        result.append(sum(nearest) / len(nearest))
    return np.array(result)


def naive_clipping(rows: Matrix, iterations: int) -> Matrix:
    centre = np.zeros(rows.shape[1])
    for _ in range(iterations):
        radius = np.median([np.linalg.norm(row - centre) for row in rows])
        moves = [(row - centre) * min(1.0, radius / np.linalg.norm(row - centre)) for row in rows]
        centre = centre + sum(moves) / len(rows)
    return centre


def naive_mixing(rows: Matrix, malicious: int) -> Matrix:
    return np.array(
        [
            np.mean(
                sorted(rows, key=lambda other: float(((other - row) ** 2).sum()))[: len(rows) - malicious],
                axis=0,
            )
            for row in rows
        ]
    )


@pytest.mark.parametrize("seed", range(10))
def test_bulyan_clipping_and_mixing_equal_a_naive_twin(seed: int) -> None:
    rows = sample(seed, 12)
    np.testing.assert_allclose(aggregate(rows, "bulyan"), naive_bulyan(rows, MALICIOUS), atol=1e-12)
    np.testing.assert_allclose(aggregate(rows, "centered_clipping"), naive_clipping(rows, 10), atol=1e-12)
    mixed = naive_mixing(rows, MALICIOUS)
    found = aggregate(rows, "median", mix_neighbours=True)
    np.testing.assert_allclose(found, np.median(mixed, axis=0), atol=1e-12)


few = settings(max_examples=40)
"""Of a law that holds for each rule."""

SMALL = hnp.arrays(np.float32, (7, 4), elements=st.floats(-8, 8, width=16))


@pytest.mark.parametrize("name", ROBUST)
@few
@given(
    rows=hnp.arrays(np.float32, (11, 4), elements=st.floats(-8, 8, width=16)),
    order=st.permutations(range(11)),
    mixed=st.booleans(),
)
def test_the_order_of_clients_does_not_matter(name: str, rows: Matrix, order: list[int], mixed: bool) -> None:
    # Of equally good updates Krum's rules take the first, as of two that are nearest to each other; means of neighbours often are.
    mixed &= "krum" not in name and name != "bulyan"
    rows = rows + np.random.default_rng(0).normal(size=rows.shape).astype(np.float32)
    found = aggregate(rows[order], name, mix_neighbours=mixed)
    np.testing.assert_allclose(found, aggregate(rows, name, mix_neighbours=mixed), atol=1e-5)


@pytest.mark.parametrize("name", ROBUST)
@few
@given(row=hnp.arrays(np.float32, 4, elements=st.floats(-8, 8, width=16)), mixed=st.booleans())
def test_equal_updates_are_their_own_aggregate(name: str, row: Matrix, mixed: bool) -> None:
    found = aggregate(np.tile(row, (7, 1)), name, malicious=1, mix_neighbours=mixed, norm_clip=2)
    np.testing.assert_allclose(found, row, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted({*ROBUST} - {"centered_clipping"}))  # whose centre starts at zero
@few
@given(rows=SMALL, shift=hnp.arrays(np.float32, 4, elements=st.integers(-8, 8)))
def test_moving_all_updates_moves_the_aggregate(name: str, rows: Matrix, shift: Matrix) -> None:
    rows = np.round(rows * 64) / 64 + np.arange(7, dtype=np.float32)[:, None] ** 2  # exact sums, no ties
    found = aggregate(rows + shift, name, malicious=1)
    np.testing.assert_allclose(found, aggregate(rows, name, malicious=1) + shift, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["median", "trimmed_mean"]
)  # Bulyan takes what is near the median, also from beyond
@few
@given(rows=SMALL, lies=hnp.arrays(np.float32, 4, elements=st.floats(-1e6, 1e6, width=32)))
def test_one_liar_cannot_move_a_coordinate_out_of_the_honest_range(
    name: str, rows: Matrix, lies: Matrix
) -> None:
    rows = rows.copy()
    rows[3] = lies
    honest, found = np.delete(rows, 3, axis=0), aggregate(rows, name, malicious=1)
    assert (honest.min(axis=0) - 1e-6 <= found).all() and (found <= honest.max(axis=0) + 1e-6).all()


@pytest.mark.parametrize(
    "name", sorted({*ROBUST} - {"centered_clipping"})
)  # whose radius a huge update moves
@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_huge_update_does_not_blur_the_distances_of_the_others(name: str, place: int, mixed: bool) -> None:
    far, further = (
        aggregate(
            np.insert(sample(4)[:-MALICIOUS], place, size, axis=0), name, malicious=1, mix_neighbours=mixed
        )
        for size in (1e5, 1e12)
    )
    np.testing.assert_allclose(further, far, atol=1e-3)


@given(rows=SMALL)
def test_long_updates_are_scaled_to_two_median_norms(rows: Matrix) -> None:
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    assume(np.median(norms) > 0.1)
    limit = 2 * np.median(norms)
    scaled = rows * np.minimum(1, limit / np.maximum(norms, 1e-9))[:, None]
    found = aggregate(rows, "trimmed_mean", malicious=0, norm_clip=2)
    np.testing.assert_allclose(found, scaled.mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("name", ROBUST)
def test_too_few_updates_are_refused(name: str) -> None:
    made = aggregator(name)
    least = 4 * MALICIOUS + 3 if name == "bulyan" else 2 * MALICIOUS + 1
    assert made.fewest_updates == least
    rows = sample(1)
    aggregate(rows[:least], name)
    with pytest.raises(ValueError, match=f"expected {least} or more"):
        aggregate(rows[: least - 1], name)


class Generated(LazyTensors):
    """A tensor that exists only while it is read."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed

    def __iter__(self) -> Iterator[str]:
        return iter(["w"])

    def __len__(self) -> int:
        return 1

    def shape(self, name: str) -> tuple[int, ...]:
        return (self._size,)

    def piece(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        return np.random.default_rng([self._seed, start]).random(stop - start, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "updates"), [(1_500_000, 40), pytest.param(10_000_000, 100, marks=pytest.mark.extended)]
)
def test_updates_on_disk_are_never_all_in_memory(size: int, updates: int) -> None:
    deltas: list[Tensors] = [Generated(size, seed) for seed in range(updates)]
    complete = 4 * size * updates
    tracemalloc.start()
    delta = aggregator("median").aggregate([Update(each, 1, 1, 0.0) for each in deltas])
    assert isinstance(delta, LazyTensors)
    values = delta["w"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < min(complete / 2, 1e9)
    rows = [each["w"][-5:] for each in deltas]
    np.testing.assert_array_equal(values[-5:], np.median(np.float64(rows), axis=0))
