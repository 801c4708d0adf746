"""The last transform of a client's chain: its update as a code writes it, and with error feedback what is left for the next one.

    p = Δ + e,  sent = decode(encode(p)),  e ← p - sent

e stays on the client, as stream `residual` of its state, and changes only when the coordinator has accepted the update. So what a client has
sent over all its rounds, and what it still keeps, add up to all that it has learnt. Stich 2018; Karimireddy 2019, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from strategies.codes.code import Code, decode, encode
from strategies.codes.vectors import Shapes
from strategies.params import NotFinite, Params, Tensors, difference, materialize, require_finite
from strategies.update import Streams, Update

PURPOSE = 0x636F6465
"""Separates the random numbers of the code from those of the local steps, which have the same seed."""


@dataclass(frozen=True)
class Compression:
    """Replaces the delta by what the coordinator will decode, and adds the bytes. `seed`: of the client's task."""

    code: Code
    seed: int

    def apply(self, update: Update, state: Streams) -> tuple[Update, dict[str, Params]]:
        delta = materialize(update.delta)
        kept = state.get("residual") if self.code.error_feedback else None
        if kept:
            delta = {name: np.asarray(value + kept[name], np.float32) for name, value in delta.items()}
        shapes = {name: value.shape for name, value in delta.items()}
        encoded = encode(self.code, delta, np.random.default_rng([self.seed, PURPOSE]))
        try:
            sent = decode(self.code, encoded, shapes)
        except NotFinite:
            return self._give_up(update, delta, shapes), {}
        residual = {"residual": difference(delta, sent)} if self.code.error_feedback else {}
        return replace(update, delta=sent, encoded=encoded), residual

    def _give_up(self, update: Update, delta: Params, shapes: Shapes) -> Update:
        """The update of a diverged client, or one whose numbers are too large for the code; it will be rejected."""
        nothing = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
        encoded = encode(self.code, nothing, np.random.default_rng(self.seed))
        return replace(update, delta=nothing if _is_finite(delta) else delta, encoded=encoded)


def _is_finite(delta: Tensors) -> bool:
    try:
        require_finite(delta, delta)
    except NotFinite:
        return False
    return True
