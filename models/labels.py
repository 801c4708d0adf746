"""The meaning of labels, for loading, training and scoring."""

from __future__ import annotations

from typing import Any

PADDING = -1
"""A class that is ignored, in any task. The device's own copy is `edge_client.data.examples.PADDING`."""

QUANTITY_PADDING = -1e30
"""As `PADDING`, of labels that are quantities."""

MIN_QUANTITY = QUANTITY_PADDING / 2
"""Labels that are quantities are ignored below it."""


def are_quantities(y: Any) -> bool:
    """Whether the labels in an array or a tensor are quantities rather than classes."""
    return bool(getattr(y.dtype, "is_floating_point", getattr(y.dtype, "kind", "") == "f"))


def counting(y: Any) -> Any:
    """Which labels count: bools of the shape of `y`, an array or a tensor."""
    return y > MIN_QUANTITY if are_quantities(y) else y != PADDING


def filling(y: Any) -> float:
    """The label that does not count among labels such as `y`."""
    return QUANTITY_PADDING if are_quantities(y) else PADDING
