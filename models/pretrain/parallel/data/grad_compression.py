"""Gradient compression between data-parallel processes: hooks that DistributedDataParallel calls with every bucket of
gradients as soon as it is full, while the backward pass continues.

    fp32      uncompressed
    fp16      rounded and averaged in fp16: 1/2 of the bytes (underflows below 6e-8)
    bf16      the same with float32's range and 8 bits of precision
    powersgd  matrices as products of two thin ones, with error feedback (`models.pretrain.parallel.data.powersgd`)
    onebit    none during the backward pass: the optimizer sends momenta as signs (`models.pretrain.parallel.data.onebit`)

The last two exchange float32 during warm-up, `exchange_warmup` per cent of the steps.
"""

# no postponed annotations: DistributedDataParallel reads those of a hook and expects types

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from models.pretrain.parallel.data.onebit import CompressedMean, OneBitAdam
from models.pretrain.parallel.data.powersgd import Gradients, PowerSGD
from models.pretrain.plan import ParallelPlan

MIN_WARMUP_STEPS = 2
"""Onebit estimates the variance in these steps."""


def warmup_steps(plan: ParallelPlan, steps: int) -> int:
    """Number of warm-up steps, without compression, of `steps`."""
    return max(MIN_WARMUP_STEPS, round(steps * plan.exchange_warmup / 100))


def register(
    module: DistributedDataParallel, optimizer: torch.optim.Optimizer, plan: ParallelPlan, steps: int
) -> PowerSGD | CompressedMean | None:
    """Registers the communication hook of `plan` on `module`; returns its rank-local state, if it has any."""
    group = module.process_group
    if isinstance(optimizer, OneBitAdam):
        module.register_comm_hook(optimizer, onebit_hook)
        return optimizer.mean
    if plan.grad_compression == "powersgd":
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        rank_state = PowerSGD(trained, group, plan.exchange_rank, warmup_steps(plan, steps))
        module.register_comm_hook(rank_state, PowerSGD.average)
        return rank_state
    if plan.grad_compression in ("fp16", "bf16"):
        hook = default_hooks.fp16_compress_hook if plan.grad_compression == "fp16" else bf16_hook
        module.register_comm_hook(group, hook)
    return None


def bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Gradients:
    """The mean of a bucket, rounded to bfloat16 for the exchange. Torch's own hook accepts only NCCL."""
    buffer = bucket.buffer()
    rounded = buffer.to(torch.bfloat16).div_(group.size())
    future = dist.all_reduce(rounded, group=group, async_op=True).get_future()
    averaged: Gradients = future.then(lambda done: buffer.copy_(done.value()[0]))
    return averaged


def onebit_hook(optimizer: OneBitAdam, bucket: GradBucket) -> Gradients:
    """The mean of a bucket during warm-up, this process's own gradients afterwards."""
    if not optimizer.compressing:
        return default_hooks.allreduce_hook(optimizer.mean.group, bucket)
    future: Gradients = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
