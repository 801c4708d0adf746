"""What ZeRO shares out is shared out: bytes of params, gradients and optimizer state of one process among N.

Rajbhandari 2020, figure 1, with Ψ params, all in float32 and Adam (K = 8 bytes): (4 + 4 + K) Ψ on every process
without, (4 + 4 + K / N) Ψ with zero=1, (4 + (4 + K) / N) Ψ with zero=2, (4 + 4 + K) Ψ / N with zero=3. FSDP keeps zero=2
as zero=3 between steps and gathers params for the length of a step, when the rest is as in the figure.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from models.pretrain import trainer, world
from models.pretrain.data.batches import Arrays
from models.pretrain.plan import parse
from models.pretrain.planner.live_memory import LiveBytes
from models.zoo import gpt
from tests.models.pretrain.curves import settings, small_gpt, tokens
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow

Bytes = tuple[int, int, int]
TARGET = "tests.models.pretrain.test_memory_shares:state_bytes"
SLACK = 0.05
LAYERS = 8


def state_bytes(plan: str) -> Bytes:
    """Bytes of params, gradients, optimizer state that this process holds after a step. Runs in the ranks."""
    with world.join(parse(plan)) as here:
        training = trainer.build(small_gpt(), tokens(), settings(), here, seed=5)
        run, gradients = training.run, 0

        def watched(batch: object) -> torch.Tensor:
            nonlocal gradients
            loss = run(batch)  # type: ignore[arg-type]
            gradients = _bytes(p.grad for p in params if p.grad is not None)
            return loss

        training.run = watched
        params = [p for part in training.parallel.parts for p in part.parameters()]
        training.train_step()
        states = [state for optimizer in training.optimizers for state in optimizer.state.values()]
        moments = (
            value
            for state in states
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim()
        )
        return _bytes(params), gradients, _bytes(moments)


def peak_bytes(plan: str) -> tuple[int, int, int]:
    """Bytes alive at the worst moment of a step of plain SGD, of all params, and of one layer's. Runs in the ranks."""
    spec = gpt.spec((4,), 48, width=64, layers=LAYERS, heads=4)
    with torch.device("meta"):
        whole = spec.module()
    layer = _bytes(whole.get_submodule("layers.0").parameters())
    rows = Arrays(*(np.zeros((8, 4), np.int32) for _ in range(2)))
    with world.join(parse(plan)) as here:
        sgd = settings(optimizer="sgd", momentum=0.0, batch_size=4, steps=3)
        training = trainer.build(spec, rows, sgd, here, seed=5)
        training.train_step()
        with LiveBytes(p for part in training.parallel.parts for p in part.parameters()) as live:
            training.train_step()
            live.reset_peak()
            training.train_step()
        return live.peak, _bytes(whole.parameters()), layer


@pytest.mark.parametrize(
    ("plan", "layers"),
    [
        ("dp=2,zero=3", 2.1),
        # a later micro-batch has its activations beside all gradients
        *extended(("dp=2,zero=3,microbatches=2", 3)),
    ],
)
def test_a_step_with_zero3_needs_two_layers_beside_the_shares(plan: str, layers: float) -> None:
    for peak, params, layer in ranks.run(2, "tests.models.pretrain.test_memory_shares:peak_bytes", plan):
        shares = 2 * params / 2  # params and gradients
        assert peak <= shares + layers * layer
        assert peak >= shares


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of what this process has of them; padding of uneven shards is no part of it."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in local)


@pytest.fixture(scope="module")
def alone() -> Bytes:
    found: Bytes = ranks.run(1, TARGET, "dp=1")[0]
    params, gradients, moments = found
    assert gradients == params and moments == 2 * params
    return found


@pytest.mark.parametrize("n", [2, *extended(4)])
def test_zero3_shares_out_params_gradients_and_optimizer_state(n: int, alone: Bytes) -> None:
    found = ranks.run(n, TARGET, f"dp={n},zero=3")
    for mine in found:
        assert sum(mine) <= (1 / n + SLACK) * sum(alone)
    for kind in range(3):  # nothing is lost either
        assert sum(mine[kind] for mine in found) == alone[kind]


def test_zero2_shares_out_gradients_and_optimizer_state(alone: Bytes) -> None:
    for mine in ranks.run(2, TARGET, "dp=2,zero=2"):
        assert sum(mine[1:]) <= (1 / 2 + SLACK) * sum(alone[1:])


def test_zero1_shares_out_optimizer_state_only(alone: Bytes) -> None:
    found = ranks.run(2, TARGET, "dp=2,zero=1")
    for mine in found:
        assert mine[:2] == alone[:2]
        assert mine[2] <= (1 / 2 + 2 * SLACK) * alone[2]  # whole params, by size
    assert sum(mine[2] for mine in found) == alone[2]


def test_without_zero_every_process_has_everything(alone: Bytes) -> None:
    assert ranks.run(2, TARGET, "dp=2") == [alone, alone]


def test_hybrid_sharding_shares_out_within_a_group(alone: Bytes) -> None:
    for mine in ranks.run(4, TARGET, "dp=4,zero=3,shards=2"):
        assert (1 / 2 - SLACK) * sum(alone) <= sum(mine) <= (1 / 2 + SLACK) * sum(alone)
