"""Devices and runs by reference: by id, the beginning of an id, or a unique name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.errors import UserError
from coordinator.operator.client import OperatorClient
from edge_client.wire.strict import printable

_MAX_LISTED = 5


def device_id(client: OperatorClient, reference: str) -> str:
    """The id of the device that `reference` means.

    Raises:
        UserError: it matches no device, or several.
    """
    matches = client.get("/devices", called=reference, limit=100)["devices"]
    match = _unique(reference, matches, "devices")
    if match is None:
        raise UserError(f"no device matches {reference!r}; see them all: fedloop device list")
    return match


def run_id(client: OperatorClient, reference: str) -> str:
    """The id of the run that `reference` means.

    Raises:
        UserError: it matches no run, or several.
    """
    match = _unique(reference, client.get("/runs", called=reference, limit=100), "runs")
    if match is None:
        newest = client.get("/runs", limit=_MAX_LISTED)
        hint = f"the newest: {_list(newest)}" if newest else "there are no runs"
        raise UserError(f"no run matches {reference!r}; {hint}")
    return match


def _unique(reference: str, matches: Sequence[dict[str, Any]], kind: str) -> str | None:
    """The id of the only match. A full id wins over a name, a name over the beginning of an id."""
    for candidates in (
        [each for each in matches if each["id"] == reference.lower()],
        [each for each in matches if each["name"] == reference],
        matches,
    ):
        if len(candidates) == 1:
            return str(candidates[0]["id"])
        if candidates:
            raise UserError(
                f"{reference!r} matches {len(candidates)} {kind}: {_list(candidates)}; give more of the id"
            )
    return None


def _list(items: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{printable(each['name'])} ({each['id'][:8]}…)" for each in items[:_MAX_LISTED])
