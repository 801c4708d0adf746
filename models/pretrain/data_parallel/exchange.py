"""How gradients are coded on their way between data-parallel processes: hooks that DistributedDataParallel calls with
every bucket of gradients as soon as it is full, while the backward pass goes on.

    fp32      as they are
    fp16      rounded, averaged in that precision: 1/2 of the bytes (underflows below 6e-8)
    bf16      the same with float32's range and 8 bits of precision
    powersgd  matrices as products of two thin ones, with error feedback (Vogels 2019)
    onebit    none during the backward pass: momenta as signs in the optimizer (Tang 2021, `models.pretrain.data_parallel.onebit`)

The last two exchange float32 in the first part of a training, `exchange_warmup` per cent of its steps.
"""

# no postponed annotations: DistributedDataParallel reads those of a hook and expects types

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from models.pretrain.data_parallel.onebit import OneBitAdam
from models.pretrain.plan import ParallelPlan

Gradients = torch.futures.Future[torch.Tensor]

LEAST_WARMUP = 2
"""Steps: DistributedDataParallel rearranges its buckets after the first, and PowerSGD keeps errors by bucket."""


def warmup_steps(plan: ParallelPlan, steps: int) -> int:
    """In how many of `steps` gradients travel as they are."""
    return max(LEAST_WARMUP, round(steps * plan.exchange_warmup / 100))


def register(
    module: DistributedDataParallel, optimizer: torch.optim.Optimizer, plan: ParallelPlan, steps: int
) -> None:
    """Makes `module` exchange its gradients as `plan` says."""
    group = module.process_group
    hooks: dict[str, tuple[object, Callable[[Any, Any], Gradients]]] = {
        "fp16": (group, default_hooks.fp16_compress_hook),
        "bf16": (group, bf16_hook),
        "onebit": (optimizer, onebit_hook),
    }
    if plan.exchange == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=plan.exchange_rank,
            start_powerSGD_iter=warmup_steps(plan, steps),
            orthogonalization_epsilon=1e-8,
        )
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif plan.exchange in hooks:
        module.register_comm_hook(*hooks[plan.exchange])


def bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Gradients:
    """The mean of a bucket, rounded to bfloat16 on the way. Torch's own refuses everything but NCCL."""
    buffer = bucket.buffer()
    rounded = buffer.to(torch.bfloat16).div_(group.size())
    future = dist.all_reduce(rounded, group=group, async_op=True).get_future()
    averaged: Gradients = future.then(lambda done: buffer.copy_(done.value()[0]))
    return averaged


def onebit_hook(optimizer: OneBitAdam, bucket: GradBucket) -> Gradients:
    """The mean of a bucket in the warm-up, this process's own gradients afterwards."""
    if not optimizer.compressing:
        return default_hooks.allreduce_hook(optimizer.mean.group, bucket)
    future: Gradients = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
