"""Collectives taken away, one kind of parallelism at a time: what a parity test must notice. Runs in the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import _functional_collectives
from torch.distributed.pipelining import schedules

from models.pretrain import forward_backward
from models.pretrain.parallel.model import context, experts


@contextmanager
def dp() -> Iterator[None]:
    """Gradients stay with whoever computed them."""
    with patch.object(forward_backward, "_gradient_sync", lambda module, now: module.no_sync()):
        yield


@contextmanager
def tp() -> Iterator[None]:
    """Partial sums are taken for sums."""
    with patch.object(_functional_collectives, "all_reduce", lambda x, *args, **kwargs: x):
        yield


@contextmanager
def pp() -> Iterator[None]:
    """Nothing arrives: stages compute on zeros."""

    def no_exchange(operations: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        for operation in operations:
            if operation.op is torch.distributed.irecv:
                operation.tensor.data.zero_()
        return []

    with patch.object(schedules, "_batch_p2p", no_exchange):
        yield


@contextmanager
def cp() -> Iterator[None]:
    """Parts of sequences are taken for heads of whole ones."""
    with patch.object(context, "all_to_all_single_autograd", lambda x, *args: x):
        yield


@contextmanager
def ep() -> Iterator[None]:
    """Tokens meet the experts of their own process, whichever they are meant for."""

    def stay(got: torch.Tensor, sent: torch.Tensor, group: object) -> None:
        got.copy_(sent)

    with (
        patch.object(experts.dist, "all_to_all_single", stay),
        patch.object(experts, "all_to_all_single_autograd", lambda x, *args: x),
    ):
        yield
