"""Copies of the audit log in files: JSON Lines with a line for the format, one for each entry, and the signed head last.

A copy may hold the head alone. Both prove later that the log still contains what it did.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coordinator.audit.heads import Head
from coordinator.audit.verification import Altered, verify_chain
from coordinator.errors import UserError
from edge_client.files import make_durably

FORMAT = {"format": "fedloop-audit", "version": 1}


class Copy:
    """A file with a copy of the log, or with a head alone.

    Raises:
        UserError: it cannot be read, is no such file, or its head is not signed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = _head_of(path)

    def entries(self) -> Iterator[dict[str, Any]]:
        """Its entries in the order of the file, unverified. Raises: Altered: a line is not an entry."""
        for number, line in enumerate(_lines(self.path)):
            document = _parse(line)
            if number and not _is_head(document):
                if not isinstance(document, dict):
                    raise Altered(
                        number, f"entry {number} was altered: line {number + 1} is not a JSON object"
                    )
                yield document

    def known_hashes(self) -> dict[int, str]:
        """Number -> hash of its head and of its entries, after they were verified. Raises: Altered."""
        known = {self.head.number: self.head.hash} if self.head.number else {}
        hashes = {}
        for entry in self.entries():
            hashes[entry.get("number")] = entry.get("hash")
        if hashes:
            verify_chain(self.entries(), known)
        return {**hashes, **known}  # type: ignore[dict-item]  # verified: numbers and hashes


def write(path: Path, entries: Iterable[Mapping[str, Any]], head: Head) -> int:
    """Writes a copy atomically; the number of entries. Raises: UserError: the file cannot be written."""
    count = 0

    def write_lines(temporary: Path) -> None:
        nonlocal count
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(FORMAT) + "\n")
            for entry in entries:
                file.write(json.dumps(entry) + "\n")
                count += 1
            file.write(json.dumps({"head": asdict(head)}) + "\n")

    try:
        make_durably(path, write_lines, mode=0o600)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return count


def _head_of(path: Path) -> Head:
    first = last = None
    for line in _lines(path):
        first, last = first or line, line
    if first is None or _parse(first) != FORMAT:
        raise UserError(f"{path}: not a copy of an audit log; make one with `fedloop audit export`")
    document = _parse(last or "")
    if not _is_head(document):
        raise UserError(
            f"{path}: its last line is not the signed head: the copy is incomplete or was cut off"
        )
    return Head.parse(document["head"], str(path))


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from file
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_head(document: Any) -> bool:
    return isinstance(document, dict) and set(document) == {"head"}
