"""What an attack on updates has found, in figures and in rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.privacy.audit import similarity
from coordinator.privacy.audit.defences import View

SINGLE = "one row"
LOCAL = "its local work"
RECOVERED, PARTLY = 0.5, 0.25
"""Shares of the way from a guess to the row, from which the verdict says so."""


@dataclass(frozen=True)
class Pair:
    """A row and its reconstruction, in the shape of a row."""

    row: npt.NDArray[np.float32]
    reconstruction: npt.NDArray[np.float32]
    similarity: float


@dataclass(frozen=True)
class Outcome:
    """What the attack on one kind of update finds in one view.

    Attributes:
        attacked: `SINGLE` or `LOCAL`.
        measure: SSIM, cosine, or tokens.
        similarity, guess: means over the attacks; 1 is exact.
        psnr: median in decibels; None for tokens, and where it is infinite.
        labels, labels_guess: share of the labels that the update reveals, and by guessing as the data's classes are distributed; None: it does not.
        pairs: of each attack, reconstructions beside the rows that they are most similar to.
        tokens: that an update of tokens revealed, of the first attack.
    """

    attacked: str
    view: View
    method: str
    measure: str
    similarity: float
    guess: float
    psnr: float | None
    labels: float | None
    labels_guess: float | None
    pairs: tuple[Pair, ...] = ()
    tokens: tuple[int, ...] = ()

    @property
    def leaked(self) -> float:
        """The share of the way from a guess to the row itself, from 0 to 1."""
        return similarity.leaked(self.similarity, self.guess)

    @property
    def verdict(self) -> str:
        if self.leaked >= RECOVERED:
            return "recovered"
        return "partly" if self.leaked >= PARTLY else "not recovered"

    def to_json(self) -> dict[str, Any]:
        return {
            "attacked": self.attacked,
            "defence": self.view.defence,
            "is_supposed": self.view.is_supposed,
            "attacker": self.view.observer,
            "method": self.method,
            "measure": self.measure,
            "similarity": self.similarity,
            "guess": self.guess,
            "leaked": self.leaked,
            "psnr_db": self.psnr,
            "labels": self.labels,
            "labels_guess": self.labels_guess,
            "verdict": self.verdict,
        }
