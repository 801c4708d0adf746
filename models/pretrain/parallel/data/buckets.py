"""Sizes of the buckets in which gradients are exchanged. No torch here: planners read it."""

from __future__ import annotations

BUCKET_BYTES = 25 * 1024 * 1024
SMALLEST_BUCKET_BYTES = 1024 * 1024
BUCKETS = 8
"""A model that is smaller than so many buckets has smaller ones, so that there is something to overlap."""


def limit(total_bytes: float) -> float:
    """The size from which a bucket is full, for gradients of so many bytes in all."""
    return min(BUCKET_BYTES, max(SMALLEST_BUCKET_BYTES, total_bytes // BUCKETS))
