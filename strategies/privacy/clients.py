"""Differential privacy by noise that clients add themselves, so that nobody has to be trusted with an update.

    local         each client clips its update and adds all the noise that hides it (`add_noise`)
    distributed   each client adds a share of the noise, inside secure aggregation (`noise.distributed`)
    example       each client adds noise to the gradients of its rows (`edge_client.train.private_trainer`)

The server adds nothing: what it does with noised updates costs no more privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from strategies.params import materialize, shape_of
from strategies.privacy.central import ROUNDING
from strategies.privacy.noise.discrete import GRID_BITS, add_gaussian
from strategies.privacy.noise.secure import Source
from strategies.strategy import ClipNorm
from strategies.update import Update


@dataclass(frozen=True)
class ClientNoise:
    """The mechanism of a run.

    Attributes:
        clip_norm: largest L2 norm of an update before its noise, or of a row's gradient.
        noise_multiplier: standard deviation over the clipping norm, of what the coordinator sees: an update, or the sum of a group; or of the
            summed gradients of rows.
        cohort: clients in a round.
        values: of an update.
        rows: numbers of rows of the clients one of which spends most, where single rows are hidden.
    """

    clip_norm: float
    noise_multiplier: float
    cohort: int
    values: int
    rows: tuple[int, ...] = ()

    @property
    def sum_multiplier(self) -> float:
        """The noise multiplier: none of it pays for anything else."""
        return self.noise_multiplier


def add_noise(update: Update, clip_norm: float, noise_multiplier: float, source: Source) -> Update:
    """The update as a client sends it: clipped, with Gaussian noise on each value, and without what noise does not hide.

    Its numbers of examples and steps are 1, and its training loss is NaN. Of an update that is not finite nothing is left but the noise:
    that a client diverged is not visible either.
    """
    if not math.isfinite(update.norm):
        update = replace(
            update, delta={name: np.zeros(shape_of(update.delta, name), np.float32) for name in update.delta}
        )
    clipped, _ = ClipNorm(clip_norm).apply(update, {})
    tensors = sorted(materialize(clipped.delta).items())
    # Rounding to the grid may lengthen an update of d values by √d half steps.
    longer = 1 + noise_multiplier * math.sqrt(sum(value.size for _, value in tensors)) * 2.0**-GRID_BITS
    deviation = noise_multiplier * clip_norm * longer * ROUNDING
    delta = {
        name: add_gaussian(value.astype(np.float64), deviation, source).astype(np.float32)
        for name, value in tensors
    }
    return replace(update, delta=delta, num_examples=1, num_steps=1, train_loss=math.nan, extras={})
