"""The sum is exact whoever drops out, and below the threshold there is none."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.secagg.errors import BelowThreshold, ProtocolError
from strategies.secagg.graph import log_degree, split_into_groups
from strategies.secagg.terms import Terms
from tests.strategies.secagg.rounds import STAGES, Round, terms_of


@pytest.mark.parametrize("clients", [3, 4, 10])
@pytest.mark.parametrize("stage", STAGES)
def test_as_many_drop_out_as_the_threshold_allows_and_the_sum_is_exact(clients: int, stage: str) -> None:
    terms = terms_of(clients)
    played = Round(terms)
    played.play({stage: played.members[: clients - max(3 if stage == "keys" else 0, terms.needed(clients))]})
    sends_input = STAGES.index(stage) > STAGES.index("input")
    assert len(played.server.included) == (
        clients if sends_input else max(3 if stage == "keys" else 0, terms.needed(clients))
    )
    np.testing.assert_array_equal(played.server.sum(), played.sum_of(played.server.included))


@pytest.mark.parametrize("stage", STAGES)
def test_one_client_fewer_than_the_threshold_ends_the_round(stage: str) -> None:
    terms = terms_of(9)
    played = Round(terms)
    with pytest.raises(BelowThreshold, match=r"^5 of 9 clients have .* 6 needed$"):
        played.play({stage: played.members[:4]})
    with pytest.raises(ProtocolError, match="still masked"):
        played.server.sum()


@pytest.mark.parametrize(("clients", "degree"), [(64, 12), pytest.param(1000, 4, marks=pytest.mark.slow)])
def test_large_groups_sum_exactly_over_a_sparse_graph(clients: int, degree: int) -> None:
    played = Round(terms_of(clients, degree=degree, length=50))
    few = np.random.default_rng(1).choice(clients, 4, replace=False)
    played.play(
        {
            stage: [played.members[number]]
            for stage, number in zip(("keys", "shares", "input", "reveal"), few, strict=True)
        }
    )
    assert len(played.server.included) == clients - 3
    np.testing.assert_array_equal(played.server.sum(), played.sum_of(played.server.included))


def test_groups_of_a_cohort_have_sums_that_add_up() -> None:
    sizes = split_into_groups(50, 16)
    assert sizes == [17, 17, 16]
    terms = [terms_of(size, group=number) for number, size in enumerate(sizes)]
    rounds = [Round(each, seed=number) for number, each in enumerate(terms)]
    total = terms[0].ring.zeros(20)
    expected = terms[0].ring.zeros(20)
    for played in rounds:
        played.play({"input": played.members[:2]})
        total += played.server.sum()
        expected += played.sum_of(played.members[2:])
    np.testing.assert_array_equal(terms[0].ring.reduce(total), terms[0].ring.reduce(expected))


@given(st.data())
def test_any_graph_and_any_dropouts_give_the_exact_sum_or_none(data: st.DataObject) -> None:
    clients = data.draw(st.integers(3, 14))
    terms = terms_of(
        clients,
        degree=data.draw(st.integers(2, clients)),
        ring_bits=data.draw(st.integers(2, 56)),
        length=data.draw(st.integers(1, 30)),
        threshold=data.draw(st.sampled_from([2 / 3, 0.67, 0.8, 1.0])),
    )
    played = Round(terms, seed=data.draw(st.integers(0, 5)))
    gone = data.draw(st.dictionaries(st.sampled_from(played.members), st.sampled_from(STAGES)))
    dropouts = {stage: [member for member, at in gone.items() if at == stage] for stage in STAGES}
    try:
        played.play(dropouts)
    except BelowThreshold:
        assert _is_below(terms, played, dropouts)
        with pytest.raises(ProtocolError):
            played.server.sum()
        return
    assert len(played.server.included) >= terms.needed(clients)
    np.testing.assert_array_equal(played.server.sum(), played.sum_of(played.server.included))


def _is_below(terms: Terms, played: Round, dropouts: dict[str, Collection[str]]) -> bool:
    """Whether the dropouts leave too few of all clients, or of some neighbourhood, judged without the protocol's code."""
    left, names = set(played.members), []
    for stage in STAGES:
        left -= set(dropouts[stage])
        if len(left) < max(3 if stage == "keys" else 0, terms.needed(terms.clients)):
            return True
        if stage == "keys":
            names = sorted(left)
            continue
        hoods = [{client, *others} for client, others in enumerate(played.server._neighbours)]
        there = {names.index(member) for member in left}
        holders = range(len(names)) if stage == "reveal" else there
        if any(len(there & hoods[client]) < terms.needed(len(hoods[client])) for client in holders):
            return True
    return False


@pytest.mark.parametrize("bits", [2, 16, 17, 32, 33, 53, 56])
def test_sums_are_exact_in_rings_of_any_width(bits: int) -> None:
    played = Round(terms_of(3, ring_bits=bits))
    played.play()
    np.testing.assert_array_equal(played.server.sum(), played.sum_of(played.members))


def test_a_vector_is_left_as_it_was() -> None:
    played = Round(terms_of(3))
    before = {member: vector.copy() for member, vector in played.vectors.items()}
    played.play()
    for member, vector in played.vectors.items():
        np.testing.assert_array_equal(vector, before[member])


def test_the_degree_grows_with_the_logarithm_of_the_group() -> None:
    degrees = {clients: log_degree(clients) for clients in (3, 16, 64, 1000, 4000)}
    assert degrees[3] == 2
    assert degrees[1000] < 100
    assert degrees[4000] < 1.4 * degrees[1000]
    assert log_degree(64, colluding=0.3) > degrees[64]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threshold": 0.5}, "threshold is 0.5, expected 2/3 to 1"),
        ({"clients": 2}, "2 clients, expected 3 to 4096"),
        ({"ring_bits": 57}, "ring of 57 bits"),
        ({"degree": 1}, "degree of 1"),
        ({"length": 0}, "0 residues"),
    ],
)
def test_unsafe_terms_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        terms_of(**{"clients": 9, **change})  # type: ignore[arg-type]
