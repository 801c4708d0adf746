"""Bytes on the wire are those of the formula; the paper's cost model gives the paper's figures."""

from __future__ import annotations

import pytest

from strategies.secagg.ring import FixedPoint
from strategies.secagg.traffic import client_traffic, expansion_of_bonawitz
from tests.strategies.secagg.rounds import Round, terms_of


@pytest.mark.parametrize(("clients", "values", "expected"), [(2**10, 2**20, 1.7343), (2**14, 2**24, 1.9844)])
def test_the_expansion_of_the_paper(clients: int, values: int, expected: float) -> None:
    assert round(expansion_of_bonawitz(clients, values), 4) == expected


@pytest.mark.parametrize(
    ("clients", "degree", "length", "bits"), [(3, 2, 5, 22), (16, 15, 1000, 22), (60, 10, 3000, 17)]
)
def test_measured_bytes_are_those_of_the_formula(clients: int, degree: int, length: int, bits: int) -> None:
    played = Round(terms_of(clients, degree=degree, length=length, ring_bits=bits))
    played.play()
    each = client_traffic(played.terms, name_bytes=len(played.members[0]), signature_bytes=64)
    assert played.sent["up"] == pytest.approx(clients * each.up, rel=0.02)
    assert played.sent["down"] == pytest.approx(clients * each.down, rel=0.02)


def test_masked_input_of_64_clients_is_at_most_three_quarters_of_float32() -> None:
    point = FixedPoint(clients=64, bound=1.0)
    terms = terms_of(64, length=point.length(10**6), ring_bits=point.ring.bits)
    assert client_traffic(terms, name_bytes=36, signature_bytes=72).masked <= 0.75 * 4 * 10**6
