"""Settings that may change when a pretraining is resumed: its plan, its length, and its rates.

Settings that determine the batches of steps or the contents of checkpoints may not: data, model, seed, batch size, optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.datacenter.pretrain_config import Pretraining, resolve
from coordinator.errors import UserError
from coordinator.experiments.experiment import apply_settings
from coordinator.json_values import flatten

MUTABLE = (
    "plan",
    "checkpoint",
    "hang_seconds",
    *(
        f"train.{key}"
        for key in (
            "steps", "epochs", "lr", "weight_decay", "momentum", "beta1", "beta2", "eps", "warmup", "decay",
            "clip_norm", "outer_lr", "outer_momentum", "freeze_cache_mib",
        )
    ),
)  # fmt: skip


def apply(
    document: Mapping[str, Any], source: str, sets: Sequence[str], plan: str
) -> tuple[Pretraining, list[str]]:
    """The configuration in `document` after `--set` and `--plan`, and a line for each change.

    A non-empty `plan` replaces the whole `[plan]`, which lists every degree.

    Raises:
        UserError: naming every setting that may not change.
    """
    before = resolve(document, source)
    requested = apply_settings(before.model_dump(exclude_none=True), sets)
    if (
        requested["train"]["epochs"] != before.train["epochs"]
        and requested["train"]["steps"] == before.train["steps"]
    ):
        requested["train"]["steps"] = 0  # epochs apply if steps is 0
    after = resolve(requested | ({"plan": {}} if plan else {}), source, plan)
    old, new = (flatten(each.model_dump(mode="json")) for each in (before, after))
    plans = [str(each.parallel_plan) for each in (before, after)]
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    refused = [key for key in differing if key not in MUTABLE and key.partition(".")[0] not in MUTABLE]
    if refused:
        raise UserError(
            "\n  ".join(
                [f"{source}: cannot change when a pretraining is resumed:"]
                + [f"{key} was {old.get(key)!r}, requested is {new.get(key)!r}" for key in refused]
                + [f"settings that can: {', '.join(MUTABLE)}; for all others, start again with another --out"]
            )
        )
    lines = [
        f"{key}: {old.get(key)} -> {new.get(key)}" for key in differing if key.partition(".")[0] != "plan"
    ]
    return after, [*lines, *([f"plan: {plans[0]} -> {plans[1]}"] if plans[0] != plans[1] else [])]
