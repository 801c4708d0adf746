"""FedYogi: Yogi on the server. Reddi 2021, Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.algorithms.fedadam import FedAdam
from strategies.strategy import AdaptiveKind


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAdam with Yogi's second moment."""

    kind: ClassVar[AdaptiveKind] = "yogi"
