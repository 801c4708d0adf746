"""Coded exchange of gradients: what it sends, what it loses, and that training does not suffer."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.pretrain.parallel.data import onebit
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


HERE = "tests.models.pretrain.test_exchange"
CURVE = "tests.models.pretrain.curves:curve"
# of the plain exchange's bytes, and how much larger the loss may be
EXCHANGES = {"fp16": (0.5, 0.01), "bf16": (0.5, 0.01), "powersgd": (0.35, 0.06), "onebit": (0.2, 0.02)}


@given(blocks=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_packing_keeps_signs_and_block_means(blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(blocks * onebit.BLOCK, generator=generator)
    packed = onebit.pack(vector)
    assert packed.dtype == torch.uint8
    assert len(packed) == blocks * (onebit.BLOCK // 8 + 4)
    found = onebit.unpack(packed).view(blocks, -1)
    means = vector.view(blocks, -1).abs().mean(1, keepdim=True)
    torch.testing.assert_close(found, torch.where(vector.view(blocks, -1) >= 0, means, -means))


@given(seed=st.integers(0, 2**31))
def test_packing_twice_is_packing_once(seed: int) -> None:
    vector = torch.randn(onebit.BLOCK, generator=torch.Generator().manual_seed(seed))
    once = onebit.unpack(onebit.pack(vector))
    torch.testing.assert_close(onebit.unpack(onebit.pack(once)), once)


@pytest.mark.parametrize("processes", [3, *extended(2)])
def test_rounding_errors_are_made_up_later(processes: int) -> None:
    for result, meant, left, worst in ranks.run(processes, f"{HERE}:fed_back"):
        np.testing.assert_allclose(np.add(result, left), meant, atol=1e-3)
        assert np.abs(left).max() < worst  # errors do not add up over the calls


def test_the_warm_up_of_onebit_is_adam() -> None:
    alone = ranks.run(1, CURVE, "dp=1")[0]
    for found in ranks.run(2, CURVE, "dp=2,grad_compression=onebit,exchange_warmup=100"):
        np.testing.assert_allclose(found, alone, atol=1e-5)
    coded = ranks.run(2, CURVE, "dp=2,grad_compression=onebit,exchange_warmup=0")[0]
    assert np.abs(np.subtract(coded, alone)).max() > 1e-4


@pytest.mark.extended
@pytest.mark.parametrize(
    "kinds", [["powersgd", "onebit"], *extended(["fp16", "bf16"])], ids=["coded", "rounded"]
)
def test_losses_and_bytes_of_every_exchange(kinds: list[str]) -> None:
    plans = ["dp=2", *(f"dp=2,grad_compression={kind}" for kind in kinds)]
    plain, *compressed = ranks.run(2, "tests.models.pretrain.markov:trained", plans)[0]
    assert plain.loss < 0.4 * plain.first
    # a ring all-reduce sends 2 (N-1)/N of the gradients
    assert plain.sent_bytes == pytest.approx(200 * 4 * plain.values, rel=0.01)
    for kind, found in zip(kinds, compressed, strict=True):
        share, tolerance = EXCHANGES[kind]
        assert found.sent_bytes <= share * 1.01 * plain.sent_bytes, kind
        assert found.loss <= (1 + tolerance) * plain.loss, kind


def test_powersgd_gives_the_same_for_one_bucket_and_for_many() -> None:
    """Whatever bucket is exchanged first, both exchanges of each meet their counterparts on the other process."""
    one, other = ranks.run(2, f"{HERE}:coded_in_buckets")
    assert one == other
    whole, parted = one
    np.testing.assert_allclose(parted, whole, atol=1e-6)


@pytest.mark.extended
def test_onebit_among_four_processes() -> None:
    plain, coded = ranks.run(
        4,
        "tests.models.pretrain.markov:trained",
        ["dp=4", "dp=4,grad_compression=onebit"],
        steps=150,
        width=48,
    )[0]
    assert coded.loss <= 1.02 * plain.loss
    assert coded.sent_bytes <= plain.sent_bytes / 5


def test_onebit_refuses_what_needs_the_whole_gradient() -> None:
    with pytest.raises(ranks.RankFailed, match=r"PlanError: .*clip_norm is 1\.0, expected 0"):
        ranks.run(2, CURVE, "dp=2,grad_compression=onebit", clip_norm=1.0)
    with pytest.raises(ranks.RankFailed, match=r"PlanError: .*optimizer is 'sgd', expected 'adamw'"):
        ranks.run(2, CURVE, "dp=2,grad_compression=onebit", optimizer="sgd")


# what the processes run


def coded_in_buckets() -> list[list[float]]:
    """Sums of every param after ten steps with gradients in one bucket, and in one of each layer."""
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from models.pretrain import plan as plans
    from models.pretrain import world
    from models.pretrain.parallel.data.powersgd import PowerSGD

    found = []
    with world.join(plans.parse("dp=2")) as here:
        for megabytes in (100.0, 0.02):
            torch.manual_seed(0)
            model = nn.Sequential(
                *(layer for _ in range(12) for layer in (nn.Linear(96, 120), nn.ReLU(), nn.Linear(120, 96)))
            )
            wrapped = DistributedDataParallel(model, bucket_cap_mb=megabytes)
            wrapped.register_comm_hook(
                PowerSGD([*model.parameters()], here.group("dp"), 4, 1), PowerSGD.average
            )
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
            for step in range(10):
                rows = torch.randn(16, 96, generator=torch.Generator().manual_seed(2 * step + here.rank))
                optimizer.zero_grad()
                (wrapped(rows) - rows).square().mean().backward()
                optimizer.step()
            found.append([float(each.double().sum()) for each in model.parameters()])
    return found


def fed_back() -> tuple[list[float], list[float], list[float], float]:
    """Sums over 40 calls of what the mean was told to be and what it was, and what is left of it in the errors."""
    from models.pretrain import plan as plans
    from models.pretrain import world
    from models.pretrain.parallel.data.onebit import BLOCK, CompressedMean

    size, processes = 3 * BLOCK + 5, int(os.environ["WORLD_SIZE"])
    with world.join(plans.parse(f"dp={processes}")) as here:
        mean = CompressedMean(here.group("dp"), size)
        result, meant = torch.zeros(size), torch.zeros(size)
        worst = 0.0
        for call in range(40):
            every = [
                torch.randn(size, generator=torch.Generator().manual_seed(100 * call + rank))
                for rank in range(processes)
            ]
            result += mean(every[here.rank])
            meant += torch.stack(every).mean(0)
            worst = max(worst, float(meant.abs().max()))
        left = mean.worker_error.clone()
        torch.distributed.all_reduce(left)
        left /= processes
        chunks = torch.empty_like(left)
        torch.distributed.all_gather_single(chunks, mean.server_error)
        left += chunks
        return result.tolist(), meant.tolist(), left[:size].tolist(), worst
