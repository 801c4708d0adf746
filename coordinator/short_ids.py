"""Ids of runs, devices, tokens and rollouts as people read and type them: the beginning, which every command takes."""

from __future__ import annotations

from collections.abc import Sequence

_CHARACTERS = 8


def short_id(full: str) -> str:
    """The beginning of an id."""
    return full[:_CHARACTERS]


def distinct_ids(full: Sequence[str]) -> list[str]:
    """Beginnings of different ids, all of one length, that differ; at least as long as `short_id`."""
    longest = max(map(len, full), default=0)
    length = _CHARACTERS
    while length < longest and len({each[:length] for each in full}) < len(set(full)):
        length += 1
    return [each[:length] for each in full]
