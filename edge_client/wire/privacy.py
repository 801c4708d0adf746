"""Noise that a device adds before anything of an update leaves it (wire 1.4).

local      to its whole update, which is clipped first                                      (`strategies.privacy.clients`)
example    to the sum of its rows' clipped gradients, in each step (DP-SGD, Abadi 2016)     (`edge_client.train.private_trainer`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_client.wire.device import TaskMessage
from edge_client.wire.strict import bounded, parse_message


@dataclass(frozen=True)
class RowLimit:
    """A device with so many rows or more, that takes so many steps or fewer in a round, spends no more than the run's account says."""

    rows: int = bounded(1, 1, 2**53)
    steps: int = bounded(1, 1, 2**31)


@dataclass(frozen=True)
class NoiseTask:
    """What a train task says of noise (`TaskMessage.noise`).

    Attributes:
        clip_norm: largest L2 norm of an update, or of a row's gradient.
        noise_multiplier: standard deviation of the noise over it.
        limits: of `example`: a device that is within none of them must not train, for it would spend more than the run's account says.
    """

    mechanism: Literal["local", "example"]
    clip_norm: float = bounded(1.0, 1e-30, 1e9)
    noise_multiplier: float = bounded(1.0, 1e-6, 1e9)
    limits: tuple[RowLimit, ...] = ()

    @staticmethod
    def of(message: TaskMessage) -> NoiseTask | None:
        """That of a task; None: the device adds no noise itself.

        Raises:
            InvalidDocument: it is no such object.
        """
        if message.noise is None:
            return None
        return parse_message(NoiseTask, message.noise, "task.noise")

    def covers(self, rows: int, steps: int) -> bool:
        """Whether the run's account covers a device with so many rows that takes so many steps in a round."""
        return any(each.rows <= rows and steps <= each.steps for each in self.limits)
