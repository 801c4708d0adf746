"""AdamW on clients, in place of SGD: how it is set, and the state that its steps renew.

With the corrected gradient g of `strategies.client_rules`, clipped where the task says so, step t of a client is

    m ← beta1 · m + (1 − beta1) · g
    v ← beta2 · v + (1 − beta2) · g²
    w ← w − lr · weight_decay · w − lr · m̂ / (√v̂ + eps),  m̂ = m / (1 − beta1ᵗ), v̂ = v / (1 − beta2ᵗ)

which is `torch.optim.AdamW` (Loshchilov 2019, Algorithm 2). The state m, v and t begins at 0 in every round, as for a client that
may never come back, or the client keeps it for its next round, as the workers of DiLoCo do (Douillard 2023, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from strategies.params import Params
    from strategies.update import Streams

FIRST, SECOND, STEPS = "adamw_first", "adamw_second", "adamw_steps"
"""Streams of a client's state: m and v by tensor, and t as `count` [1]."""


class UnknownOptimizer(ValueError):
    """A task names an unknown local optimizer or an invalid option of one, or the client's runtime cannot take its steps."""


@dataclass(frozen=True)
class AdamW:
    """`keep`: whether a client keeps m, v and t for its next round."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    keep: bool = False

    def to_options(self) -> dict[str, Any]:
        """As JSON, for a task message."""
        return {"name": "adamw", **asdict(self)}

    def begin(self, client_state: Streams) -> AdamWState:
        """The state before the first step of a round. `client_state`: what the client has kept."""
        if not self.keep or STEPS not in client_state:
            return AdamWState(self, 0, {}, {})
        steps = int(client_state[STEPS]["count"][0])
        return AdamWState(self, steps, dict(client_state[FIRST]), dict(client_state[SECOND]))


@dataclass
class AdamWState:
    """The state of a client's AdamW, which a runtime renews as it takes steps.

    Attributes:
        steps: t, of all rounds for which it was kept.
        first, second: m and v of each tensor that the steps move; empty before the first step.
    """

    options: AdamW
    steps: int
    first: Params
    second: Params

    def to_streams(self) -> dict[str, Params]:
        """What the client keeps for its next round."""
        if not self.options.keep:
            return {}
        return {
            FIRST: self.first,
            SECOND: self.second,
            STEPS: {"count": np.array([self.steps], np.float32)},
        }


def from_options(document: Mapping[str, Any]) -> AdamW:
    """The optimizer that a task message names.

    Raises:
        UnknownOptimizer: it is unknown, or an option is; the device's software may be older than the coordinator's.
    """
    options = dict(document)
    if (name := options.pop("name", None)) != "adamw":
        raise UnknownOptimizer(f"local optimizer {name!r:.60} is unknown here; known: adamw")
    known = {each.name: each.default for each in fields(AdamW)}
    if unknown := sorted(set(options) - set(known)):
        raise UnknownOptimizer(
            f"adamw comes with {unknown[0]!r:.60}, which is unknown here; known: {', '.join(known)}"
        )
    for key, value in options.items():
        if not _fits(key, value):
            raise UnknownOptimizer(f"adamw comes with {key} = {value!r:.40}, which is out of range")
    return replace(AdamW(), **options)


def _fits(key: str, value: object) -> bool:
    if key == "keep":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        return False
    return value < 1 if key.startswith("beta") else value > 0 or key != "eps"
