"""Every way to share out params, gradients and optimizer state among processes trains what one process trains."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.pretrain.curves import Case
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
HERE = "tests.models.pretrain.test_data_parallel"
CURVE = "tests.models.pretrain.curves:curve"
CURVES = "tests.models.pretrain.curves:curves"


@pytest.fixture(scope="module")
def alone() -> list[float]:
    found: list[float] = ranks.run(1, CURVE, "dp=1")[0]
    return found


PLANS = {
    1: ["dp=1,zero=3,offload=disk"],
    2: [
        "dp=2,zero=1",
        "dp=2,zero=1,microbatches=2",
        "dp=2,zero=2,microbatches=2",
        "dp=2,zero=3,microbatches=2",
        "dp=2,zero=3,offload=cpu",
        "dp=2,zero=3,offload=disk",
    ],
    3: ["dp=3,zero=1", "dp=3,zero=3,offload=disk"],
    4: ["dp=2,cp=2,zero=1", "dp=4,zero=2,shards=2,microbatches=2", "dp=2,tp=2,zero=3,offload=disk"],
}


@pytest.mark.parametrize("processes", [1, 2, *extended(3, 4)])
def test_sharding_trains_what_one_process_trains(processes: int, alone: list[float]) -> None:
    cases = [Case(plan) for plan in PLANS[processes]]
    for found in ranks.run(processes, CURVES, cases):
        for case, losses in zip(cases, found, strict=True):
            np.testing.assert_allclose(losses, alone, atol=TOLERANCE, err_msg=case.plan)


def test_clipping_and_sgd_under_zero1() -> None:
    options = {"optimizer": "sgd", "lr": 0.1, "clip_norm": 0.5}
    alone = ranks.run(1, CURVE, "dp=1", **options)[0]
    for found in ranks.run(2, CURVE, "dp=2,zero=1", **options):
        np.testing.assert_allclose(found, alone, atol=TOLERANCE)


@pytest.mark.parametrize("processes", [2, *extended(4)])
def test_optimizer_state_exists_once(processes: int) -> None:
    found = ranks.run(processes, f"{HERE}:state_values", f"dp={processes},zero=1")
    full = found[0]["whole"]
    held = [each["held"] for each in found]
    assert sum(held) == full
    assert max(held) <= full / processes * 1.05


def test_params_are_alike_and_foreign_gradients_gone_under_zero1() -> None:
    first, second = ranks.run(2, f"{HERE}:state_values", "dp=2,zero=1")
    assert first["params"] == second["params"]
    assert first["gradients"] + second["gradients"] == first["tensors"]


def test_a_process_may_own_nothing() -> None:
    from models.pretrain.parallel.data.zero1 import owned

    assert owned([5], 3) == [[0], [], []]


def test_owners_are_balanced() -> None:
    from models.pretrain.parallel.data.zero1 import owned

    sizes = [7, 7, 6, 6, 5, 5, 4, 4, 4]
    shares = owned(sizes, 3)
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    assert max(sum(sizes[index] for index in share) for share in shares) <= 16 * 4 / 3


def test_nothing_of_params_and_state_stays_resident_on_disk() -> None:
    for before, after, size in ranks.run(2, f"{HERE}:resident", "dp=2,zero=3,offload=disk"):
        assert size > 500_000
        assert before > 0.5 * size  # touched, as by a step
        assert after == 0


def test_a_file_goes_with_the_last_tensor_that_uses_it() -> None:
    import torch

    from models.pretrain.parallel.data import offload

    tensor = offload.mapped(torch.arange(5000.0))
    offload.release(tensor)
    view = tensor[10:20]
    del tensor
    assert offload.is_mapped(view)
    assert view.tolist() == list(range(10, 20))
    address = view.untyped_storage().data_ptr()
    del view
    assert address not in offload._mapped


def test_gradients_travel_while_others_are_still_computed() -> None:
    events = ranks.run(2, f"{HERE}:order", 64 * 1024)[0]
    exchanges = [place for place, event in enumerate(events) if event == "exchange"]
    assert len(exchanges) > 2
    assert exchanges[0] < events.index("last gradient")


def test_one_bucket_for_all_travels_at_the_end() -> None:
    events = ranks.run(2, f"{HERE}:order", 1 << 30)[0]
    assert events == ["last gradient", "exchange"]


# what the processes run


def state_values(plan: str) -> dict[str, Any]:
    training = _trained(plan)
    held = sum(
        value.numel()
        for optimizer in training.optimizers
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )
    parameters = [p.detach() for part in training.parallel.parts for p in part.parameters()]
    return {
        "held": held,
        "whole": 2 * sum(p.numel() for p in parameters),
        "params": [float(p.double().sum()) for p in parameters],
        "gradients": sum(p.grad is not None for part in training.parallel.parts for p in part.parameters()),
        "tensors": len(parameters),
    }


def resident(plan: str) -> tuple[int, int, int]:
    """Bytes of the deleted files that are resident with all tensors touched, and after a step; and their size."""
    from models.pretrain import plan as plans
    from models.pretrain import trainer, world
    from tests.models.pretrain.curves import settings, small_gpt, tokens

    with world.join(plans.parse(plan)) as here:
        training = trainer.build(small_gpt(width=64), tokens(), settings(), here, seed=5)
        training.train_step()
        optimizer = training.optimizers[0]
        for parameter, state in optimizer.state.items():
            for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
                float(tensor.to_local().sum())  # type: ignore[attr-defined]
        before, size = _resident()
        training.train_step()
        return before, _resident()[0], size


def order(bucket_bytes: int) -> list[str]:
    """What happens in the third backward pass, buckets having settled."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from models.pretrain import plan as plans
    from models.pretrain import trainer, world
    from models.pretrain.parallel.data import buckets
    from tests.models.pretrain.curves import settings, small_gpt, tokens

    buckets.BUCKET_BYTES = bucket_bytes
    events: list[str] = []

    def hook(group: Any, bucket: Any) -> Any:
        events.append("exchange")
        return default_hooks.allreduce_hook(group, bucket)

    hook.__annotations__.clear()
    with world.join(plans.parse("dp=2")) as here:
        training = trainer.build(small_gpt(width=64), tokens(), settings(), here, seed=5)
        module: Any = training.parallel.parts[0]
        module.register_comm_hook(here.group("data"), hook)
        first: torch.Tensor = next(module.parameters())  # the embedding, whose gradient comes last
        first.register_post_accumulate_grad_hook(lambda _: events.append("last gradient"))
        for _ in range(3):
            events.clear()
            training.train_step()
    return events


def _trained(plan: str) -> Any:
    from models.pretrain import plan as plans
    from models.pretrain import trainer, world
    from tests.models.pretrain.curves import settings, small_gpt, tokens

    with world.join(plans.parse(plan)) as here:
        training = trainer.build(small_gpt(), tokens(), settings(), here, seed=5)
        for _ in range(2):
            training.train_step()
        return training


def _resident() -> tuple[int, int]:
    """Resident and whole bytes of this process's mapped files that have no name any more."""
    found, size, ours = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            ours = line.endswith("(deleted)") and tempfile.gettempdir() in line
        elif ours and key == "Rss:":
            found += int(rest[0]) * 1024
        elif ours and key == "Size:":
            size += int(rest[0]) * 1024
    return found, size
