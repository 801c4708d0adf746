"""Verification of a copy of the audit log: names the first entry that was altered, deleted, inserted or moved.

The chain alone shows what is inconsistent with itself. Someone who can write to the database can also recompute every later
hash, or delete the newest entries. That shows only by a hash that was noted before: of a signed head, or of an earlier copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.audit.entries import COLUMNS, GENESIS, hash_of


class Altered(Exception):
    """The log is not what was written. `number`: of the first entry for which this shows."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def verify_chain(entries: Iterable[Mapping[str, Any]], known: Mapping[int, str] | None = None) -> int:
    """The number of entries, all of them unaltered and in their places. Holds one entry in memory.

    `known`: entry number -> hash noted earlier, from signed heads or an earlier copy.

    Raises:
        Altered: naming the first entry that is altered, missing or out of place.
    """
    known = known or {}
    number, previous = 0, GENESIS
    for entry in entries:
        number += 1
        _check_place(entry.get("number"), number)
        _check_content(entry, number)
        if entry["previous"] != previous:
            raise Altered(
                max(1, number - 1),
                f"entry {number} continues from an entry with the hash {_brief(entry['previous'])}, but the one before it has "
                f"{_brief(previous)}: entry {max(1, number - 1)} was altered or replaced",
            )
        previous = entry["hash"]
        if known.get(number, previous) != previous:
            raise Altered(
                number,
                f"entry {number} has the hash {_brief(previous)}, an earlier copy or head says {_brief(known[number])}: it, or one "
                "before it, was altered and all hashes since were recomputed",
            )
    missing = [each for each in known if each > number]
    if missing:
        raise Altered(
            number + 1,
            f"entries {number + 1} to {max(missing)} are missing: deleted from the end of the log",
        )
    return number


def _check_place(found: Any, expected: int) -> None:
    if found == expected and isinstance(found, int):
        return
    if isinstance(found, int) and found > expected:
        reason = f"entry {expected} is missing: entry {found} is in its place; it was deleted or moved"
    elif isinstance(found, int):
        reason = f"entry {found} stands in place of entry {expected}: it was inserted, repeated or moved"
    else:
        reason = f"entry {expected} was altered: its number is {found!r:.80}"
    raise Altered(expected, reason)


def _check_content(entry: Mapping[str, Any], number: int) -> None:
    unknown = sorted(map(str, entry.keys() ^ set(COLUMNS)))
    if unknown:
        raise Altered(number, f"entry {number} was altered: it has other keys than an entry: {unknown[:3]}")
    try:
        expected = hash_of(entry)
    except (TypeError, ValueError):
        expected = ""
    if entry["hash"] != expected:
        raise Altered(
            number,
            f"entry {number} was altered: its content has the hash {_brief(expected)}, recorded is {_brief(entry['hash'])}",
        )


def _brief(digest: Any) -> str:
    return f"{str(digest)[:12]}…"
