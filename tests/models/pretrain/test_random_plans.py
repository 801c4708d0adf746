"""Random plans, options and models against one plain process: the same losses, or a refusal.

make test-long                                                       hundreds of them
FEDLOOP_TEST_LONG=1 .venv/bin/pytest tests/models/pretrain/test_random_plans.py -k "4-3"   some of these
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from tests.models.pretrain.random_plans import APPROXIMATE, Trial, draw
from tests.support import ranks

pytestmark = pytest.mark.slow

LOSSES = "tests.models.pretrain.random_plans:losses"
TOLERANCE = 1e-4
TRIALS = 20
SEEDS = {2: 10, 3: 4, 4: 16}
"""By number of processes."""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("processes", "seed"), [(processes, seed) for processes, seeds in SEEDS.items() for seed in range(seeds)]
)
def test_a_random_plan_trains_as_one_process_or_is_refused(processes: int, seed: int) -> None:
    trials = list(itertools.islice(draw(seed, processes), TRIALS))
    found = ranks.run(processes, LOSSES, trials)
    alone = ranks.run(1, LOSSES, [dataclasses.replace(trial, plan="dp=1") for trial in trials])[0]
    wrong = [
        f"{trial}: {why}"
        for place, (trial, plain) in enumerate(zip(trials, alone, strict=True))
        for why in [difference(trial, [rank[place] for rank in found], plain)]
        if why
    ]
    assert not wrong, "\n".join(wrong)
    assert sum(isinstance(result, list) for result in found[0]) > TRIALS / 2  # most are no refusals


def difference(trial: Trial, found: list[list[float] | str], plain: list[float] | str) -> str:
    """What is wrong with the losses of a trial's processes; nothing where they are refused."""
    if isinstance(found[0], str):
        return ""
    if isinstance(plain, str):
        return f"trains, one process is refused: {plain}"
    if any(losses != found[0] for losses in found):
        return f"processes tell different losses: {found}"
    mine, theirs = np.asarray(found[0], float), np.asarray(plain, float)
    off = np.abs(mine - theirs)
    if not np.isfinite(mine).all():
        return f"not finite: {mine}"
    # before any step has been taken all are alike but for what is rounded or dropped
    allowed = np.full_like(theirs, TOLERANCE) if trial.exact else APPROXIMATE * theirs
    return f"differs by up to {off.max():.2g}: {mine}, expected {theirs}" if (off > allowed).any() else ""
