"""What a client remembers: how often it has trained, and its last weights."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict


def remember(state: RecordDict, w: np.ndarray) -> int:
    """How often this client has trained before."""
    before = int(state["counts"]["trained"]) if "counts" in state else 0
    if before:
        assert not np.array_equal(state["last"]["w"].numpy(), w), "these are the weights of another round"
    state["counts"] = ConfigRecord({"trained": before + 1, "tag": b"\x00\xff"})
    state["last"] = ArrayRecord({"w": Array(w)})
    return before
