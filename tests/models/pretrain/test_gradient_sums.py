"""Gradients summed during the backward pass are those summed after it, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import pytest
import torch

from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.dtensor import local_tensor
from models.pretrain.parallel.data import buckets as bucket_sizes
from models.pretrain.parallel.data import gradient_sums
from tests.models.pretrain.curves import settings, spec_of, tokens
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow

SUMMED = "tests.models.pretrain.test_gradient_sums:summed"
OVERLAPPED = ["dp=2,tp=2,sequence=true,microbatches=2", "dp=2,pp=2,schedule=1f1b"]
MORE = ["dp=2,pp=2,schedule=interleaved", "dp=2,tp=2,activation_checkpoint=full", "dp=2,pp=2,schedule=gpipe"]
AFTER = ["dp=2,pp=2,schedule=zbv"]


@pytest.mark.parametrize(("texts", "during"), [(OVERLAPPED, True), *extended((MORE, True), (AFTER, False))])
def test_overlapped_sums_are_the_sums(texts: list[str], during: bool) -> None:
    for rank in ranks.run(4, SUMMED, texts):
        for text, (sent, buckets, same) in zip(texts, rank, strict=True):
            assert same, text
            assert buckets > 2
            assert (sent > 1) == during, text


def summed(texts: Sequence[str]) -> list[tuple[int, int, bool]]:
    """Runs in the ranks. By plan: buckets sent before the end of the pass, buckets, whether sums are those without overlap."""
    with world.join(plans.parse(texts[0])) as first, patch.object(bucket_sizes, "SMALLEST_BUCKET_BYTES", 64):
        return [_summed(world.build(plans.parse(text), first.device)) for text in texts]


def _summed(here: world.World) -> tuple[int, int, bool]:
    found: list[list[torch.Tensor]] = []
    sent = buckets = 0
    for overlap in (True, False):
        kind = partial(gradient_sums.GradientSums, overlap=overlap)
        with patch.object(trainer, "GradientSums", kind):
            training = trainer.build(spec_of(), tokens(), settings(), here, seed=5)
        for step in range(2):  # twice: everything must be as new for the next
            for optimizer in training.optimizers:
                optimizer.zero_grad()
            training.run(training.batches[step])
            if overlap:
                sent, buckets = training.sums._next, len(training.sums._buckets)
            else:
                assert training.sums._next == 0
            training.sums.finish()
        gradients = [p.grad for part in training.parallel.parts for p in part.parameters()]
        found.append([local_tensor(gradient).clone() for gradient in gradients if gradient is not None])
    same = len(found[0]) == len(found[1]) and all(map(torch.equal, *found))
    return sent, buckets, same
