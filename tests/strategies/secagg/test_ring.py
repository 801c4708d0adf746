"""Fixed-point numbers in the ring, Shamir's shares, and the packer."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.codes.packing import MOST_BITS, Body, pack, packed_bytes, unpack
from strategies.secagg import shamir
from strategies.secagg.ring import FixedPoint, Ring


def test_16_bit_values_of_64_clients_take_22_bits() -> None:
    point = FixedPoint(clients=64, bound=1.0)
    assert point.ring.bits == 22
    assert packed_bytes(point.length(10**6), 22) <= 0.75 * 4 * 10**6


@given(st.integers(1, 5000), st.integers(2, 32))
def test_the_ring_is_the_smallest_that_holds_every_sum(clients: int, value_bits: int) -> None:
    point = FixedPoint(clients, 1.0, value_bits)
    extreme = clients * point.levels
    assert -(2 ** (point.ring.bits - 1)) <= -extreme and extreme <= 2 ** (point.ring.bits - 1) - 1
    assert extreme > 2 ** (point.ring.bits - 2) - 1


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 10**9), st.integers(4, 30))
def test_a_weighted_sum_is_that_of_the_rounded_values(
    seed: int, clients: int, most: int, value_bits: int
) -> None:
    rng = np.random.default_rng(seed)
    point = FixedPoint(clients, 0.5, value_bits, most)
    values = rng.uniform(-0.5, 0.5, (clients, 6))
    weights = rng.integers(0, most + 1, clients).tolist()
    total = point.ring.zeros(point.length(6))
    for value, weight in zip(values, weights, strict=True):
        total += point.encode(value, weight)
    sums, weight = point.decode_sums(point.ring.reduce(total))
    assert weight == sum(weights)
    exact = (values * np.array(weights)[:, None]).sum(axis=0)
    step = 0.5 * most / point.levels
    np.testing.assert_allclose(sums, exact, rtol=0, atol=(0.5 + 1e-6) * step * clients)


def test_the_extreme_sum_does_not_wrap_around() -> None:
    point = FixedPoint(clients=100, bound=2.0, most_weight=10**6)
    for sign in (-1, 1):
        total = point.ring.zeros(point.length(3))
        for _ in range(100):
            total += point.encode(np.full(3, sign * 2.0), 10**6)
        sums, weight = point.decode_sums(point.ring.reduce(total))
        np.testing.assert_allclose(sums / weight, sign * 2.0, rtol=1e-12)


def test_rounding_by_chance_is_unbiased() -> None:
    point = FixedPoint(clients=1, bound=1.0, value_bits=4)
    residues = point.encode(np.full(40_000, 0.55), 1, np.random.default_rng(3))
    sums, _ = point.decode_sums(residues)
    assert len(np.unique(sums)) == 2
    assert abs(sums.mean() - 0.55) < 6 * (1 / 7) / 2 / 200


@pytest.mark.parametrize("bad", [1.1, -1.1, np.nan, np.inf])
def test_a_value_beyond_the_bound_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"beyond the bound of 1\.0, or NaN"):
        FixedPoint(3, 1.0).encode(np.array([0.0, bad]), 1)


def test_a_weight_beyond_the_largest_is_refused() -> None:
    with pytest.raises(ValueError, match="weight is 11, expected 0 to 10"):
        FixedPoint(3, 1.0, most_weight=10).encode(np.zeros(2), 11)


@given(st.integers(2, 56), st.data())
def test_signed_numbers_come_back_from_the_ring(bits: int, data: st.DataObject) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    numbers = np.array([low, high, *data.draw(st.lists(st.integers(low, high)))], np.int64)
    np.testing.assert_array_equal(Ring(bits).to_signed(Ring(bits).from_signed(numbers)), numbers)


@given(st.integers(0, MOST_BITS), st.integers(0, 300), st.integers(0, 2**32))
def test_packed_numbers_come_back(bits: int, count: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 2**bits, count)
    packed = pack(numbers, bits)
    assert len(packed) == packed_bytes(count, bits)
    body = Body(packed)
    np.testing.assert_array_equal(unpack(body, count, bits, "numbers"), numbers)
    body.end()
    assert int.from_bytes(packed, "little") == sum(int(n) << (bits * at) for at, n in enumerate(numbers))


def test_numbers_longer_than_a_piece_are_packed_without_gaps() -> None:
    numbers = np.random.default_rng(0).integers(0, 2**13, 2**16 + 11)
    body = Body(pack(numbers, 13))
    np.testing.assert_array_equal(unpack(body, len(numbers), 13, "numbers"), numbers)


def test_any_needed_shares_give_the_secret_and_fewer_do_not() -> None:
    secret = b"\xff" * 32
    shares = shamir.split(secret, 3, [1, 2, 5, 9], np.random.default_rng(0).bytes)
    for places in itertools.permutations(range(4), 3):
        points = [(1, 2, 5, 9)[place] for place in places]
        assert shamir.combine([shares[place] for place in places], points) == secret
    with contextlib.suppress(shamir.BadShare):
        assert shamir.combine(shares[:2], [1, 2]) != secret


def test_the_field_has_a_prime_number_of_elements() -> None:
    below, twos = shamir.PRIME - 1, 0
    while below % 2 == 0:
        below, twos = below // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):  # Miller and Rabin
        power = pow(base, below, shamir.PRIME)
        squares = [pow(power, 2**times, shamir.PRIME) for times in range(twos)]
        assert power == 1 or shamir.PRIME - 1 in squares
