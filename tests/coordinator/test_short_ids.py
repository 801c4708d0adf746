"""Ids as people read and type them."""

from __future__ import annotations

from coordinator.short_ids import distinct_ids, short_id


def test_a_short_id_is_the_beginning_of_the_id() -> None:
    assert short_id("3f2a9c10-aaaa-bbbb") == "3f2a9c10"
    assert short_id("pump") == "pump"


def test_ids_with_the_same_beginning_are_shown_as_far_as_they_differ() -> None:
    assert distinct_ids(["3f2a9c10-aaaa", "77777777-bbbb"]) == ["3f2a9c10", "77777777"]
    assert distinct_ids(["3f2a9c10-aab", "3f2a9c10-aac"]) == ["3f2a9c10-aab", "3f2a9c10-aac"]
    assert distinct_ids(["same", "same"]) == ["same", "same"]
    assert distinct_ids([]) == []
