"""In what two versions differ, from what the API answers of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every value that is not the same, as `what`, `before`, `after`; None where one has it not.

    Files are compared by their hashes, which are shown short with the size.
    """
    first, second = _values(before), _values(after)
    return [
        {"what": what, "before": first.get(what), "after": second.get(what)}
        for what in dict.fromkeys((*first, *second))
        if first.get(what) != second.get(what)
    ]


def _values(version: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"stage": version["stage"], "kind": version["kind"]}
    found |= _flat("", version["about"])
    for stage, figures in version["metrics"].items():
        found |= {f"{stage}.{key}": value for key, value in figures.items()}
    for file in version["files"]:
        found[file["path"]] = f"{file['sha256'][:12]} {file['size_bytes']:,} bytes"
    return found


def _flat(prefix: str, value: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            found |= _flat(f"{prefix}{key}.", item)
        else:
            found[prefix + key] = item
    return found
