"""Block-sparse attention is dense attention under its mask, for fewer operations, and is spread as dense is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from models.pretrain.profiling import flops_of_row
from models.zoo import gpt
from models.zoo.sparse import BlockSparseAttention
from tests.support import ranks
from tests.support.long import extended

MODEL = {"attention": "block_sparse", "attention_block": 2, "attention_local": 2, "attention_stride": 3}


def visible(length: int, block: int, local: int, stride: int) -> torch.Tensor:
    """Whether a query [T] sees a key [T], pair by pair."""
    fits = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        for key in range(query + 1):
            apart = query // block - key // block
            fits[query, key] = apart < local or apart % stride == 0
    return fits


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 21), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_equals_dense_attention_under_the_same_mask(length: int, block: int, local: int, stride: int) -> None:
    torch.manual_seed(0)
    dense_inputs = [torch.randn(2, 3, length, 4, requires_grad=True) for _ in range(3)]
    inputs = [each.detach().clone().requires_grad_() for each in dense_inputs]
    query, key, value = dense_inputs
    dense = F.scaled_dot_product_attention(query, key, value, visible(length, block, local, stride))
    sparse = BlockSparseAttention(block, local, stride)(*inputs)
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=0)
    weights = torch.randn_like(dense)
    torch.autograd.backward([(dense * weights).sum(), (sparse * weights).sum()])
    for mine, other in zip(inputs, dense_inputs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-5, rtol=0)


def test_only_visible_blocks_are_multiplied() -> None:
    length, width, layers, block, local, stride = 128, 32, 2, 8, 2, 4
    sizes: dict[str, Any] = {"width": width, "layers": layers, "heads": 2}
    dense, _ = flops_of_row(gpt.spec((length,), 16, **sizes))
    options: dict[str, Any] = {"attention_block": block, "attention_local": local, "attention_stride": stride}
    sparse, how = flops_of_row(gpt.spec((length,), 16, **sizes, attention="block_sparse", **options))
    pairs = sum(map(len, BlockSparseAttention(block, local, stride).seen(length // block))) * block**2
    assert how == "operators counted"
    assert dense - sparse == 12 * layers * width * (length**2 - pairs)
    assert pairs < length**2 / 4


def test_an_attention_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'sparse', expected one of full, block_sparse"):
        gpt.spec((8,), 16, attention="sparse")
    with pytest.raises(ValueError, match="attention_stride is at least 1"):
        gpt.spec((8,), 16, attention_stride=0)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["cp=2", *extended("tp=2", "pp=2")])
def test_processes_train_it_as_one_does(plan: str) -> None:
    (alone,) = ranks.run(1, "tests.models.pretrain.test_sparse_attention:curve", "dp=1", MODEL)
    several = ranks.run(2, "tests.models.pretrain.test_sparse_attention:curve", plan, MODEL)[0]
    np.testing.assert_allclose(several, alone, atol=1e-5)
    (dense,) = ranks.run(1, "tests.models.pretrain.test_sparse_attention:curve", "dp=1", {})
    assert np.abs(np.subtract(dense, alone)).max() > 1e-4


def curve(plan: str, model: dict[str, object]) -> list[float]:
    from tests.models.pretrain import curves

    (found,) = curves.curves([curves.Case(plan, model, {"steps": 3})])
    return found
