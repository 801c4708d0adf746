"""Checks a task offer before the daemon acts on it: ids become file names, numbers are stored, texts are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from edge_client.transport.failures import Unreachable
from edge_client.wire.device import BlobRef, TaskOffer
from edge_client.wire.strict import printable

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**53


def check_offer(offer: TaskOffer) -> TaskOffer:
    """The offer, with its run's name made printable.

    Raises:
        Unreachable: an id, a number or the nesting is invalid.
    """
    for name in (offer.task, offer.run):
        if not _ID.fullmatch(name):
            raise Unreachable(f"the coordinator offers a task with the invalid id {name[:40]!r}")
    for ref in blobs_of(offer):
        if not (_SHA256.fullmatch(ref.sha256) and 0 <= ref.size_bytes <= _LARGEST):
            raise Unreachable(
                f"the coordinator offers an invalid blob {ref.sha256[:40]!r} of {ref.size_bytes:.3g} bytes"
            )
    if not (0 <= offer.round <= _LARGEST and offer.lease_seconds > 0):
        raise Unreachable(
            f"the coordinator offers a task of round {offer.round:.3g} with a lease of {offer.lease_seconds:g} s"
        )
    if not (_is_shallow(offer.message) and _is_shallow(offer.model.options)):
        raise Unreachable("the coordinator offers a task that is nested too deep")
    return replace(offer, run_name=printable(offer.run_name, 200))


def blobs_of(offer: TaskOffer) -> list[BlobRef]:
    """The blobs that the task needs."""
    return [ref for ref in (offer.params, offer.streams, offer.artifact, offer.manifest) if ref is not None]


def _is_shallow(value: object, levels: int = 20) -> bool:
    """Whether JSON is nested at most so deep: later code walks it by recursion."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(part, levels - 1) for part in parts)
