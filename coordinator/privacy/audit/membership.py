"""Membership inference: whether a row was trained on, judged by its loss under the final model.

Rows of the clients are members, held-out rows are not. The attacker calls rows with a small loss members. Yeom 2018, section 3; the true positive
rate at a low false positive rate as in Carlini 2022, section IV.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.reports.metrics import auc

Floats = npt.NDArray[np.float64]

LOW_RATE = 0.01
"""False positive rate at which few members are called so with confidence."""
MAX_ROWS = 4000
"""Of either kind, drawn if there are more."""


@dataclass(frozen=True)
class Membership:
    """How well losses tell members from others.

    Attributes:
        auc: probability that a member has a smaller loss than another row; 0.5 is a guess. `auc_margin`: half of the interval in which it
            lies with 95 % probability if losses tell nothing.
        advantage: greatest difference of true and false positive rate over all thresholds; 0 is a guess.
        low_rate_tpr: share of members that are found where at most `LOW_RATE` of the others are called members; `LOW_RATE` is a guess.
    """

    members: int
    others: int
    auc: float
    auc_margin: float
    advantage: float
    low_rate_tpr: float

    @property
    def is_seen(self) -> bool:
        """Whether losses tell more than chance explains."""
        return self.auc > 0.5 + self.auc_margin

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "low_rate": LOW_RATE, "is_seen": self.is_seen}


def judge(member_losses: Floats, other_losses: Floats) -> Membership:
    """The figures of a threshold on the loss; at least one loss of either kind. Losses that are not finite count as the largest."""
    losses = np.nan_to_num(np.concatenate([member_losses, other_losses]), nan=np.inf, posinf=1e300)
    losses = np.minimum(losses, 1e300)
    n, m = len(member_losses), len(other_losses)
    is_member = np.arange(n + m) < n
    found = auc(-losses, is_member)
    assert found is not None, "there are rows of either kind"
    # Under chance the AUC is a Mann-Whitney statistic.
    margin = 1.96 * math.sqrt((n + m + 1) / (12 * n * m))
    hits, alarms = _rates(losses, is_member)
    low = hits[alarms <= LOW_RATE]
    return Membership(n, m, found, margin, float(np.max(hits - alarms)), float(low.max(initial=0.0)))


def _rates(losses: Floats, is_member: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """True and false positive rate of each threshold, from none to all rows."""
    order = np.argsort(losses, kind="stable")
    ends = np.append(np.diff(losses[order]) > 0, True)  # rows of equal loss are called alike
    hits, alarms = np.cumsum(is_member[order]), np.cumsum(~is_member[order])
    rates = [np.append(0.0, each[ends] / each[-1]) for each in (hits, alarms)]
    return rates[0], rates[1]
