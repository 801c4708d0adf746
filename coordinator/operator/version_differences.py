"""The differences between two versions, as the API shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.json_values import flatten


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every value that differs, as `what`, `before`, `after`; None where a version lacks it.

    Compares files by hash, and shows the beginning of the hash and the size.
    """
    first, second = _values(before), _values(after)
    return [
        {"what": what, "before": first.get(what), "after": second.get(what)}
        for what in dict.fromkeys((*first, *second))
        if first.get(what) != second.get(what)
    ]


def _values(version: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"stage": version["stage"], "kind": version["kind"]}
    values |= flatten(version["about"])
    for stage, figures in version["metrics"].items():
        values |= {f"{stage}.{key}": value for key, value in figures.items()}
    for file in version["files"]:
        values[file["path"]] = f"{file['sha256'][:12]} {file['size_bytes']:,} bytes"
    return values
