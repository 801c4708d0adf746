"""Compares a step with the ordinary one before it is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coordinator.workers.kernels.native import CannotCompile

_TOLERANCE = 1e-3


def require_same(
    ordinary: tuple[float, Sequence[torch.Tensor]], other: tuple[float, Sequence[torch.Tensor]]
) -> None:
    """Compares loss and gradients of one batch.

    Raises:
        CannotCompile: they differ, as those of a model with dropout do.
    """
    (loss, gradients), (other_loss, other_gradients) = ordinary, other
    losses = torch.tensor(loss), torch.tensor(other_loss)
    for expected, found in [losses, *zip(gradients, other_gradients, strict=True)]:
        scale = float(expected.abs().max()) + _TOLERANCE
        if not float((expected - found).abs().max()) <= _TOLERANCE * scale:
            raise CannotCompile(
                "the compiled step gives other gradients, as that of a model with dropout would"
            )
