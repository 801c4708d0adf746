"""Optimizer state of every data-parallel variant goes on under any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.pretrain.resumed import SAVED_AT
from tests.support import ranks

pytestmark = pytest.mark.slow

SAVED, RESUMED = "tests.models.pretrain.resumed:saved", "tests.models.pretrain.resumed:resumed"
ZERO1, DISK, NESTEROV, ONEBIT = (
    "dp=2,zero=1",
    "dp=2,zero=3,offload=disk",
    "dp=2,sync_every=1,outer=nesterov",
    "dp=2,exchange=onebit,exchange_warmup=0",
)


def _resumed(plan: str, processes: int, folders: dict[str, Path], **options: Any) -> dict[str, list[float]]:
    found = ranks.run(processes, RESUMED, plan, folders, **options)[0]
    return {name: losses for name, (losses, _) in found.items()}


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


def test_onebit_goes_on_compressing_with_errors_begun_anew(tmp_path: Path) -> None:
    losses = ranks.run(2, SAVED, ONEBIT, tmp_path)[0][SAVED_AT:]
    found = _resumed(ONEBIT, 2, {"": tmp_path})[""]
    assert found[0] == pytest.approx(losses[0], abs=1e-5)  # of the params as saved
    np.testing.assert_allclose(found, losses, rtol=0.05)
    alone = _resumed("dp=1", 1, {"": tmp_path})[""]
    assert alone[0] == pytest.approx(losses[0], abs=1e-5)
