"""Optimizer state of every data-parallel variant goes on under any other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.pretrain.plan import parse
from tests.models.pretrain.resumed import SAVED_AT, drop_after
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow

SAVED, RESUMED = "tests.models.pretrain.resumed:saved", "tests.models.pretrain.resumed:resumed"
ZERO1, DISK, NESTEROV, ONEBIT = (
    "dp=2,zero=1",
    "dp=2,zero=3,offload=disk",
    "dp=2,sync_every=1,outer=nesterov",
    "dp=2,grad_compression=onebit,exchange_warmup=0",
)
POWERSGD, LOCAL = "dp=2,grad_compression=powersgd,exchange_warmup=0", "dp=2,sync_every=2"
REMEMBERING = [
    [POWERSGD, ONEBIT],
    [LOCAL, f"{LOCAL},outer=nesterov", NESTEROV],
    [f"{LOCAL},tp=2", f"{LOCAL},pp=2"],
]
TRAINED = "tests.models.pretrain.resumed:trained"


def _resumed(plan: str, processes: int, folders: dict[str, Path], **options: Any) -> dict[str, list[float]]:
    found = ranks.run(processes, RESUMED, plan, folders, **options)[0]
    return {name: losses for name, (losses, _) in found.items()}


@pytest.mark.extended
def test_zero1_and_disk_go_on_under_any_plan(tmp_path: Path) -> None:
    folders = {plan: tmp_path / plan for plan in (ZERO1, DISK)}
    losses = {plan: ranks.run(2, SAVED, plan, folder)[0] for plan, folder in folders.items()}
    for plan, processes in (("dp=1", 1), (ZERO1, 2), ("dp=3,zero=1", 3), (DISK, 2)):
        for saved, found in _resumed(plan, processes, folders).items():
            np.testing.assert_allclose(
                found, losses[saved][SAVED_AT:], atol=1e-5, err_msg=f"{saved} -> {plan}"
            )


def test_outer_momentum_is_kept(tmp_path: Path) -> None:
    # nothing inside that would be each process's own
    inner = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0}
    losses = ranks.run(2, SAVED, NESTEROV, tmp_path, **inner)[0][SAVED_AT:]
    found = _resumed(NESTEROV, 2, {"": tmp_path}, **inner)[""]
    np.testing.assert_allclose(found, losses, atol=1e-5)
    without = _resumed("dp=2,sync_every=1", 2, {"": tmp_path}, **inner)[""]
    assert np.abs(np.subtract(without, losses)).max() > 1e-3


@pytest.mark.parametrize(
    "plans",
    [REMEMBERING[0], *extended(*REMEMBERING[1:])],
    ids=["2 processes", "2 processes, local steps", "4 processes"],
)
def test_the_state_of_an_exchange_survives_a_resume(plans: list[str], tmp_path: Path) -> None:
    """Saved between two agreements of sync_every, and after the first step that powersgd and onebit code."""
    processes, folders = parse(plans[0]).processes, [tmp_path / plan for plan in plans]
    straight = ranks.run(processes, TRAINED, plans, [None] * len(plans))[0]
    checkpointed = ranks.run(processes, TRAINED, plans, folders)[0]
    for folder in folders:
        drop_after(folder, SAVED_AT)
    resumed = ranks.run(processes, TRAINED, plans, folders)[0]
    for plan, full, saved, (losses, total, notices) in zip(
        plans, straight, checkpointed, resumed, strict=True
    ):
        assert saved == full, plan  # saving changes nothing
        np.testing.assert_allclose(losses, full[0][SAVED_AT:], atol=1e-6, err_msg=plan)
        assert total == pytest.approx(full[1], abs=1e-4)
        assert not notices


@pytest.mark.extended
def test_another_plan_says_that_it_goes_on_without(tmp_path: Path) -> None:
    cases = [
        (
            POWERSGD,
            "dp=2",
            r"plan dp=2,grad_compression=powersgd,exchange_warmup=0 \(powersgd of rank 4, 2",
        ),
        (LOCAL, "dp=2", "plan dp=2,sync_every=2 \\("),
        (LOCAL, "dp=2,sync_every=3", "does not fit plan dp=2,sync_every=3"),
        ("dp=2", POWERSGD, ""),
    ]
    before, after, expected_words = zip(*cases, strict=True)
    folders = [tmp_path / str(number) for number in range(len(cases))]
    straight = ranks.run(2, TRAINED, before, folders)[0]
    for folder in folders:
        drop_after(folder, SAVED_AT)
    resumed = ranks.run(2, TRAINED, after, folders)[0]
    for words, full, (losses, _, notices) in zip(expected_words, straight, resumed, strict=True):
        assert len(notices) == bool(words)
        assert not words or re.search(words, notices[0])
        np.testing.assert_allclose(losses, full[0][SAVED_AT:], rtol=0.05)
