"""Runs compose as one: laws that the epsilon of several of them obeys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.privacy.mechanism import Mechanism, compose, rounds_within

pytestmark = pytest.mark.slow

PLAIN = Mechanism(1.0, "none", 10, 100, 20, 1e-5, "pld")
SAMPLED = replace(PLAIN, sampling="poisson")
BANDED = replace(PLAIN, minimum_separation=5, bands=5)
TREE = replace(PLAIN, minimum_separation=5)
DELTA = 1e-5


@pytest.mark.parametrize("mechanism", [PLAIN, SAMPLED], ids=["none", "poisson"])
def test_two_parts_of_a_run_are_as_private_as_the_whole(mechanism: Mechanism) -> None:
    parts = compose([mechanism.releases(7), mechanism.releases(5)], DELTA)
    assert parts == pytest.approx(mechanism.spending().after(12).epsilon, rel=1e-6)


@pytest.mark.parametrize(
    "mechanism", [PLAIN, SAMPLED, BANDED, TREE], ids=["none", "poisson", "banded", "tree"]
)
def test_one_run_alone_spends_what_its_account_says(mechanism: Mechanism) -> None:
    alone = compose([mechanism.releases(12)], DELTA)
    assert alone == pytest.approx(mechanism.spending().after(12).epsilon, rel=1e-6)
    assert Mechanism.of_json(mechanism.to_json()) == mechanism


@pytest.mark.parametrize("other", [SAMPLED, BANDED, TREE], ids=["poisson", "banded", "tree"])
def test_unlike_runs_spend_less_together_than_their_sum_and_more_than_each(other: Mechanism) -> None:
    one, two = PLAIN.releases(4), other.releases(12)
    alone = compose([one], DELTA), compose([two], DELTA)
    assert max(alone) < compose([one, two], DELTA) < sum(alone)
    assert compose([two, one], DELTA) == compose([one, two], DELTA)


@pytest.mark.parametrize(
    "mechanism", [PLAIN, SAMPLED, BANDED, TREE], ids=["none", "poisson", "banded", "tree"]
)
def test_a_device_that_took_part_less_often_has_spent_less(mechanism: Mechanism) -> None:
    most = 4 if mechanism.minimum_separation else 20
    found = [compose([mechanism.releases(20, times)], DELTA) for times in range(most + 1)]
    assert found == sorted(set(found)) and found[0] == 0
    assert found[-1] <= mechanism.spending().after(20).epsilon * (1 + 1e-6)


@pytest.fixture(scope="module")
def spent() -> list[Any]:
    """Epsilon after 0 to 20 rounds of `PLAIN`."""
    return [PLAIN.spending().after(number).epsilon for number in range(21)]


@pytest.mark.parametrize("budget", [None, 0.01, 3.0, 6.5, 1e3])
def test_rounds_within_a_budget_are_counted(budget: float | None, spent: list[Any]) -> None:
    within = rounds_within(PLAIN, budget)
    assert budget is None or spent[within] <= budget
    assert within == 20 or (budget is not None and spent[within + 1] > budget)
